"""At every round, the block's hidden states in vLLM equal those of the dense reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.serving import checkpoints
from tests.serving.harness import Served

TOLERANCE = 1e-4
EDITED = [
    "carryover",
    "carryover, no q/k norm, draft vocabulary",
    "baseline",
    "baseline, no q/k norm",
    "carryover, Markov",
    "baseline, Markov, draft vocabulary",
    "preempted",
]
MARKOV = [name for name in EDITED if "Markov" in name]


def committed_ids(served: Served, name: str) -> list[list[int]]:
    """Before each round, the request's committed tokens, put together from the rows verified.

    (The outputs will not do: what was accepted beyond max_tokens is cut off there.)
    """
    known = [list(prompt) for prompt in served.jobs[name]["prompts"]]
    before = []
    for event in served.results[name]["rounds"]:
        ids, length = known[event["request"]], event["anchor_position"]
        rows = event["verified"][: len(event["verified"]) - len(event["rejected"])]
        ids[length - len(rows) : length] = rows
        before.append(ids[:length])
    return before


def dense_round(served: Served, name: str, event: dict[str, Any], ids: list[int]) -> torch.Tensor:
    """The block's states [1 + B, hidden] for what was committed and rejected in one round."""
    drafter = served.drafters[name]
    features, _ = served.target(ids + event["rejected"])
    carried = len(event["rejected"]) if drafter.config["carryover"]["enabled"] else 0
    return drafter(
        features[: len(ids)],
        features[len(ids) : len(ids) + carried],
        event["anchor"],
        served.target.embedding,
        checkpoints.PROPOSALS,
    )


@pytest.mark.parametrize("name", [*EDITED, "prefix caching", "own proposals", "grammar"])
def test_states_and_proposals_of_every_round(served: Served, name: str) -> None:
    rounds = served.results[name]["rounds"]
    assert len(rounds) > 40
    for event, ids in zip(rounds, committed_ids(served, name), strict=True):
        expected = dense_round(served, name, event, ids)
        torch.testing.assert_close(event["states"], expected, atol=TOLERANCE, rtol=0)
        before = [event["anchor"], *event["proposals"][:-1]]
        scores = served.drafters[name].logits(expected[1:], served.target.head, before)
        chosen = scores.gather(1, torch.tensor(event["proposals"]).unsqueeze(1)).squeeze(1)
        # The best token, but for ties within the tolerance of the states.
        assert (scores.max(dim=1).values - chosen).max() < 1e-2


@pytest.mark.parametrize("name", EDITED)
def test_rejected_counts_run_from_none_to_all(served: Served, name: str) -> None:
    rounds = served.results[name]["rounds"]
    rejected = {len(event["rejected"]) for event in rounds}
    assert rejected == set(range(checkpoints.PROPOSALS + 1))


@pytest.mark.parametrize("name", EDITED)
def test_carries_all_rejected_rows_or_none(served: Served, name: str) -> None:
    enabled = served.drafters[name].config["carryover"]["enabled"]
    for event in served.results[name]["rounds"]:
        assert event["carried"] == (len(event["rejected"]) if enabled else 0)


def test_carried_rows_change_the_block(served: Served) -> None:
    """The parity above would hold for a drafter that ignores its carried rows, too."""
    rounds = served.results["carryover"]["rounds"]
    drafter = served.drafters["carryover"]
    changes = []
    for event, ids in zip(rounds, committed_ids(served, "carryover"), strict=True):
        if len(event["rejected"]) > 3:
            features, _ = served.target(ids)
            embedding, none = served.target.embedding, features[:0]
            without = drafter(features, none, event["anchor"], embedding, checkpoints.PROPOSALS)
            changes.append((without - event["states"]).abs().max())
    assert len(changes) > 5
    assert min(changes) > 0.1


@pytest.mark.parametrize("name", MARKOV)
def test_a_markov_block_is_the_references_chosen_left_to_right(served: Served, name: str) -> None:
    """Token for token: the scores of these states are further apart than rounding."""
    drafter, head = served.drafters[name], served.target.head
    corrected = 0
    for event in served.results[name]["rounds"]:
        states = event["states"][1:]
        assert event["proposals"] == drafter.propose(states, event["anchor"], head)
        corrected += event["proposals"] != drafter.logits(states, head).argmax(-1).tolist()
    assert corrected > len(served.results[name]["rounds"]) / 2


def test_conditions_that_the_parity_claims_to_cover(served: Served) -> None:
    def first_round(name: str, request: int) -> dict[str, Any]:
        return next(e for e in served.results[name]["rounds"] if e["request"] == request)

    rounds = served.results["carryover"]["rounds"]
    assert {event["batch"] for event in rounds} >= {2, 4}  # several requests, joining and leaving
    assert first_round("carryover", 1)["anchor_position"] < 70  # prefilled in chunks
    assert served.results["preempted"]["preemptions"] > 0
    for request in (4, 5):  # starts behind a cached prefix
        event = first_round("prefix caching", request)
        assert event["anchor_position"] - len(event["verified"]) >= 32
