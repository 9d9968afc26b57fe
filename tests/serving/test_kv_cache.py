"""Drafting with carried rows touches no byte of the target's KV cache, and keeps one round."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.serving import checkpoints
from tests.serving.harness import Served

BLOCK = 1 + checkpoints.PROPOSALS


def rounds_of(served: Served, name: str, request: int) -> list[dict[str, Any]]:
    return [e for e in served.results[name]["rounds"] if e["request"] == request]


def test_a_draft_writes_into_the_drafters_cache_only(served: Served) -> None:
    for event in served.results["carryover"]["rounds"]:
        assert event["changed"] == {"target": False, "drafter": True}


def test_the_targets_committed_keys_and_values_are_those_without_carry(served: Served) -> None:
    """Bit by bit, in every whole block before the anchor, at every round."""
    checksums: dict[str, dict[tuple[int, int], list[str]]] = {
        name: {
            (event["request"], event["anchor_position"]): event["committed"]
            for event in served.results[name]["rounds"]
        }
        for name in ("carryover", "baseline")
    }
    assert checksums["carryover"] == checksums["baseline"]
    assert sum(len(found) for found in checksums["carryover"].values()) > 50
    # While the drafts did differ: rows were carried in one of the two.
    proposals = [
        [event["proposals"] for event in served.results[name]["rounds"]] for name in checksums
    ]
    assert proposals[0] != proposals[1]


def test_the_drafters_cache_shares_no_byte_with_the_targets(served: Served) -> None:
    addresses = served.results["carryover"]["addresses"]
    drafter, target = sorted(addresses["drafter"]), sorted(addresses["target"])
    assert len(drafter) > 10 and len(target) > 10
    owners = [(start, end, owner) for owner in addresses for start, end in addresses[owner]]
    for (_, end, owner), (start, _, other) in pairwise(sorted(owners)):
        assert owner == other or end <= start


@pytest.mark.parametrize("name", ["carryover", "own proposals"])
def test_a_block_reads_what_is_committed_and_one_round_of_at_most_b_rows(
    served: Served, name: str
) -> None:
    most = 0
    for event in served.results[name]["rounds"]:
        carried = event["carried"]
        assert carried <= min(len(event["rejected"]), checkpoints.PROPOSALS)
        # Keys: positions 0 .. anchor - 1, the carried rows, and the block's own.
        assert event["keys"] == event["anchor_position"] + carried + BLOCK
        most = max(most, carried)
    assert most == checkpoints.PROPOSALS


def test_the_next_round_writes_over_every_carried_row(served: Served) -> None:
    seen = 0
    for request in range(len(served.prompts)):
        for event, following in pairwise(rounds_of(served, "carryover", request)):
            rows = event["context_slots"][len(event["context_slots"]) - event["carried"] :]
            assert len(set(rows)) == event["carried"]
            assert set(rows) <= set(following["context_slots"])
            # The block itself stands behind them.
            assert not set(rows) & set(event["block_slots"])
            seen += len(rows)
    assert seen > 50
