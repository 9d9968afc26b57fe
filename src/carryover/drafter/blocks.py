"""Qwen3-style transformer blocks, what z-lab's and DeepSpec's Qwen3 drafters are made of.

Shapes: R responses, N blocks each, S slots a block, B carried rows, T context rows, H hidden size,
D head size. A row of context is read as keys and values alone: every layer projects the same one,
without its own input norm.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from carryover.drafter.attention import Visible, block_attention
from carryover.drafter.config import DrafterConfig


class Rotary(nn.Module):
    """Neox-style rotary embedding; angles in fp32.

    `part` of the pairs rotate, the fastest ones; the others stand still (Gemma's "proportional").
    """

    def __init__(self, head_dim: int, theta: float, part: float = 1.0) -> None:
        super().__init__()
        self.head_dim, self.theta = head_dim, theta
        self.rotating = int(part * head_dim // 2)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [..., heads, D]; positions: the shape of x without its last two dimensions."""
        half = self.head_dim // 2
        exponents = torch.arange(half, device=x.device, dtype=torch.float32) / half
        frequencies = self.theta**-exponents
        frequencies[self.rotating :] = 0
        angles = positions[..., None, None].float() * frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.split(half, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Block queries over [context | carried rows | own block], one softmax over all of them."""

    scale: float | None = None  # of the scores; None: 1 / sqrt(D)

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
        self.rotary = Rotary(self.head_dim, config.rope_theta, config.partial_rotary_factor)

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
        return self.o_proj(block_attention(*self.parts(*inputs), self.scale).flatten(-2))

    def carried_share(self, *inputs: Any) -> Tensor:
        """Softmax mass on the carried rows, [R, N, S, heads]; the inputs are those of `parts`.

        It is what attention gives when values are one on carried rows and zero elsewhere.
        """
        q, context_k, context_v, own_k, own_v, visible = self.parts(*inputs)
        on_carried = torch.zeros_like(own_v)
        on_carried[:, :, : own_v.shape[2] - q.shape[2]] = 1
        nothing = torch.zeros_like(context_v)
        share = block_attention(q, context_k, nothing, own_k, on_carried, visible, self.scale)
        return share[..., 0]


class MLP(nn.Module):
    """Gated feed-forward, with SiLU."""

    activation: Callable[[Tensor], Tensor] = staticmethod(F.silu)

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A Qwen3-style pre-norm transformer block."""

    attention: type[Attention] = Attention
    feed_forward: type[MLP] = MLP

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = self.attention(config)
        self.mlp = self.feed_forward(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, *attention: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *attention)
        return x + self.mlp(self.post_attention_layernorm(x))
