"""A drafter of a target that caps its logits is served with capped scores, as it was trained."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.serving import checkpoints
from tests.serving.harness import CAP, Served


@pytest.mark.parametrize("name", ["capped", "capped, draft vocabulary"])
def test_proposals_are_the_best_of_capped_scores(served: Served, name: str) -> None:
    job, rounds = served.jobs[name], served.results[name]["rounds"]
    tensors = load_file(job["drafter"] / "model.safetensors")
    head = load_file(job["target"] / "model.safetensors")["lm_head.weight"]
    ids = torch.arange(checkpoints.VOCABULARY)
    if "d2t" in tensors:
        head = tensors["lm_head.weight"]
        ids = torch.arange(len(head)) + tensors["d2t"]
    w1, w2 = (tensors[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    uncapped = 0
    for event in rounds:
        previous, other = event["anchor"], []
        for state, token in zip(event["states"][1:], event["proposals"], strict=True):
            parts = head @ state, w2 @ w1[previous]
            scores = sum(CAP * torch.tanh(part / CAP) for part in parts)
            assert scores.max() - scores[ids == token] < 1e-4
            other.append(int(ids[sum(parts).argmax()]))
            previous = token
        uncapped += other != event["proposals"]
    assert len(rounds) > 20
    assert uncapped > len(rounds) / 2
