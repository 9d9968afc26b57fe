"""The frozen target verifies all branches of a batch in one partial prefill (paper, Algorithm 2).

A *branch* is one anchor's proposals. It reads the keys and values of its recorded prefix, up to
and including the anchor, and its own predecessors: a block-diagonal causal mask, realised as an
attention function of transformers' AttentionInterface, so that any target family that uses the
interface works and no mask over all branches is ever built.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from carryover.drafter.layout import proposal_positions
from carryover.drafter.model import block_attention
from carryover.errors import CarryoverError
from carryover.target.hidden import captured, fuse_norms
from carryover.target.load import decoder_of
from carryover.training.losses import predict

ATTENTION = "carryover_branches"
# Branch tokens a forward pass holds; bounds memory without changing results.
CHUNK_TOKENS = 4096


@dataclass
class _State:
    """What the attention function needs beside its layer's own inputs.

    prefix: per layer index, the keys and values [R, T, kv_heads, D] of the recorded responses.
    anchors: [R, N] while branches are verified, None while the prefix is read.
    """

    prefix: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    anchors: Tensor | None = None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    branches: _State,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query, key, value: [R, heads, Q, D], rotated. Returns ([R, Q, heads, D], None)."""
    if softcap is not None:
        raise CarryoverError(
            "the target caps its attention scores, which branch verification does not do",
            "Use a target without attention soft-capping.",
        )
    index = int(module.layer_idx)  # type: ignore[arg-type]
    if branches.anchors is None:
        branches.prefix[index] = (key.transpose(1, 2), value.transpose(1, 2))
        mask = None
        if sliding_window is not None and sliding_window < query.shape[2]:
            near = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
            mask = near.tril() & near.triu(1 - sliding_window)
        out = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None
    anchors = branches.anchors
    shape = anchors.shape
    q, k, v = (x.transpose(1, 2).unflatten(1, (shape[1], -1)) for x in (query, key, value))
    proposals = q.shape[2]
    prefix_k, prefix_v = branches.prefix[index]
    positions = torch.arange(prefix_k.shape[1], device=q.device)
    before = (positions <= anchors[..., None])[:, :, None]  # [R, N, 1, T]
    own = torch.ones(proposals, proposals, dtype=torch.bool, device=q.device).tril()
    if sliding_window is not None:
        at = proposal_positions(anchors, proposals)[..., None]  # [R, N, B, 1]
        before = before & (positions > at - sliding_window)
        own = own & own.triu(1 - sliding_window)
    own = own.expand(*shape, proposals, proposals)
    out = block_attention(q, prefix_k, prefix_v, before, k, v, own, scaling)
    return out.flatten(1, 2), None


AttentionInterface.register(ATTENTION, _attention)


@dataclass
class Verified:
    """The target's verdict on branches.

    features: [R, N, B, nH_t] at the proposed positions a+1 .. a+B; predicted: [R, N, B] int64,
    the target's greedy token for each of those positions, given the branch before it.
    """

    features: Tensor
    predicted: Tensor


class Verifier:
    """A frozen target, its captured layers and its head."""

    def __init__(self, target: Any, feature_layers: list[int]) -> None:
        self.stack = fuse_norms(decoder_of(target))
        self.head: Tensor = target.get_output_embeddings().weight
        self.feature_layers = feature_layers
        target.set_attn_implementation(ATTENTION)

    @torch.no_grad()
    def __call__(self, token_ids: Tensor, anchors: Tensor, proposals: Tensor) -> Verified:
        """Verify proposals [R, N, B] that follow `anchors` [R, N] in token_ids [R, T].

        Rows are right-padded; padding is never read, since a prefix ends at its anchor.
        """
        state, prefix = self.prefill(token_ids)
        at_anchor = prefix.gather(1, anchors[..., None].expand(-1, -1, prefix.shape[-1]))
        chunk = max(1, CHUNK_TOKENS // (proposals.shape[0] * proposals.shape[2]))
        parts = [
            self._branches(state, a, p)
            for a, p in zip(anchors.split(chunk, 1), proposals.split(chunk, 1), strict=True)
        ]
        hidden = torch.cat([part[0] for part in parts], 1)  # [R, N, B, H]
        # Row k of a branch predicts position a+k+1; the anchor's own row predicts a+1.
        rows = torch.cat((at_anchor[:, :, None], hidden[:, :, :-1]), 2)
        predicted = predict(rows.flatten(0, 2), self.head).view(proposals.shape)
        return Verified(torch.cat([part[1] for part in parts], 1), predicted)

    @torch.no_grad()
    def prefill(self, token_ids: Tensor) -> tuple[_State, Tensor]:
        """Read token_ids [R, T]: their keys and values, and [R, T, H] with the last norm applied."""
        state = _State()
        hidden = self.stack(input_ids=token_ids, use_cache=False, branches=state).last_hidden_state
        return state, hidden

    def _branches(self, state: _State, anchors: Tensor, proposals: Tensor) -> tuple[Tensor, Tensor]:
        shape = proposals.shape
        state = _State(state.prefix, anchors)
        with captured(self.stack, self.feature_layers) as outputs:
            hidden = self.stack(
                input_ids=proposals.flatten(1),
                position_ids=proposal_positions(anchors, shape[2]).flatten(1),
                use_cache=False,
                branches=state,
            ).last_hidden_state
        features = torch.cat([outputs[i] for i in self.feature_layers], -1)
        return hidden.view(*shape, -1), features.view(*shape, -1)
