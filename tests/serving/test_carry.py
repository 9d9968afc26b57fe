"""Which rows are carried, against loops over requests and rows."""

from __future__ import annotations

import pytest
import torch

from carryover.serving.carry import carried_counts, carried_rows


def counts(
    rejected: list[int],
    drafts: list[list[int]],
    lengths: list[int] | None = None,
    max_model_len: int = 1000,
) -> list[int]:
    """carried_counts for blocks of 1 + 4 rows."""
    return carried_counts(
        torch.tensor(rejected, dtype=torch.int32),
        torch.tensor([len(ids) for ids in drafts]).cumsum(0).int(),
        torch.tensor([token for ids in drafts for token in ids], dtype=torch.int32),
        torch.tensor(lengths or [50] * len(rejected), dtype=torch.int32),
        proposals=4,
        block_size=5,
        max_model_len=max_model_len,
    ).tolist()


def test_rejected_rows_are_carried() -> None:
    assert counts([0, 2, 4], [[5, 6, 7, 8], [5, 6, 7, 8], [1, 2, 3, 4]]) == [0, 2, 4]


def test_requests_without_proposals_carry_nothing() -> None:
    assert counts([0, 3, 0], [[], [5, 6, 7], []]) == [0, 3, 0]


def test_placeholders_are_not_carried() -> None:
    assert counts([3, 3, 3], [[5, 6, -1, -1], [0, 0, 0, 0], [0, 0, 9, 0]]) == [0, 0, 3]


def test_more_rejected_than_proposed_means_a_discarded_request() -> None:
    assert counts([5], [[5, 6, 7, 8]]) == [0]


def test_the_shifted_block_must_fit() -> None:
    drafts = [[5, 6, 7, 8]] * 3
    assert counts([2, 2, 2], drafts, lengths=[94, 95, 96], max_model_len=100) == [2, 2, 0]


CASES = {
    "rejected": (3, [5, 6, 7, 8], 50, 3),
    "accepted": (0, [5, 6, 7, 8], 50, 0),
    "cut": (3, [5, 6, 7, -1], 50, 0),
    "skipped": (4, [0, 0, 0, 0], 50, 0),
    "token 0": (4, [0, 0, 0, 1], 50, 4),
    "discarded": (5, [5, 6, 7, 8], 50, 0),
    "no room": (1, [5, 6, 7, 8], 96, 0),
    "just room": (1, [5, 6, 7, 8], 95, 1),
}


@pytest.mark.parametrize("others", [[], [[]], [[9, 9]]])
def test_a_request_carries_the_same_whatever_others_propose(others: list[list[int]]) -> None:
    rejected, drafts, lengths, expected = (
        list(column) for column in zip(*CASES.values(), strict=True)
    )
    more = len(others)
    drafts, lengths = others + drafts, [50] * more + lengths
    found = counts([0] * more + rejected, drafts, lengths, max_model_len=100)
    assert found == [0] * more + expected


def test_carried_rows_are_the_last_of_each_request() -> None:
    generator = torch.Generator().manual_seed(0)
    for case in range(50):
        lengths = torch.randint(1, 9, (5,), generator=generator)
        if case % 2:
            lengths[:] = lengths[0]
        carried = (torch.rand(5, generator=generator) * lengths).int()
        starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
        expected = [
            row >= length - kept
            for length, kept in zip(lengths.tolist(), carried.tolist(), strict=True)
            for row in range(length)
        ]
        found = carried_rows(starts, carried, int(lengths.sum()), int(lengths.max()))
        assert found.tolist() == expected
