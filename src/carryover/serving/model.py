"""The draft model with Qwen3-style blocks: vLLM's DFlash, plus E_carry, a Markov head, and blocks
without q/k norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model
from vllm.model_executor.models.qwen3_dspark import DSparkMarkovHead
from vllm.model_executor.models.utils import maybe_prefix

from carryover.serving.draft_model import CarryoverDraftModel, KeyNormByLayer
from carryover.serving.drafter_config import DrafterSettings


class NoNorm(nn.Module):
    """Stands for a block's q_norm or k_norm where the drafter has none: gives back its input.

    It keeps the checkpoint's weight (the format requires one), and the epsilon, which vLLM reads
    from there for the drafter's other norms.
    """

    def __init__(self, head_dim: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(head_dim), requires_grad=False)
        self.variance_epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class CarryoverDFlashModel(KeyNormByLayer, DFlashQwen3Model):
    """The drafter's body. Subclasses vllm/model_executor/models/qwen3_dflash.py.

    Args:
        settings: the `carryover` field of the drafter's config.
    """

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        start_layer_id: int = 0,
        prefix: str = "",
    ) -> None:
        super().__init__(vllm_config=vllm_config, start_layer_id=start_layer_id, prefix=prefix)
        self.settings = DrafterSettings.of(self.config)
        if self.settings.markov_rank:
            self.markov_head = DSparkMarkovHead(
                self.config.vocab_size,
                self.config.draft_vocab_size,
                self.settings.markov_rank,
                prefix=maybe_prefix(prefix, "markov_head"),
            )
        if not self.settings.qk_norm:
            attentions: list[Any] = [layer.self_attn for layer in self.layers]
            for attention in attentions:
                attention.q_norm = NoNorm(attention.head_dim, self.config.rms_norm_eps)
                attention.k_norm = NoNorm(attention.head_dim, self.config.rms_norm_eps)

    def _normalize_context_k(self, all_k: torch.Tensor) -> torch.Tensor:
        """Normalise context keys [layers, rows, kv_heads, head_dim] as the blocks do theirs."""
        return super()._normalize_context_k(all_k) if self.settings.qk_norm else all_k


class CarryoverDFlashForCausalLM(CarryoverDraftModel, DFlashQwen3ForCausalLM):  # type: ignore[misc]
    """A carryover drafter, or with `carryover.enabled: false` a plain one, as vLLM loads it."""

    model_cls = CarryoverDFlashModel
