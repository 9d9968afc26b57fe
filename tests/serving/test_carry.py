"""Which rows are carried, against loops over requests and rows."""

from __future__ import annotations

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
        torch.tensor([len(ids) for ids in drafts], dtype=torch.int32),
        torch.tensor([token for ids in drafts for token in ids], dtype=torch.int32),
        torch.tensor(lengths or [50] * len(rejected), dtype=torch.int32),
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


def test_carried_rows_are_the_last_of_each_request() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        lengths = torch.randint(1, 9, (5,), generator=generator)
        carried = (torch.rand(5, generator=generator) * lengths).int()
        starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
        expected = [
            row >= length - kept
            for length, kept in zip(lengths.tolist(), carried.tolist(), strict=True)
            for row in range(length)
        ]
        assert carried_rows(starts, carried, int(lengths.sum())).tolist() == expected
