"""Which rows of a verification step are carried into the next draft: pure functions on tensors.

A verification step holds, for each request, its committed rows, then its proposals; the last R of
those were rejected. Carryover keeps these R rows as context of the next block (paper, Algorithm 1).
No function here waits for the device.
"""

from __future__ import annotations

import torch


def carried_counts(
    num_rejected: torch.Tensor,
    num_drafts: torch.Tensor,
    draft_token_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    block_size: int,
    max_model_len: int,
) -> torch.Tensor:
    """How many rows each request carries: its rejected proposals, or none.

    None where the block, which follows the carried rows, would pass `max_model_len`, and where the
    proposals were placeholders, whose states mean nothing: vLLM schedules -1 (cut by a grammar) or
    only zeros (the drafter was skipped in the step before).

    Args:
        num_rejected: [requests] int, proposals rejected in this step.
        num_drafts: [requests] int, proposals verified in this step (0 for prefill).
        draft_token_ids: [sum of num_drafts] int, the proposals, request after request.
        seq_lens: [requests] int, length of each request with all its proposals.
        block_size: rows of a block, the anchor included.
        max_model_len: positions that a request may use.

    Returns:
        [requests], dtype of `num_rejected`.
    """
    requests = num_rejected.shape[0]
    owner = torch.repeat_interleave(
        torch.arange(requests, device=num_drafts.device),
        num_drafts.long(),
        output_size=draft_token_ids.shape[0],
    )
    ids = draft_token_ids.long()
    lowest = torch.zeros(requests, dtype=torch.long, device=ids.device)
    highest = lowest.clone()
    lowest.scatter_reduce_(0, owner, ids, "amin")
    highest.scatter_reduce_(0, owner, ids, "amax")
    carries = (
        (lowest >= 0)
        & (highest > 0)
        & (num_rejected <= num_drafts)
        & (seq_lens + block_size <= max_model_len)
    )
    return torch.where(carries, num_rejected, torch.zeros_like(num_rejected))


def carried_rows(
    query_start_loc: torch.Tensor, carried: torch.Tensor, num_rows: int
) -> torch.Tensor:
    """Mask of the rows to carry: the last `carried[i]` rows of request i.

    Args:
        query_start_loc: [requests + 1] int, first row of each request, then the number of rows.
        carried: [requests] int.
        num_rows: rows of the step.

    Returns:
        [num_rows] bool.
    """
    rows = torch.arange(num_rows, device=query_start_loc.device)
    ends = query_start_loc[1:].long()
    owner = torch.searchsorted(ends, rows, right=True).clamp_(max=carried.shape[0] - 1)
    return rows >= (ends - carried.long())[owner]
