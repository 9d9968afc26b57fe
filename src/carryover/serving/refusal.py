"""The model that is registered where the installed vLLM is not a known version."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from carryover.serving.versions import require_known


class UnknownVersion(nn.Module):
    """Refuses to be built. It imports nothing of vLLM, whose insides may have moved.

    The methods exist because vLLM inspects them, before it builds the model, to tell that this
    is a text model.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        del vllm_config, prefix
        require_known()
        raise AssertionError("registered under a known vLLM")

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError
