"""A drafter of a target that caps its logits is served with capped scores, as it was trained.

The target here is a Llama without a cap: what counts is the drafter's config.json.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.serving import checkpoints
from tests.serving.harness import random_prompts, run_jobs

CAP = 1.5  # most scores are larger without it


@pytest.mark.parametrize("drafted", [pytest.param(None, marks=pytest.mark.long), 100])
def test_proposals_are_the_best_of_capped_scores(tmp_path: Path, drafted: int | None) -> None:
    target = checkpoints.write_target(tmp_path / "target", seed=0)
    drafter = checkpoints.write_drafter(
        tmp_path / "drafter", seed=1, markov_rank=16, draft_vocabulary=drafted,
        config={"final_logit_softcapping": CAP},
    )  # fmt: skip
    prompts = random_prompts(0, checkpoints.VOCABULARY, (5, 20))
    job = {"target": target, "drafter": drafter, "prompts": prompts, "record": True}
    (result,) = run_jobs(tmp_path, [job])
    assert "error" not in result, result
    tensors = load_file(drafter / "model.safetensors")
    head = load_file(target / "model.safetensors")["lm_head.weight"]
    ids = torch.arange(checkpoints.VOCABULARY)
    if drafted:
        head, ids = tensors["lm_head.weight"], torch.arange(drafted) + tensors["d2t"]
    w1, w2 = (tensors[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    uncapped = 0
    for event in result["rounds"]:
        previous, other = event["anchor"], []
        for state, token in zip(event["states"][1:], event["proposals"], strict=True):
            parts = head @ state, w2 @ w1[previous]
            scores = sum(CAP * torch.tanh(part / CAP) for part in parts)
            assert scores.max() - scores[ids == token] < 1e-4
            other.append(int(ids[sum(parts).argmax()]))
            previous = token
        uncapped += other != event["proposals"]
    assert len(result["rounds"]) > 20
    assert uncapped > len(result["rounds"]) / 2
