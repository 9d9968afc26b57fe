"""The names under which vLLM's DSpark speculator calls its draft model."""

from __future__ import annotations

from typing import Any

import torch


class DSparkInterface:
    """For a model with `draft_logits`, `target_ids` and `markov_bias` (of token ids).

    As vllm/model_executor/models/qwen3_dspark.py: Qwen3DSparkForCausalLM, but that the bias is had
    in one step from the token before, whose embedding is not needed for anything else.
    """

    def compute_draft_logits(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """Scores [rows, V_d] of block states [rows, hidden_size], without bias."""
        return self.draft_logits(hidden_states)

    def map_draft_to_target(self: Any, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft ids (any shape) to target ids."""
        return self.target_ids(draft_ids)

    def markov_embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """What `markov_bias` takes: the ids themselves."""
        return token_ids
