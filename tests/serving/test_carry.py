"""Which rows are carried, against loops over requests and rows."""

from __future__ import annotations

import pytest
import torch

from carryover.serving.carry import carried_counts, carried_rows


def counts(rejected: list[int], drafts: list[list[int]]) -> list[int]:
    """carried_counts for at most 4 proposals."""
    return carried_counts(
        torch.tensor(rejected, dtype=torch.int32),
        torch.tensor([len(ids) for ids in drafts]).cumsum(0).int(),
        torch.tensor([token for ids in drafts for token in ids], dtype=torch.int32),
        4,
    ).tolist()


def test_rejected_rows_are_carried() -> None:
    assert counts([0, 2, 4], [[5, 6, 7, 8], [5, 6, 7, 8], [1, 2, 3, 4]]) == [0, 2, 4]


def test_requests_without_proposals_carry_nothing() -> None:
    assert counts([0, 3, 0], [[], [5, 6, 7], []]) == [0, 3, 0]


def test_placeholders_are_not_carried() -> None:
    assert counts([3, 3, 3], [[-1, -1, -1, -1], [0, 0, 0, 0], [0, 0, 9, 0]]) == [0, 0, 3]


def test_more_rejected_than_proposed_means_a_discarded_request() -> None:
    assert counts([5], [[5, 6, 7, 8]]) == [0]


CASES = {
    "rejected": (3, [5, 6, 7, 8], 3),
    "accepted": (0, [5, 6, 7, 8], 0),
    "just joined": (4, [-1, -1, -1, -1], 0),
    "skipped": (4, [0, 0, 0, 0], 0),
    "token 0": (4, [0, 0, 0, 1], 4),
    "discarded": (5, [5, 6, 7, 8], 0),
}


@pytest.mark.parametrize("others", [[], [[]], [[9, 9]]])
def test_a_request_carries_the_same_whatever_others_propose(others: list[list[int]]) -> None:
    rejected, drafts, expected = (list(column) for column in zip(*CASES.values(), strict=True))
    none = [0] * len(others)
    assert counts(none + rejected, others + drafts) == none + expected


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
        assert found.squeeze(1).tolist() == expected
