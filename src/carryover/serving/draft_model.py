"""What our draft models share, whatever their blocks: checks, weights, carry, scores."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import VllmConfig

from carryover.drafter.checkpoint import CARRY_EMBEDDING, CARRY_PROJECTOR
from carryover.serving import corrections
from carryover.serving.checkpoint import CONFIDENCE, check_tensors
from carryover.serving.drafter_config import check
from carryover.serving.dspark import DSparkInterface


class KeyNormByLayer:
    """For a body, before vLLM's: context keys are normed with each layer's own weight."""

    def _normalize_context_k(self: Any, all_k: torch.Tensor) -> torch.Tensor:
        """Normalise context keys [layers, rows, kv_heads, head_dim] as the blocks do theirs."""
        if corrections.one_norm_weight_for_all_layers():
            epsilon: float = self.config.rms_norm_eps
            return corrections.normalize_by_layer(all_k, self._k_norm_weights, epsilon)
        return super()._normalize_context_k(all_k)  # type: ignore[misc]


class CarryoverDraftModel(DSparkInterface):
    """For a draft model, before the class of vLLM's that has its blocks.

    carry_shift: [hidden_size], F(E_carry), added to the projected features of rejected rows. F has
    no bias, so this equals adding E_carry before F (paper, Algorithm 1). None when not enabled.
    """

    config: Any
    model: Any
    lm_head: Any
    logits_processor: Any
    draft_id_to_target_id: Any

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        settings = check(vllm_config)
        corrections.correct_sampling_parameters()
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        self.settings = settings
        # Of the scores and of the Markov head's part, each by itself: as vLLM's Gemma4DSparkModel.
        self.logits_processor.soft_cap = getattr(self.config, "final_logit_softcapping", None)
        self.carry_shift: torch.Tensor | None = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a checkpoint. Raises CarryoverError where a tensor is missing or of another shape.

        A checkpoint's E_carry or F_carry is left out when `carryover.enabled` is false, and so is
        always its confidence head.
        """
        tensors = {name: t for name, t in weights if not name.startswith(CONFIDENCE)}
        reduced = self.draft_id_to_target_id is not None
        check_tensors(
            tensors,
            blocks=self.settings.blocks,
            width=self.model.fc.input_size,
            hidden=self.config.hidden_size,
            layers=self.config.num_hidden_layers,
            vocabulary=self.config.vocab_size,
            draft_vocabulary=self.config.draft_vocab_size if reduced else None,
            carries=self.settings.enabled,
            markov_rank=self.settings.markov_rank,
        )
        carry_embedding = tensors.pop(CARRY_EMBEDDING, None)
        tensors.pop(CARRY_PROJECTOR, None)
        super().load_weights(tensors.items())  # type: ignore[misc]
        if self.settings.enabled and carry_embedding is not None:
            # In fp32, rounded once: E_carry is small beside the features it is added to.
            weight: torch.Tensor = self.model.fc.weight
            shift = weight.float() @ carry_embedding.to(weight.device).float()
            self.carry_shift = shift.to(weight.dtype)

    def draft_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Scores [rows, V_d] of block states [rows, hidden_size], by draft ids, without bias."""
        scores: torch.Tensor = self.logits_processor(self.lm_head, states)
        return scores

    def markov_bias(self, previous: torch.Tensor) -> torch.Tensor:
        """The Markov head's addition [rows, V_d], given the tokens before: [rows] target ids."""
        head = self.model.markov_head
        bias: torch.Tensor = head.bias(head.embed(previous), self.logits_processor)
        return bias

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Map draft ids (any shape) to target ids."""
        if self.draft_id_to_target_id is None:
            return draft_ids
        ids: torch.Tensor = draft_ids + self.draft_id_to_target_id[draft_ids]
        return ids

    def over_target_vocabulary(self, scores: torch.Tensor) -> torch.Tensor:
        """Spread [rows, V_d] over the target's ids: [rows, V], -inf where none is proposed."""
        if self.draft_id_to_target_id is None:
            return scores
        rows, size = scores.shape
        spread = scores.new_full((rows, self.config.vocab_size), float("-inf"))
        spread[:, self.target_ids(torch.arange(size, device=scores.device))] = scores
        return spread
