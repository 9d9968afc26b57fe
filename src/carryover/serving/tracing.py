"""A proposer that tells a trace what it drafts."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from carryover.serving.proposer import CarryoverProposer
from carryover.serving.trace import Recorder


class TracedProposer(CarryoverProposer):
    """Goes before a proposer's class: see `traced`."""

    recorder: Recorder

    def propose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the proposer; notes the features that it is given. All arguments are by name."""
        self.recorder.features(
            kwargs["common_attn_metadata"].query_start_loc.tolist(),
            kwargs["target_positions"],
            kwargs["target_token_ids"],
            kwargs["target_hidden_states"],
        )
        return super().propose(*args, **kwargs)

    def set_inputs_first_pass(
        self, *args: Any, **kwargs: Any
    ) -> tuple[int, torch.Tensor, CommonAttentionMetadata]:
        """As the proposer; notes how many rows it carries."""
        self.recorder.carried(self._carried)
        return super().set_inputs_first_pass(*args, **kwargs)


def traced(proposer: type[CarryoverProposer]) -> type[TracedProposer]:
    """The same proposer, traced."""
    return type(f"Traced{proposer.__name__}", (TracedProposer, proposer), {})
