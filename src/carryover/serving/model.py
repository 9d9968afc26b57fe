"""The draft model: vLLM's DFlash for Qwen3-style blocks, plus E_carry and optional q/k norms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model

from carryover.serving import corrections
from carryover.serving.checkpoint import CARRY_EMBEDDING, CARRY_PROJECTOR, check_tensors
from carryover.serving.drafter_config import DrafterSettings, check


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


class CarryoverDFlashModel(DFlashQwen3Model):
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
        if not self.settings.qk_norm:
            attentions: list[Any] = [layer.self_attn for layer in self.layers]
            for attention in attentions:
                attention.q_norm = NoNorm(attention.head_dim, self.config.rms_norm_eps)
                attention.k_norm = NoNorm(attention.head_dim, self.config.rms_norm_eps)

    def _normalize_context_k(self, all_k: torch.Tensor) -> torch.Tensor:
        """Normalise context keys [layers, rows, kv_heads, head_dim] as the blocks do theirs."""
        if not self.settings.qk_norm:
            return all_k
        if corrections.one_norm_weight_for_all_layers():
            epsilon: float = self.config.rms_norm_eps
            return corrections.normalize_by_layer(all_k, self._k_norm_weights, epsilon)
        return super()._normalize_context_k(all_k)


class CarryoverDFlashForCausalLM(DFlashQwen3ForCausalLM):
    """A carryover drafter, or with `carryover.enabled: false` a plain one, as vLLM loads it.

    carry_shift: [hidden_size], F(E_carry), added to the projected features of rejected rows. F has
    no bias, so this equals adding E_carry before F (paper, Algorithm 1). None when not enabled.
    """

    model_cls = CarryoverDFlashModel

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        settings = check(vllm_config)
        corrections.correct_sampling_parameters()
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.settings = settings
        self.carry_shift: torch.Tensor | None = None

    def load_weights(  # type: ignore[override]  # None, as the method of the same name above it
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Load a checkpoint. Raises CarryoverError where a tensor is missing or of another shape.

        A checkpoint's E_carry or F_carry is left out when `carryover.enabled` is false.
        """
        tensors = dict(weights)
        projection: Any = self.model.fc
        reduced = self.draft_id_to_target_id is not None
        check_tensors(
            tensors,
            width=projection.input_size,
            hidden=self.config.hidden_size,
            layers=self.config.num_hidden_layers,
            vocabulary=self.config.vocab_size,
            draft_vocabulary=self.config.draft_vocab_size if reduced else None,
            carries=self.settings.enabled,
        )
        carry_embedding = tensors.pop(CARRY_EMBEDDING, None)
        tensors.pop(CARRY_PROJECTOR, None)
        super().load_weights(tensors.items())
        if self.settings.enabled and carry_embedding is not None:
            # In fp32, rounded once: E_carry is small beside the features it is added to.
            weight: torch.Tensor = projection.weight
            shift = weight.float() @ carry_embedding.to(weight.device).float()
            self.carry_shift = shift.to(weight.dtype)
