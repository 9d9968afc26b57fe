"""Attention of blocks over a shared context and their own keys: one mask, two kernels.

`dense` multiplies matrices and works everywhere. `flex` is torch's FlexAttention, which never holds
the scores and skips what a block does not see; it is compiled for CUDA and, on CPU, only a slow
reference. Both read the mask from the same `Visible`.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

Kernel = Literal["auto", "dense", "flex"]


@dataclass(eq=False)
class Visible:
    """What the S queries of each block see.

    context: [R, N, S or 1, T] bool, the shared context; own: [R, N, S or 1, J] bool, the block's
    own keys. Each query sees something. Built once a pass: the masks of the kernels are kept.
    """

    context: Tensor
    own: Tensor
    kernel: Kernel = "auto"
    _block_mask: BlockMask | None = field(default=None, init=False, repr=False)
    _dense_mask: Tensor | None = field(default=None, init=False, repr=False)

    def flexes(self, device: torch.device) -> bool:
        """Whether the flex kernel is used: on CUDA, where nothing else was asked for."""
        return self.kernel == "flex" or (self.kernel == "auto" and device.type == "cuda")

    def dense_mask(self) -> Tensor:
        """[R, 1, N, 1, S or 1, T + J] bool, for scores [R, kv_heads, N, group, S, T + J]."""
        if self._dense_mask is None:
            queries = max(self.context.shape[2], self.own.shape[2])
            parts = (v.expand(-1, -1, queries, -1) for v in (self.context, self.own))
            self._dense_mask = torch.cat(tuple(parts), -1)[:, None, :, None]
        return self._dense_mask

    def block_mask(self, size: int) -> BlockMask:
        """The same for queries [N * S] and keys [T, then N * J]; size: S."""
        if self._block_mask is None:
            context, own = self.context, self.own
            responses, blocks, _, length = context.shape
            width = own.shape[3]
            context_row, own_row = int(context.shape[2] > 1), int(own.shape[2] > 1)

            def sees(response: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
                block, slot = query // size, query % size
                in_context = key < length
                at = torch.where(in_context, key, 0)
                beyond = torch.where(in_context, 0, key - length)
                return torch.where(
                    in_context,
                    context[response, block, slot * context_row, at],
                    own[response, block, slot * own_row, beyond % width]
                    & (beyond // width == block),
                )

            self._block_mask = create_block_mask(
                sees,
                B=responses,
                H=None,
                Q_LEN=blocks * size,
                KV_LEN=length + blocks * width,
                device=context.device.type,
            )
        return self._block_mask


def block_attention(
    q: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    visible: Visible,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention of blocks over a shared context and each block's own keys.

    q: [R, N, S, heads, D]; context_k, context_v: [R, T, kv_heads, D]; own_k, own_v:
    [R, N, J, kv_heads, D]. Returns [R, N, S, heads, D].
    """
    kernel = _flex if visible.flexes(q.device) else _dense
    return kernel(q, context_k, context_v, own_k, own_v, visible, scale)


def _dense(
    q: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    visible: Visible,
    scale: float | None,
) -> Tensor:
    """The scores of the two parts are computed apart, since a block's own keys are seen by no other
    block: a dense mask over all blocks' keys would spend N times the work on them."""
    rows, blocks, size, heads, dim = q.shape
    kv_heads, length, own = context_k.shape[2], context_k.shape[1], own_k.shape[2]
    group = heads // kv_heads
    # [R, kv, N, G, S, D]: a group's queries share a key head.
    q = q * (dim**-0.5 if scale is None else scale)
    q = q.unflatten(3, (kv_heads, group)).permute(0, 3, 1, 4, 2, 5)
    context_scores = q.reshape(rows, kv_heads, -1, dim) @ context_k.permute(0, 2, 3, 1)
    own_scores = q.reshape(rows, kv_heads, blocks, group * size, dim) @ own_k.permute(0, 3, 1, 4, 2)
    shape = (rows, kv_heads, blocks, group, size)
    scores = torch.cat((context_scores.view(*shape, length), own_scores.view(*shape, own)), -1)
    # torch's CPU and CUDA softmax of bf16 works in fp32 and rounds once.
    weights = scores.masked_fill_(~visible.dense_mask(), float("-inf")).softmax(-1)
    context_weights, own_weights = weights.split((length, own), -1)
    out = context_weights.reshape(rows, kv_heads, -1, length) @ context_v.permute(0, 2, 1, 3)
    own_out = own_weights.reshape(rows, kv_heads, blocks, group * size, own) @ own_v.permute(
        0, 3, 1, 2, 4
    )
    out = out.view(*shape, dim) + own_out.view(*shape, dim)
    return out.permute(0, 2, 4, 1, 3, 5).reshape(rows, blocks, size, heads, dim)


def _flex(
    q: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    visible: Visible,
    scale: float | None,
) -> Tensor:
    rows, blocks, size, heads, dim = q.shape
    queries = q.flatten(1, 2).transpose(1, 2)  # [R, heads, N * S, D]
    keys, values = (
        torch.cat((context, own.flatten(1, 2)), 1).transpose(1, 2)
        for context, own in ((context_k, own_k), (context_v, own_v))
    )
    out = _flex_kernel(q.device.type)(
        queries,
        keys,
        values,
        block_mask=visible.block_mask(size),
        scale=scale,
        enable_gqa=heads != keys.shape[1],
    )
    return out.transpose(1, 2).reshape(rows, blocks, size, heads, dim)


@cache
def _flex_kernel(device: str) -> Any:
    # Lengths differ from step to step: one compilation for all of them.
    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention
