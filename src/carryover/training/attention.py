"""How much of a draft's attention goes to the rows carried into it (paper, Figure 6)."""

from typing import Any

import torch
from torch import Tensor

from carryover.drafter.layout import predicting_slots
from carryover.drafter.model import Carry, Drafter
from carryover.training.batch import Batch
from carryover.training.dvd import Blocks


@torch.no_grad()
def carried_share(drafter: Drafter, batch: Batch, blocks: Blocks) -> Tensor:
    """Softmax mass on carried rows, for the blocks that carry some: [2] float64, sum and count.

    A block's share is the mean over layers, heads and the slots that predict. Drafts anew, with
    each layer's attention taken twice: for evaluation, not for training steps.
    """
    if not isinstance(blocks.carry, Carry):
        raise TypeError("these blocks carry no rows of context")
    shares: list[Tensor] = []

    def watch(attention: Any, inputs: Any, _: Tensor) -> None:
        shares.append(attention.carried_share(*inputs))

    attentions: list[Any] = [layer.self_attn for layer in drafter.layers]
    handles = [attention.register_forward_hook(watch) for attention in attentions]
    try:
        tokens = batch.token_ids.gather(1, blocks.anchors)
        drafter(tokens, blocks.anchors, batch.features, blocks.carry)
    finally:
        for handle in handles:
            handle.remove()
    predicting = predicting_slots(drafter.config.slot_layout, drafter.config.proposals)
    # [layers, R, N, S, heads] -> [R, N]
    share = torch.stack(shares)[:, :, :, predicting].double().mean((0, 3, 4))
    carries = blocks.carry.visible.any(-1)
    return torch.stack((share[carries].sum(), carries.sum().double()))
