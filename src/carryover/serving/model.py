"""The draft model: vLLM's DFlash for Qwen3-style blocks, plus E_carry, a Markov head, and blocks
without q/k norms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model
from vllm.model_executor.models.qwen3_dspark import DSparkMarkovHead
from vllm.model_executor.models.utils import maybe_prefix

from carryover.serving import corrections
from carryover.serving.checkpoint import (
    CARRY_EMBEDDING,
    CARRY_PROJECTOR,
    CONFIDENCE,
    check_tensors,
)
from carryover.serving.drafter_config import DrafterSettings, check
from carryover.serving.dspark import DSparkInterface


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
        if not self.settings.qk_norm:
            return all_k
        if corrections.one_norm_weight_for_all_layers():
            epsilon: float = self.config.rms_norm_eps
            return corrections.normalize_by_layer(all_k, self._k_norm_weights, epsilon)
        return super()._normalize_context_k(all_k)


class CarryoverDFlashForCausalLM(DSparkInterface, DFlashQwen3ForCausalLM):
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
        # Of the scores and of the Markov head's part, each by itself: as vLLM's Gemma4DSparkModel.
        self.logits_processor.soft_cap = getattr(self.config, "final_logit_softcapping", None)
        self.carry_shift: torch.Tensor | None = None

    def load_weights(  # type: ignore[override]  # None, as the method of the same name above it
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Load a checkpoint. Raises CarryoverError where a tensor is missing or of another shape.

        A checkpoint's E_carry or F_carry is left out when `carryover.enabled` is false, and so is
        always its confidence head.
        """
        tensors = {name: t for name, t in weights if not name.startswith(CONFIDENCE)}
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
            markov_rank=self.settings.markov_rank,
        )
        carry_embedding = tensors.pop(CARRY_EMBEDDING, None)
        tensors.pop(CARRY_PROJECTOR, None)
        super().load_weights(tensors.items())
        if self.settings.enabled and carry_embedding is not None:
            # In fp32, rounded once: E_carry is small beside the features it is added to.
            weight: torch.Tensor = projection.weight
            shift = weight.float() @ carry_embedding.to(weight.device).float()
            self.carry_shift = shift.to(weight.dtype)

    def draft_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Scores [rows, V_d] of block states [rows, hidden_size], by draft ids, without bias."""
        return self.logits_processor(self.lm_head, states)

    def markov_bias(self, previous: torch.Tensor) -> torch.Tensor:
        """The Markov head's addition [rows, V_d], given the tokens before: [rows] target ids."""
        head: Any = self.model.markov_head
        return head.bias(head.embed(previous), self.logits_processor)

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Map draft ids (any shape) to target ids."""
        if self.draft_id_to_target_id is None:
            return draft_ids
        return draft_ids + self.draft_id_to_target_id[draft_ids]

    def over_target_vocabulary(self, scores: torch.Tensor) -> torch.Tensor:
        """Spread [rows, V_d] over the target's ids: [rows, V], -inf where none is proposed."""
        if self.draft_id_to_target_id is None:
            return scores
        rows, size = scores.shape
        spread = scores.new_full((rows, self.config.vocab_size), float("-inf"))
        spread[:, self.target_ids(torch.arange(size, device=scores.device))] = scores
        return spread
