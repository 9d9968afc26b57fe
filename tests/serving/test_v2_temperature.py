"""The V2 runner at T = 1: sampled tokens follow the target's distribution, enumerated exactly.

With probabilistic drafts that takes the noise of round_seeds: the same drafter with stock vLLM's
noise is a worked example of the bias.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving import checkpoints
from tests.serving.harness import run_jobs
from tests.serving.reference import DenseTarget
from tests.serving.test_temperature import (
    ALPHA,
    PROMPT,
    TOKENS,
    VOCABULARY,
    _enumerate,
    _p_value,
)

SAMPLES = 1000
PROBABILISTIC = {"draft_sample_method": "probabilistic"}
DSPARK: dict[str, Any] = {"slot_layout": "anchor_first", "markov_rank": 4}
# name -> (arguments of write_drafter, further keys of the job)
DRAFTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dflash": ({}, {}),
    "dflash, probabilistic": ({}, {"speculative": PROBABILISTIC}),
    "dflash, probabilistic, unsalted": ({}, {"speculative": PROBABILISTIC, "unsalted": True}),
    "dspark": (DSPARK, {"speculative": {"method": "dspark"}}),
    "dspark, probabilistic": (DSPARK, {"speculative": PROBABILISTIC | {"method": "dspark"}}),
}
BIASED = "dflash, probabilistic, unsalted"


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.Tensor, dict[str, dict]]:
    """Probabilities [VOCABULARY] * TOKENS, and vLLM's results."""
    folder: Path = tmp_path_factory.mktemp("v2-temperature")
    target = checkpoints.write_target(folder / "target", seed=3, vocabulary=VOCABULARY)
    jobs = [
        {
            "target": target,
            "drafter": checkpoints.write_drafter(
                folder / f"drafter-{index}",
                seed=4,
                vocabulary=VOCABULARY,
                proposals=3,
                carry_scale=3.0,
                **arguments,
            ),
            "proposals": 3,
            "prompts": [PROMPT] * SAMPLES,
            "sampling": {"temperature": 1.0, "max_tokens": TOKENS, "ignore_eos": True},
            "llm": {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 64},
        }
        | keys
        for index, (arguments, keys) in enumerate(DRAFTERS.values())
    ]
    results = run_jobs(folder, jobs, v2=True)
    return _enumerate(DenseTarget.load(target, [0])), dict(zip(DRAFTERS, results, strict=True))


def lowest_p_value(everything: tuple[torch.Tensor, dict[str, dict]], name: str) -> float:
    """Over the pairs of neighbouring tokens."""
    joint, results = everything
    samples = torch.tensor(results[name]["outputs"])
    values = []
    for first in range(TOKENS - 1):
        others = [axis for axis in range(TOKENS) if axis not in (first, first + 1)]
        cells = samples[:, first] * VOCABULARY + samples[:, first + 1]
        counts = torch.bincount(cells, minlength=VOCABULARY**2)
        values.append(_p_value(counts, joint.sum(dim=others).flatten()))
    return min(values)


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != BIASED])
def test_samples_follow_the_target(everything: tuple, name: str) -> None:
    assert lowest_p_value(everything, name) > ALPHA


def test_unsalted_noise_is_biased(everything: tuple) -> None:
    """And so the test above would notice."""
    assert lowest_p_value(everything, BIASED) < ALPHA


@pytest.mark.parametrize("name", DRAFTERS)
def test_proposals_were_accepted_and_rejected(everything: tuple, name: str) -> None:
    result = everything[1][name]
    assert 0.02 * 3 * result["drafts"] < result["accepted"] < 0.9 * 3 * result["drafts"]
