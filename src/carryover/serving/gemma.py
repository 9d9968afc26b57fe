"""The draft model with Gemma's blocks: vLLM's Gemma4DSparkModel, plus E_carry, a reduced draft
vocabulary, and drafters without a Markov head. Method dspark, so the V2 model runner alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.gemma4_dspark import Gemma4DSparkForCausalLM, Gemma4DSparkModel
from vllm.model_executor.models.utils import maybe_prefix

from carryover.drafter.checkpoint import EMBEDDING, HEAD, MAP
from carryover.serving.draft_model import CarryoverDraftModel, KeyNormByLayer


class CarryoverGemma4Model(KeyNormByLayer, Gemma4DSparkModel):
    """The drafter's body. Subclasses vllm/model_executor/models/gemma4_dspark.py."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.confidence_head = None  # not used for drafting
        if not self.config.markov_rank:
            self.markov_head = None  # type: ignore[assignment]


class _Gemma4WithOurBody(Gemma4DSparkForCausalLM):
    """vLLM's class with the body above, and with a draft vocabulary.

    What `DFlashQwen3ForCausalLM` lets a subclass choose is fixed in the stock constructor, which
    is therefore written anew.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)
        assert vllm_config.speculative_config is not None
        self.draft_model_config = vllm_config.speculative_config.draft_model_config
        self.config = self.draft_model_config.hf_config
        if getattr(self.config, "draft_vocab_size", None) is None:
            self.config.draft_vocab_size = self.config.vocab_size
        size = self.config.draft_vocab_size
        # Not "model", as in stock: layers of a text-only target are called so, and would be these.
        body: Any = CarryoverGemma4Model(
            vllm_config=vllm_config, prefix=maybe_prefix(prefix, "draft_model")
        )
        self.model = body
        self.lm_head = ParallelLMHead(
            size, self.config.hidden_size, prefix=maybe_prefix(prefix, "lm_head")
        )
        self.logits_processor = LogitsProcessor(size)
        offsets: Any = None
        if size != self.config.vocab_size:
            offsets = nn.Parameter(torch.zeros(size, dtype=torch.long), requires_grad=False)
        self.draft_id_to_target_id = offsets

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:  # type: ignore[override]
        """As stock, but for the copies of the target's ends, which vLLM shares after loading."""
        tensors = dict(weights)
        tensors.pop(EMBEDDING, None)
        if self.draft_id_to_target_id is None:
            tensors.pop(HEAD, None)
        else:
            self.draft_id_to_target_id.data.copy_(tensors.pop(MAP))
        super().load_weights(tensors.items())


class CarryoverGemma4ForCausalLM(CarryoverDraftModel, _Gemma4WithOurBody):  # type: ignore[misc]
    """A carryover drafter, or with `carryover.enabled: false` a plain one, as vLLM loads it."""
