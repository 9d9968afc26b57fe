"""The draft model: vLLM's DFlash for Qwen3-style blocks, plus E_carry and optional q/k norms."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model

from carryover.errors import CarryoverError
from carryover.serving import corrections
from carryover.serving.drafter_config import DrafterSettings, check

_CARRY = "carry_embedding"


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
        super().__init__(
            vllm_config=vllm_config, start_layer_id=start_layer_id, prefix=prefix
        )
        self.settings = DrafterSettings.of(self.config)
        if not self.settings.qk_norm:
            for layer in self.layers:
                attention = layer.self_attn
                attention.q_norm = NoNorm(attention.head_dim, self.config.rms_norm_eps)
                attention.k_norm = NoNorm(attention.head_dim, self.config.rms_norm_eps)
        if self.settings.enabled:
            self.carry_embedding = nn.Parameter(
                torch.zeros(self.fc.input_size, dtype=self.fc.weight.dtype), requires_grad=False
            )

    def _normalize_context_k(self, all_k: torch.Tensor) -> torch.Tensor:
        """Normalise context keys [layers, rows, kv_heads, head_dim] as the blocks do theirs."""
        if not self.settings.qk_norm:
            return all_k
        if corrections.one_norm_weight_for_all_layers():
            return corrections.normalize_by_layer(
                all_k, self._k_norm_weights, self._rms_norm_eps
            )
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

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a checkpoint. Raises CarryoverError where a tensor is missing or of another shape.

        A checkpoint's E_carry is left out when `carryover.enabled` is false.
        """
        tensors = dict(weights)
        if not self.settings.enabled:
            tensors.pop(_CARRY, None)
        self._check_tensors(tensors)
        super().load_weights(tensors.items())
        if self.settings.enabled:
            # In fp32, rounded once: E_carry is small beside the features it is added to.
            projection = self.model.fc.weight.float()
            shift = projection @ self.model.carry_embedding.float()
            self.carry_shift = shift.to(self.model.fc.weight.dtype)

    def _check_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        # vLLM leaves a parameter that the checkpoint lacks as it was initialised, silently.
        width = self.model.fc.input_size
        hidden = self.config.hidden_size
        expected: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, width),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        for layer in range(self.config.num_hidden_layers):
            for name in _LAYER_TENSORS:
                expected[f"layers.{layer}.{name}.weight"] = ()
        if self.settings.enabled:
            expected[_CARRY] = (width,)
        if self.draft_id_to_target_id is not None:
            expected["d2t"] = (self.config.draft_vocab_size,)
            expected["lm_head.weight"] = (self.config.draft_vocab_size, hidden)
        for name, shape in expected.items():
            if name not in tensors:
                raise CarryoverError(
                    f"the drafter's checkpoint has no tensor {name}",
                    "Set `carryover.enabled` to false to serve it without carried rows."
                    if name == _CARRY
                    else "Export the drafter again with `carryover export`.",
                )
            found = tuple(tensors[name].shape)
            if shape and found != shape:
                raise CarryoverError(
                    f"the drafter's tensor {name} has shape {list(found)}, and its config and "
                    f"target ask for {list(shape)}",
                    "This drafter is for another target, or its config.json was edited.",
                )
        if self.draft_id_to_target_id is not None:
            offsets = tensors["d2t"].long().cpu()
            ids = torch.arange(offsets.shape[0]) + offsets
            if int(ids.min()) < 0 or int(ids.max()) >= self.config.vocab_size:
                raise CarryoverError(
                    "the drafter's tensor d2t leads to token ids outside the target's vocabulary",
                    "d2t holds target id minus draft id; export the drafter again.",
                )


_LAYER_TENSORS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
)
