"""The block drafter: DFlash's backbone with the carry interface (paper, Algorithm 1).

Shapes: R rows (one response each, right-padded to T tokens), N anchors a row, S slots a block,
B proposals, H hidden size, nH_t width of the concatenated target features, D head size.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from carryover.drafter import layout
from carryover.drafter.attention import Kernel, Visible, block_attention
from carryover.drafter.config import DrafterConfig
from carryover.drafter.markov import ConfidenceHead, MarkovHead


@dataclass
class Carry:
    """Rejected rows of one round, the temporary context U of the next draft.

    features: [R, N, B, nH_t], the target's at the proposed positions; positions: [R, N, B] int64,
    where each row was computed; visible: [R, N, B] bool, rows m+1..B.
    """

    features: Tensor
    positions: Tensor
    visible: Tensor


@dataclass
class Hints:
    """Tokens of one round that stand in for MASK in the next draft, which then carries no rows.

    Slot by slot: ids: [R, N, S, k] int64, target ids; weights: [R, N, S, k], summing to one over
    k; exists: [R, N, S] bool, where the slot keeps its own input if false. Paper, Table 3.
    """

    ids: Tensor
    weights: Tensor
    exists: Tensor

    def embedded(self, embedding: Tensor) -> Tensor:
        """Weighted mean of the tokens' rows of embedding [V, H]: [R, N, S, H]."""
        tokens = F.embedding(self.ids, embedding)
        return (self.weights.to(tokens.dtype)[..., None, :] @ tokens).squeeze(-2)


