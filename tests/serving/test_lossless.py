"""Greedy output with a carryover drafter is the target's own, token by token, in fp32."""

from __future__ import annotations

import pytest
import torch

from tests.serving.harness import GENERATED, Served


@pytest.mark.parametrize(
    "name",
    [
        "carryover",
        "carryover, no q/k norm, draft vocabulary",
        "baseline",
        "baseline, no q/k norm",
        "carryover, Markov",
        "baseline, Markov, draft vocabulary",
        "preempted",
        "own proposals",
    ],
)
def test_greedy_output_is_the_targets(served: Served, name: str) -> None:
    tokens = served.jobs[name]["sampling"]["max_tokens"]
    expected = [ids[:tokens] for ids in served.results["autoregressive"]["outputs"]]
    assert served.results[name]["outputs"] == expected


def test_autoregressive_output_is_the_dense_targets(served: Served) -> None:
    """vLLM's own greedy output is no more than a second opinion of the dense target."""
    for prompt, output in zip(
        served.prompts, served.results["autoregressive"]["outputs"], strict=True
    ):
        _, logits = served.target(prompt + output)
        best = logits[len(prompt) - 1 : -1]
        gap = best.max(dim=1).values - best.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        assert gap.max() < 1e-3


def test_edited_proposals_are_accepted_as_far_as_they_are_right(served: Served) -> None:
    result = served.results["carryover"]
    assert 0 < result["accepted"] < result["drafts"] * 7


def test_up_to_the_length_limit(served: Served) -> None:
    """One request ends at max_model_len; drafting stops for the whole batch, and goes on."""
    outputs = served.results["length limit"]["outputs"]
    for prompt, output, expected in zip(
        served.prompts, outputs, served.results["autoregressive"]["outputs"], strict=True
    ):
        assert output == expected[: min(GENERATED, 96 - len(prompt))]


def test_nothing_is_carried_from_a_step_without_proposals(served: Served) -> None:
    """vLLM fills in zeros where it skipped the drafter; their states are not a draft's."""
    rounds = served.results["length limit"]["rounds"]
    zeros = [e for e in rounds if len(e["verified"]) == 8 and set(e["verified"][1:]) == {0}]
    assert zeros
    assert all(event["carried"] == 0 for event in zeros)
