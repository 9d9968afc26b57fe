"""Greedy output with a carryover drafter is the target's own, token by token, in fp32."""

from __future__ import annotations

import pytest

from tests.serving.harness import Served, check_best_tokens, check_grammars, check_lossless


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
        # One request ends at max_model_len; drafting stops for the whole batch, and goes on.
        "length limit",
        "grammar",
    ],
)
def test_greedy_output_is_the_targets(served: Served, name: str) -> None:
    source = "autoregressive, grammar" if name == "grammar" else "autoregressive"
    outputs = served.results[source]["outputs"]
    reference = dict(zip(map(tuple, served.prompts), outputs, strict=True))
    check_lossless(served.jobs[name], served.results[name], reference)


def test_autoregressive_output_is_the_dense_targets(served: Served) -> None:
    """vLLM's own greedy output is no more than a second opinion of the dense target."""
    check_best_tokens(served.target, served.prompts, served.results["autoregressive"]["outputs"])


def test_edited_proposals_are_accepted_as_far_as_they_are_right(served: Served) -> None:
    result = served.results["carryover"]
    assert 0 < result["accepted"] < result["drafts"] * 7


def test_nothing_is_carried_from_a_step_without_proposals(served: Served) -> None:
    """vLLM fills in zeros where it skipped the drafter; their states are not a draft's."""
    rounds = served.results["length limit"]["rounds"]
    zeros = [e for e in rounds if len(e["verified"]) == 8 and set(e["verified"][1:]) == {0}]
    assert zeros
    assert all(event["carried"] == 0 for event in zeros)


def test_a_grammar_is_kept_and_rejected_rows_are_carried(served: Served) -> None:
    free = served.results["autoregressive"]["outputs"]
    check_grammars(free, served.results["autoregressive, grammar"]["outputs"])
    result = served.results["grammar"]
    assert 0 < result["accepted"] < result["drafts"] * 7
    # A cut draft is shorter; what is rejected of it is carried as of any other.
    assert any(1 < len(event["verified"]) < 8 for event in result["rounds"])
    assert all(event["carried"] == len(event["rejected"]) for event in result["rounds"])
    assert any(event["carried"] for event in result["rounds"])
