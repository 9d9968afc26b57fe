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

from carryover.drafter.attention import Kernel, Visible, block_attention
from carryover.drafter.layout import proposal_positions
from carryover.errors import CarryoverError
from carryover.target.hidden import captured, fuse_norms
from carryover.target.load import decoder_of, logit_cap
from carryover.training.losses import CHUNK, best, predict, soft_cap

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
    kernel: Kernel = "auto"
    _visible: dict[int | None, Visible] = field(default_factory=dict)

    def visible(self, length: int, proposals: int, window: int | None) -> Visible:
        """A branch sees its prefix of T = length positions up to its anchor, and itself causally;
        both no further back than the layer's sliding window. One mask for all layers that share
        a window."""
        if window not in self._visible and self.anchors is not None:
            anchors = self.anchors
            positions = torch.arange(length, device=anchors.device)
            before = (positions <= anchors[..., None])[:, :, None]  # [R, N, 1, T]
            own = torch.ones(proposals, proposals, dtype=torch.bool, device=anchors.device).tril()
            if window is not None:
                at = proposal_positions(anchors, proposals)[..., None]  # [R, N, B, 1]
                before = before & (positions > at - window)
                own = own & own.triu(1 - window)
            own = own.expand(*anchors.shape, proposals, proposals)
            self._visible[window] = Visible(before, own, self.kernel)
        return self._visible[window]


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
    q, k, v = (x.transpose(1, 2).unflatten(1, (anchors.shape[1], -1)) for x in (query, key, value))
    proposals = q.shape[2]
    prefix_k, prefix_v = branches.prefix[index]
    visible = branches.visible(prefix_k.shape[1], proposals, sliding_window)
    out = block_attention(q, prefix_k, prefix_v, k, v, visible, scaling)
    return out.flatten(1, 2), None


AttentionInterface.register(ATTENTION, _attention)


@dataclass
class NextTokens:
    """The target's k most probable tokens after each row of a branch: row q's are for a+q+1.

    ids: [R, N, B, k] int64, most probable first; weights: [R, N, B, k] float32, their
    probabilities over the sum of these.
    """

    ids: Tensor
    weights: Tensor


@dataclass
class Reading:
    """The target's pass over recorded responses: what branches stand on.

    hidden: [R, T, H], the last norm included; captured: [R, T, H_t] of each feature layer; prefix:
    keys and values of every layer. Rows of padding mean nothing.
    """

    hidden: Tensor
    captured: list[Tensor]
    prefix: dict[int, tuple[Tensor, Tensor]]

    @property
    def features(self) -> Tensor:
        """[R, T, nH_t]. Put together where asked for: with cached features nothing asks."""
        return torch.cat(self.captured, -1)


@dataclass
class Verified:
    """The target's verdict on branches.

    features: [R, N, B, nH_t] at the proposed positions a+1 .. a+B; accepted: [R, N] int64, m, how
    many proposals from the first on are the target's greedy token given the branch before them;
    next: what the target says after each of them, where it was asked for.
    """

    features: Tensor
    accepted: Tensor
    next: NextTokens | None = None


def _most_probable(
    hidden: Tensor, head: Tensor, count: int, cap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`predict` [M], and the `count` most probable head indices with weights, both [M, count]."""
    parts = []
    for part in hidden.split(CHUNK):
        logits = part @ head.t()
        top = logits.topk(count, -1)
        # A softmax over these alone: the rest of the vocabulary cancels.
        weights = soft_cap(top.values.float(), cap).softmax(-1)
        parts.append((best(logits), top.indices, weights))
    greedy, ids, weights = (torch.cat(column) for column in zip(*parts, strict=True))
    return greedy, ids, weights


class Verifier:
    """A frozen target, its captured layers and its head."""

    def __init__(self, target: Any, feature_layers: list[int], kernel: Kernel = "auto") -> None:
        self.kernel = kernel
        self.stack = fuse_norms(decoder_of(target))
        self.head: Tensor = target.get_output_embeddings().weight
        self.cap = logit_cap(target.config)
        self.feature_layers = feature_layers
        target.set_attn_implementation(ATTENTION)

    @torch.no_grad()
    def read(self, token_ids: Tensor) -> Reading:
        """One pass over responses token_ids [R, T], right-padded."""
        state = _State()
        with captured(self.stack, self.feature_layers) as outputs:
            out = self.stack(input_ids=token_ids, use_cache=False, branches=state)
        layers = [outputs[i] for i in self.feature_layers]
        return Reading(out.last_hidden_state, layers, state.prefix)

    @torch.no_grad()
    def __call__(
        self, reading: Reading, anchors: Tensor, proposals: Tensor, next_tokens: int = 0
    ) -> Verified:
        """Verify proposals [R, N, B] that follow `anchors` [R, N] in the responses of `reading`.

        Padding is never read, since a prefix ends at its anchor.
        next_tokens: k of `Verified.next`, 0 for none.
        """
        read = reading.hidden
        at_anchor = read.gather(1, anchors[..., None].expand(-1, -1, read.shape[-1]))
        chunk = max(1, CHUNK_TOKENS // (proposals.shape[0] * proposals.shape[2]))
        parts = [
            self._branches(reading.prefix, a, p)
            for a, p in zip(anchors.split(chunk, 1), proposals.split(chunk, 1), strict=True)
        ]
        hidden = torch.cat([part[0] for part in parts], 1)  # [R, N, B, H]
        features = torch.cat([part[1] for part in parts], 1)
        # Row k of a branch predicts position a+k+1; the anchor's own row predicts a+1.
        rows = torch.cat((at_anchor[:, :, None], hidden), 2)
        if next_tokens == 0:
            rows = rows[:, :, :-1]  # the last one predicts past the proposals
            return Verified(features, self._accepted(rows, proposals))
        flat = _most_probable(rows.flatten(0, 2), self.head, next_tokens, self.cap)
        greedy, ids, weights = (x.unflatten(0, rows.shape[:3]) for x in flat)
        accepted = (greedy[:, :, :-1] == proposals).cumprod(-1).sum(-1)
        return Verified(features, accepted, NextTokens(ids[:, :, 1:], weights[:, :, 1:]))

    def _accepted(self, rows: Tensor, proposals: Tensor) -> Tensor:
        """`Verified.accepted`; rows: [R, N, B, H], of which row k decides on proposal k.

        What follows a rejection is not asked for: the head over all rows is a sixth of the work.
        """
        hidden, drafted = rows.flatten(0, 1), proposals.flatten(0, 1)
        accepted = torch.zeros_like(drafted[:, 0])
        going = torch.arange(len(drafted), device=drafted.device)
        for k in range(drafted.shape[1]):
            right = predict(hidden[going, k], self.head) == drafted[going, k]
            going = going[right]
            accepted[going] += 1
        return accepted.view(proposals.shape[:2])

    def _branches(
        self, prefix: dict[int, tuple[Tensor, Tensor]], anchors: Tensor, proposals: Tensor
    ) -> tuple[Tensor, Tensor]:
        shape = proposals.shape
        state = _State(prefix, anchors, self.kernel)
        with captured(self.stack, self.feature_layers) as outputs:
            hidden = self.stack(
                input_ids=proposals.flatten(1),
                position_ids=proposal_positions(anchors, shape[2]).flatten(1),
                use_cache=False,
                branches=state,
            ).last_hidden_state
        features = torch.cat([outputs[i] for i in self.feature_layers], -1)
        return hidden.view(*shape, -1), features.view(*shape, -1)
