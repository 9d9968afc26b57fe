"""What a verified round hands to the next draft: the arms of the paper's Table 3 (a)."""

import torch
from torch import Tensor

from carryover.drafter.config import DrafterConfig
from carryover.drafter.layout import carried_rows, hinting_rows, proposal_positions
from carryover.drafter.model import Carry, Hints
from carryover.training.batch import Batch
from carryover.training.verify import Verified

# k of `Verified.next` that each kind of carry needs, none where it is not named.
NEXT_TOKENS = {"target_tokens": 1, "target_top5": 5}


def carry_of(
    config: DrafterConfig,
    batch: Batch,
    proposals: Tensor,
    verified: Verified,
    accepted: Tensor,
    valid: Tensor,
) -> Carry | Hints:
    """Rows m+1..B of the rounds at `batch.anchors`, as `config.carry_rows` says.

    proposals: [R, N, B] int64, d; accepted: [R, N] int64, m; valid: [R, N] bool, blocks that get a
    second draft. hidden_states: the target's features, as rows of context. Otherwise hints, which
    replace the MASK inputs: the rejected draft tokens, the target's greedy tokens, or the mean of
    its five most probable tokens' embeddings, weighted with their probabilities.
    """
    size = proposals.shape[-1]
    if config.carry_rows == "hidden_states":
        return Carry(
            features=verified.features.to(batch.features.dtype),
            positions=proposal_positions(batch.anchors, size),
            visible=carried_rows(accepted, size) & valid[..., None],
        )
    if verified.next is None:
        ids, weights, ahead = proposals[..., None], torch.ones_like(proposals)[..., None], 0
    else:
        ids, weights, ahead = verified.next.ids, verified.next.weights, 1
    row = hinting_rows(accepted, ahead, config.slot_layout, size)  # [R, N, S]
    at = (row - 1).clamp(min=0)[..., None].expand(-1, -1, -1, ids.shape[-1])
    return Hints(
        ids=ids.gather(2, at), weights=weights.gather(2, at), exists=(row > 0) & valid[..., None]
    )
