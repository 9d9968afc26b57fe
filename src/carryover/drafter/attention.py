"""Attention of blocks over a shared context and their own keys: one mask, three kernels.

* `dense` multiplies matrices and works everywhere.
* `flex` is torch's FlexAttention, which never holds the scores and skips what a block does not see;
  it is compiled for CUDA and, on CPU, only a slow reference.
* `grouped` is torch's fused attention over some blocks at a time. On CPU it takes half of dense's
  time without gradients, and with them up to three times as much (bfloat16).

All read the mask from the same `Visible`.
"""

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

Kernel = Literal["auto", "dense", "flex", "grouped"]

# Of `grouped` on CPU: with fewer blocks at a time it is slower than `dense`, which then takes over;
# and with AMX, other numbers of keys take up to 1.4 times as long as a multiple of 16.
LEAST_GROUP = 4
KEY_MULTIPLE = 16


@dataclass(eq=False)
class Visible:
    """What the S queries of each block see.

    context: [R, N, S or 1, T] bool, the shared context; own: [R, N, S or 1, J] bool, the block's
    own keys. Each query sees something. Built once a pass: the masks of the kernels are kept.
    """

    context: Tensor
    own: Tensor
    kernel: Kernel = "auto"
    _masks: dict[tuple[Any, ...], Any] = field(default_factory=dict, init=False, repr=False)

    def chosen(self, device: torch.device) -> Kernel:
        """The kernel that was asked for, else the fastest here: with or without gradients."""
        if self.kernel != "auto":
            return self.kernel
        if device.type == "cuda":
            return "flex"
        return "dense" if torch.is_grad_enabled() else "grouped"

    def dense_mask(self, dtype: torch.dtype) -> Tensor:
        """[R, 1, N, 1, S or 1, T + J], 0 or -inf, to be added to scores [R, kv_heads, N, group, S,
        T + J]."""
        if (dtype,) not in self._masks:
            queries = max(self.context.shape[2], self.own.shape[2])
            parts = (v.expand(-1, -1, queries, -1) for v in (self.context, self.own))
            self._masks[dtype,] = _to_add(torch.cat(tuple(parts), -1)[:, None, :, None], dtype)
        return self._masks[dtype,]

    def grouped_mask(self, size: int, group: int, dtype: torch.dtype) -> Tensor:
        """[R * groups, 1, group * S, T + group * J + padding], 0 or -inf, to be added to scores.

        Blocks are padded to whole groups, and keys to a multiple of KEY_MULTIPLE.
        """
        if (size, group, dtype) not in self._masks:
            missing = -self.own.shape[1] % group
            # What is padding sees everything: a query has to see something.
            context, own = (
                F.pad(v.expand(-1, -1, size, -1), (0, 0, 0, 0, 0, missing), value=True)
                .unflatten(1, (-1, group))
                .flatten(0, 1)
                for v in (self.context, self.own)
            )  # [R * groups, group, S, T or J]
            of_block = torch.eye(group, dtype=torch.bool, device=own.device)[:, None, :, None]
            own = (own[:, :, :, None] & of_block).flatten(-2)
            sees = torch.cat((context, own), -1).flatten(1, 2)[:, None]
            sees = F.pad(sees, (0, -sees.shape[-1] % KEY_MULTIPLE))
            self._masks[size, group, dtype] = _to_add(sees, dtype)
        return self._masks[size, group, dtype]

    def block_mask(self, size: int) -> BlockMask:
        """The same for queries [N * S] and keys [T, then N * J]; size: S."""
        if (size,) not in self._masks:
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

            self._masks[size,] = create_block_mask(
                sees,
                B=responses,
                H=None,
                Q_LEN=blocks * size,
                KV_LEN=length + blocks * width,
                device=context.device.type,
            )
        return self._masks[size,]


def _to_add(sees: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as what is added to scores, which have to be finite where nothing is seen too: no
    gradient has to pass through a choice."""
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(
        ~sees, float("-inf")
    )


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
    kernel = {"dense": _dense, "flex": _flex, "grouped": _grouped}[visible.chosen(q.device)]
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
    weights = scores.add_(visible.dense_mask(scores.dtype)).softmax(-1)
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


def _grouped(
    q: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    visible: Visible,
    scale: float | None,
) -> Tensor:
    """A group's blocks share one attention over [context | their own keys], masked to each its own:
    a copy of the context a group, and scores that are not needed for each other block in it.

    The two are balanced where a group has as many keys of its own as the context."""
    rows, blocks, size, heads, dim = q.shape
    length, own_keys = context_k.shape[1], own_k.shape[2]
    least = math.ceil(blocks * own_keys / length)
    groups = next((n for n in range(least, 2 * least) if blocks % n == 0), least)
    group = math.ceil(blocks / groups)
    if group < LEAST_GROUP:
        return _dense(q, context_k, context_v, own_k, own_v, visible, scale)
    groups = math.ceil(blocks / group)
    mask = visible.grouped_mask(size, group, q.dtype)
    missing = groups * group - blocks
    if missing:
        q, own_k, own_v = (F.pad(x, (0, 0, 0, 0, 0, 0, 0, missing)) for x in (q, own_k, own_v))

    def shared(context: Tensor, own: Tensor) -> Tensor:
        """[R * groups, kv_heads, T + group * J + padding, D]."""
        copies = context[:, None].expand(-1, groups, -1, -1, -1)
        padding = mask.shape[-1] - length - group * own_keys
        none = own.new_zeros(rows, groups, padding, *own.shape[3:])
        parts = (copies, own.unflatten(1, (groups, group)).flatten(2, 3), none)
        return torch.cat(parts, 2).flatten(0, 1).transpose(1, 2)

    out = F.scaled_dot_product_attention(
        q.reshape(rows * groups, group * size, heads, dim).transpose(1, 2),
        shared(context_k, own_k),
        shared(context_v, own_v),
        mask,
        scale=scale,
        enable_gqa=heads != own_k.shape[3],
    )
    return out.transpose(1, 2).reshape(rows, groups * group, size, heads, dim)[:, :blocks]


@cache
def _flex_kernel(device: str) -> Any:
    # Lengths differ from step to step: one compilation for all of them.
    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention
