"""What of a drafter with Gemma's blocks is refused before vLLM builds it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from carryover.errors import CarryoverError
from carryover.serving.checkpoint import check_tensors
from carryover.serving.drafter_config import DrafterSettings
from tests.training import released as write

FIELD = {"enabled": False, "slot_layout": "anchor_first", "blocks": "gemma4", "qk_norm": True}


def settings(rank: int = 4, **changes: Any) -> DrafterSettings:
    return DrafterSettings.of(SimpleNamespace(carryover=FIELD | changes, markov_rank=rank))


def test_what_serves_it() -> None:
    assert settings().method == "dspark"
    assert settings().architecture == "Gemma4CarryoverDSparkModel"
    assert settings().needs_worker is None
    assert "no Markov head" in str(settings(rank=0).needs_worker)
    assert "carries" in str(settings(enabled=True).needs_worker)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": "gemma3"}, "`carryover.blocks` is 'gemma3', not qwen3 or gemma4"),
        ({"slot_layout": "fill_in"}, "gemma4 and `carryover.slot_layout` is fill_in"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CarryoverError, match=message):
        settings(**changes)


@pytest.mark.parametrize(
    "name",
    [
        "layers.1.layer_scalar",
        "layers.0.pre_feedforward_layernorm.weight",
        "layers.0.post_feedforward_layernorm.weight",
        "layers.1.self_attn.k_proj.weight",
    ],
)
def test_a_missing_tensor_is_named(name: str) -> None:
    """vLLM's loader would leave it as it was initialised."""
    tensors = write.gemma_backbone(1)
    shapes: dict[str, Any] = {
        "blocks": "gemma4", "width": 2 * write.HIDDEN, "hidden": write.HIDDEN, "layers": 2,
        "vocabulary": 320, "draft_vocabulary": None, "carries": False, "markov_rank": 0,
    }  # fmt: skip
    check_tensors(tensors, **shapes)
    assert isinstance(tensors.pop(name), torch.Tensor)
    with pytest.raises(CarryoverError, match=f"no tensor {name}"):
        check_tensors(tensors, **shapes)