class Rotary(nn.Module):
    """Neox-style rotary embedding; angles in fp32."""

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.theta = head_dim, theta

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [..., heads, D]; positions: the shape of x without its last two dimensions."""
        half = self.head_dim // 2
        exponents = torch.arange(half, device=x.device, dtype=torch.float32) / half
        angles = positions[..., None, None].float() * self.theta**-exponents
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.split(half, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Block queries over [context | carried rows | own block], one softmax over all of them."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        hidden = config.hidden_size
        self.q_proj = nn.Linear(hidden, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=False)
        if config.qk_norm:
            self.q_norm: nn.Module = nn.RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm: nn.Module = nn.RMSNorm(self.head_dim, config.rms_norm_eps)
        else:
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        self.rotary = Rotary(self.head_dim, config.rope_theta)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., H] at positions [...] -> keys and values, both [..., kv_heads, D]."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        return self.rotary(k, positions), v

    def parts(
        self,
        x: Tensor,
        positions: Tensor,
        context: Tensor,
        context_positions: Tensor,
        visible: Visible,
        carried: Tensor | None,
        carried_positions: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Visible]:
        """The arguments of `block_attention`, carried rows first among a block's own keys.

        x: [R, N, S, H] normed slot states at positions [R, N, S]; context: [R, T, H] normed fc
        outputs at context_positions [R, T]; carried: [R, N, B, H] normed projections of the
        carried rows at carried_positions [R, N, B].
        """
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim)))
        q = self.rotary(q, positions)
        own_k, own_v = self.keys_values(x, positions)
        if carried is not None and carried_positions is not None:
            carried_k, carried_v = self.keys_values(carried, carried_positions)
            own_k, own_v = torch.cat((carried_k, own_k), 2), torch.cat((carried_v, own_v), 2)
        context_k, context_v = self.keys_values(context, context_positions)
        return q, context_k, context_v, own_k, own_v, visible

    def forward(self, *inputs: Any) -> Tensor:
        """One attention output per slot, [R, N, S, H]; the inputs are those of `parts`."""
        return self.o_proj(block_attention(*self.parts(*inputs)).flatten(-2))

    def carried_share(self, *inputs: Any) -> Tensor:
        """Softmax mass on the carried rows, [R, N, S, heads]; the inputs are those of `parts`.

        It is what attention gives when values are one on carried rows and zero elsewhere.
        """
        q, context_k, context_v, own_k, own_v, visible = self.parts(*inputs)
        on_carried = torch.zeros_like(own_v)
        on_carried[:, :, : own_v.shape[2] - q.shape[2]] = 1
        nothing = torch.zeros_like(context_v)
        return block_attention(q, context_k, nothing, own_k, on_carried, visible)[..., 0]


class MLP(nn.Module):
    """Gated SiLU feed-forward."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A Qwen3-style pre-norm transformer block."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, *attention: Tensor | Carry | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """DFlash backbone; parameters are named as in z-lab's `DFlashDraftModel` checkpoints.

    A Markov drafter is the same backbone with `markov_head` and, where the config asks for it,
    `confidence_head`; what reads the hidden states applies them. The target's input embedding is
    frozen and shared: it is handed in with `share` and is neither a parameter nor part of a
    checkpoint.
    """

    embedding: Tensor  # [V, H], the target's
    kernel: Kernel = "auto"

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.carry and config.carry_distinction == "embedding":
            self.carry_embedding = nn.Parameter(torch.zeros(config.feature_size))  # E_carry
        if config.carry and config.carry_distinction == "projector":  # F_carry
            self.carry_projector = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        rank, vocabulary = config.markov_rank, config.draft_vocab_size or config.vocab_size
        self.markov_head = MarkovHead(config.vocab_size, vocabulary, rank) if rank else None
        self.confidence_head = (
            ConfidenceHead(config.hidden_size, rank) if config.confidence else None
        )

    def share(self, embedding: Tensor) -> None:
        """Attach the frozen input embedding [V, H]."""
        self.register_buffer("embedding", embedding.detach(), persistent=False)

    def project(self, features: Tensor) -> Tensor:
        """Normed F(h), what every layer's K and V read: [..., nH_t] -> [..., H]."""
        return self.hidden_norm(self.fc(features))

    def forward(
        self,
        anchor_tokens: Tensor,
        anchors: Tensor,
        features: Tensor,
        carry: Carry | Hints | None = None,
    ) -> Tensor:
        """Hidden states that predict positions a+1 .. a+B.

        anchor_tokens, anchors: [R, N] int64, token and position of each anchor (positions count
        from the start of the row); features: [R, T, nH_t], row t being position t's.
        Returns [R, N, B, H], normed, ready for the head.
        """
        config = self.config
        ids = layout.block_inputs(
            anchor_tokens, config.mask_token_id, config.slot_layout, config.proposals
        )
        positions = layout.slot_positions(anchors, config.slot_layout, config.proposals)
        length = features.shape[1]
        context = self.project(features)
        context_positions = torch.arange(length, device=anchors.device).expand(len(anchors), -1)
        x = F.embedding(ids, self.embedding)
        if isinstance(carry, Hints):
            x = torch.where(carry.exists[..., None], carry.embedded(self.embedding), x)
        rows = carry if isinstance(carry, Carry) else None
        carried = None if rows is None else self.project_carried(rows.features)
        visible = self._visible(anchors, length, None if rows is None else rows.visible)
        at = None if rows is None else rows.positions
        for block in self.layers:
            x = block(x, positions, context, context_positions, visible, carried, at)
        return self.norm(x)[:, :, layout.predicting_slots(config.slot_layout, config.proposals)]

    def _visible(self, anchors: Tensor, length: int, carried: Tensor | None) -> Visible:
        """A slot sees the context before its anchor, the carried rows, and its own block."""
        size = layout.slots(self.config.slot_layout, self.config.proposals)
        own = anchors.new_ones(*anchors.shape, size, dtype=torch.bool)
        if carried is not None:
            own = torch.cat((carried, own), 2)
        context = layout.context_visible(anchors, length)
        return Visible(context[:, :, None], own[:, :, None], self.kernel)

    def project_carried(self, features: Tensor) -> Tensor:
        """`project` for carried rows, told apart from committed ones by `carry_distinction`.

        embedding: F(h + E_carry) (Algorithm 1, line 1); projector: F_carry(h); none: F(h).
        """
        match self.config.carry_distinction:
            case "embedding":
                return self.project(features + self.carry_embedding)
            case "projector":
                return self.hidden_norm(self.carry_projector(features))
        return self.project(features)
