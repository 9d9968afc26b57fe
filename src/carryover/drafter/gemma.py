"""Gemma-4-style transformer blocks, what DeepSpec's Gemma4DSparkModel is made of.

Source: transformers' `Gemma4TextDecoderLayer` with full attention and `attention_k_eq_v`, and
DeepSpec's `deepspec/modeling/dspark/gemma4/modeling.py`, whose tensor names these are. What differs
from Qwen3's blocks: values are the key projection under a norm of their own, scores are not scaled,
a branch is normed at both ends, the gate is GELU, and a frozen scalar ends the block.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from carryover.drafter import blocks
from carryover.drafter.config import DrafterConfig


class Attention(blocks.Attention):
    """One projection for keys and values; q, k and v are normed, v without weights."""

    scale = 1.0

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        del self.v_proj
        self.v_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps, elementwise_affine=False)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., H] at positions [...] -> keys and values, both [..., kv_heads, D]."""
        projected = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        return self.rotary(self.k_norm(projected), positions), self.v_norm(projected)


class MLP(blocks.MLP):
    """Gated feed-forward, with GELU in its tanh approximation."""

    activation = staticmethod(partial(F.gelu, approximate="tanh"))


class Block(blocks.Block):
    """Norms before and after attention and feed-forward, inside of the residual branches."""

    attention, feed_forward = Attention, MLP
    layer_scalar: Tensor  # [1], as in the checkpoint; not trained

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.pre_feedforward_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, x: Tensor, *attention: Any) -> Tensor:
        """x: [R, N, S, H]; attention: the further inputs of `Attention`."""
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), *attention))
        inner = self.mlp(self.pre_feedforward_layernorm(x))
        x = x + self.post_feedforward_layernorm(inner)
        # DeepSpeed leaves buffers in fp32.
        return x * self.layer_scalar.to(x.dtype)
