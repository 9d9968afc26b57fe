"""Where the slots of a block stand and what they may see: the one definition.

A round starts at an *anchor* a, the last committed token. The drafter fills a block of slots
and proposes B tokens for the positions a+1 .. a+B:

* ``fill_in`` (z-lab's DFlash, vLLM's ``dflash``): B+1 slots, slot 0 holds the anchor token and
  predicts nothing, slot k (k = 1..B) holds the mask token and predicts position a+k;
* ``anchor_first`` (DeepSpec's DSpark): B slots, slot 0 holds the anchor token, the rest the mask
  token, and slot k predicts position a+k+1.

In both, slot k stands at position a+k. A block sees the context strictly before its anchor (the
anchor's own feature is not known yet), the rows carried into it, and all its own slots.
"""

from typing import Literal

import torch
from torch import Tensor

SlotLayout = Literal["fill_in", "anchor_first"]


def slots(layout: SlotLayout, proposals: int) -> int:
    """Number of slots S of a block that proposes `proposals` = B tokens."""
    return proposals + 1 if layout == "fill_in" else proposals


def predicting_slots(layout: SlotLayout, proposals: int) -> slice:
    """The B slots whose outputs predict positions a+1 .. a+B, in that order."""
    return slice(1, proposals + 1) if layout == "fill_in" else slice(0, proposals)


def slot_positions(anchors: Tensor, layout: SlotLayout, proposals: int) -> Tensor:
    """Positions of the slots: anchors [...] int64 -> [..., S] int64."""
    return anchors[..., None] + torch.arange(slots(layout, proposals), device=anchors.device)


def proposal_positions(anchors: Tensor, proposals: int) -> Tensor:
    """Positions a+1 .. a+B that a round proposes: anchors [...] -> [..., B] int64."""
    return anchors[..., None] + torch.arange(1, proposals + 1, device=anchors.device)


def block_inputs(
    anchor_tokens: Tensor, mask_token_id: int, layout: SlotLayout, proposals: int
) -> Tensor:
    """Input ids of a block, [anchor, MASK, ...]: anchor_tokens [...] -> [..., S] int64."""
    size = (*anchor_tokens.shape, slots(layout, proposals))
    ids = anchor_tokens.new_full(size, mask_token_id)
    ids[..., 0] = anchor_tokens
    return ids


def context_visible(anchors: Tensor, length: int) -> Tensor:
    """Which context positions 0..length-1 a block sees: [...] -> [..., length] bool."""
    return torch.arange(length, device=anchors.device) < anchors[..., None]


def carried_rows(accepted: Tensor, proposals: int) -> Tensor:
    """Rows m+1..B of a round that accepted m, Algorithm 1 line 4: [...] -> [..., B] bool.

    Full acceptance (m = B) carries nothing.
    """
    return torch.arange(1, proposals + 1, device=accepted.device) > accepted[..., None]


def hinting_rows(accepted: Tensor, ahead: int, layout: SlotLayout, proposals: int) -> Tensor:
    """Which row of a verified round hints at what each slot of the next block predicts.

    Row q = 1..B of a round at anchor a stands at position a+q; its hint is for position
    a + q + ahead: a draft token is for its own position (`ahead` 0), what the target predicts
    from the row for the one after it (`ahead` 1). A hint belongs to the slot that predicts its
    position. The next block starts at the correction, a' = a + m + 1, so of the rejected rows'
    hints the one for m + 1 is past (a draft token only), and the slots of the next block that look
    further ahead than the hints reach have none. Slot 0 holds the anchor and takes no hint, also
    where it predicts (`anchor_first`).

    accepted: [...] int64, m -> [..., S] int64, the row q, or 0 for a slot without a hint. Full
    acceptance leaves no hints.
    """
    slot = torch.arange(slots(layout, proposals), device=accepted.device)
    predicted = slot if layout == "fill_in" else slot + 1  # relative to a'
    row = accepted[..., None] + 1 + predicted - ahead
    return torch.where((slot > 0) & (row <= proposals), row, 0)
