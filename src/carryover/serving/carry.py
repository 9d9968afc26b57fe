"""Which rows of a verification step are carried into the next draft: pure functions on tensors.

A verification step holds, for each request, its committed rows, then its proposals; the last R of
those were rejected. Carryover keeps these R rows as context of the next block (paper, Algorithm 1).
No function here waits for the device.
"""

from __future__ import annotations

import torch


def carried_counts(
    num_rejected: torch.Tensor,
    draft_ends: torch.Tensor,
    draft_token_ids: torch.Tensor,
    proposals: int,
) -> torch.Tensor:
    """How many rows each request carries: its rejected proposals, or none.

    None where all proposals are placeholders, whose states mean nothing: vLLM schedules zeros where
    it skipped the drafter in the step before, and -1 for a request that has just joined.

    Args:
        num_rejected: [requests] int, proposals rejected in this step; more than were verified for
            a request whose step is discarded.
        draft_ends: [requests] int, proposals verified in this step up to and with each request
            (of one without proposals: as of the one before).
        draft_token_ids: [draft_ends[-1]] int, the proposals, request after request.
        proposals: how many a request has at most.

    Returns:
        [requests], dtype of `num_rejected`.
    """
    requests, total = num_rejected.shape[0], draft_token_ids.shape[0]
    verified: int | torch.Tensor
    if total == requests * proposals:
        # All have the same number, as between prefills: a few operations less, which on CPU are
        # most of what carrying costs.
        verified = proposals
        highest = draft_token_ids.view(requests, proposals).amax(dim=1)
    else:
        verified = torch.diff(draft_ends, prepend=draft_ends.new_zeros(1))
        highest = draft_token_ids.new_zeros(requests)
        highest.scatter_reduce_(0, owners(draft_ends, total), draft_token_ids, "amax")
    return num_rejected * ((highest > 0) & (num_rejected <= verified))


def carried_rows(
    query_start_loc: torch.Tensor, carried: torch.Tensor, num_rows: int, longest: int
) -> torch.Tensor:
    """Mask of the rows to carry: the last `carried[i]` rows of request i.

    Args:
        query_start_loc: [requests + 1] int, first row of each request, then `num_rows`.
        carried: [requests] int.
        num_rows: rows of the step.
        longest: rows of the request that has most.

    Returns:
        [num_rows, 1] bool.
    """
    requests = carried.shape[0]
    if num_rows == requests * longest:
        rows = torch.arange(longest, device=carried.device)
        return (rows >= (longest - carried).unsqueeze(1)).view(-1, 1)
    ends = query_start_loc[1 : requests + 1]
    rows = torch.arange(num_rows, device=carried.device)
    return (rows >= (ends - carried)[owners(ends, num_rows)]).unsqueeze(1)


def owners(ends: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The request of each row [num_rows] int64, from where each request's rows end [requests]."""
    rows = torch.arange(num_rows, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends, rows, right=True)
