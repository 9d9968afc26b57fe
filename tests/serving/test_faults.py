"""The faults of vLLM 0.32 on CPU: there without the correction, gone with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving.harness import run_script
from tests.serving.reference import rms_norm


def run_ahead(folder: Path) -> dict[str, Any]:
    return run_script("faults.py", [], folder / "results.pt")


@pytest.fixture(scope="module")
def found(ran_ahead: dict[str, Any]) -> dict[str, Any]:
    return ran_ahead


def test_context_keys_take_the_first_layers_norm_weight(found: dict[str, Any]) -> None:
    keys, weights = found["keys"], found["weights"]
    right = torch.stack([rms_norm(keys[i], weights[i], 1e-5) for i in range(3)])
    first_weight = rms_norm(keys, weights[0], 1e-5)
    torch.testing.assert_close(found["keys, stock"], first_weight)
    assert (found["keys, stock"] - right).abs().max() > 0.1
    torch.testing.assert_close(found["keys, corrected"], right)


@pytest.mark.parametrize(
    ("name", "right"), [("temperature", [0.5, 0.5, 9, 9, 9]), ("top_k", [3, 3, 9, 9, 9])]
)
def test_sampling_parameters_are_never_written(
    found: dict[str, Any], name: str, right: list[float]
) -> None:
    assert found[f"{name}, corrected"].tolist() == right
    stock = found[f"{name}, stock"].tolist()
    assert stock == [-7] * 5
