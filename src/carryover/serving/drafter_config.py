"""Reads a drafter's config.json and refuses what this plugin would serve wrongly.

Every check raises CarryoverError before weights are read, with one line that names the key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.model_executor.model_loader.utils import get_draft_load_config

from carryover.errors import CarryoverError
from carryover.serving.plugin import (
    ARCHITECTURE,
    DSPARK_ARCHITECTURE,
    GEMMA_ARCHITECTURE,
    WORKER,
)
from carryover.serving.trace_settings import TraceSettings

# Slot layout -> vLLM's method that lays slots out so, and the architecture to be served with it.
_SERVED_AS = {
    "fill_in": ("dflash", ARCHITECTURE),
    "anchor_first": ("dspark", DSPARK_ARCHITECTURE),
}
_EXPORT_AGAIN = "Export the drafter again with `carryover export`."


@dataclass(frozen=True)
class DrafterSettings:
    """What config.json says of the round: the field `carryover`, and the Markov head.

    enabled: rejected rows are carried (false: the same weights served as a plain drafter).
    qk_norm: the drafter's blocks normalise queries and keys, as Qwen3 does (false: as Llama).
    markov_rank: width of the Markov head's embedding; 0: the block is proposed in parallel.
    slot_layout: fill_in (slot k predicts anchor + k) or anchor_first (slot k, anchor + k + 1).
    blocks: qwen3 or gemma4, the transformer blocks; Gemma's are anchor_first.
    """

    enabled: bool
    qk_norm: bool
    markov_rank: int
    slot_layout: str
    blocks: str = "qwen3"

    @classmethod
    def of(cls, hf_config: Any) -> DrafterSettings:
        """Read them from the drafter's config. Raises CarryoverError where they are unusable."""
        field = getattr(hf_config, "carryover", None)
        if not isinstance(field, dict) or not isinstance(field.get("enabled"), bool):
            raise CarryoverError(
                "the drafter's config.json has no `carryover.enabled` (true or false)",
                _EXPORT_AGAIN,
            )
        layout = field.get("slot_layout")
        if layout not in _SERVED_AS:
            raise CarryoverError(
                f"`carryover.slot_layout` is {layout!r}, not {' or '.join(_SERVED_AS)}",
                _EXPORT_AGAIN,
            )
        blocks = field.get("blocks", "qwen3")
        if blocks not in ("qwen3", "gemma4"):
            raise CarryoverError(
                f"`carryover.blocks` is {blocks!r}, not qwen3 or gemma4", _EXPORT_AGAIN
            )
        if blocks == "gemma4" and layout != "anchor_first":
            raise CarryoverError(
                f"`carryover.blocks` is gemma4 and `carryover.slot_layout` is {layout}, and vLLM "
                "has no method for the two together",
                "Train Gemma's blocks with slot_layout anchor_first.",
            )
        if field["enabled"]:
            _check_carry(field)
        qk_norm = field.get("qk_norm", True)
        if not isinstance(qk_norm, bool):
            raise CarryoverError(
                f"`carryover.qk_norm` is {qk_norm!r}, not true or false", _EXPORT_AGAIN
            )
        rank = getattr(hf_config, "markov_rank", None) or 0
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise CarryoverError(f"`markov_rank` is {rank!r}, not a number from 0", _EXPORT_AGAIN)
        kind = getattr(hf_config, "markov_head_type", "vanilla")
        if rank and kind != "vanilla":
            raise CarryoverError(
                f"`markov_head_type` is {kind!r}, and only 'vanilla' is served",
                "Use a drafter whose Markov head is a table of the token before.",
            )
        return cls(field["enabled"], qk_norm, rank, layout, blocks)

    @property
    def method(self) -> str:
        """vLLM's speculative method that has this slot layout."""
        return _SERVED_AS[self.slot_layout][0]

    @property
    def architecture(self) -> str:
        """Our architecture for this slot layout and these blocks."""
        if self.blocks == "gemma4":
            return GEMMA_ARCHITECTURE
        return _SERVED_AS[self.slot_layout][1]

    @property
    def needs_worker(self) -> str | None:
        """What of this drafter vLLM's own worker would leave out; None where nothing."""
        if self.enabled:
            return "carries rejected states over, which vLLM's own worker does not do"
        if self.markov_rank and self.method == "dflash":
            return "has a Markov head, which vLLM's own worker would leave out"
        if not self.markov_rank and self.method == "dspark":
            return "has no Markov head, which vLLM's own worker expects with method dspark"
        return None


def _check_carry(field: dict[str, Any]) -> None:
    """Refuse what the draft model does not read: it adds E_carry to rejected hidden states."""
    without = "or set `carryover.enabled` to false to serve it without carry."
    rows = field.get("rows", "hidden_states")
    if rows != "hidden_states":
        raise CarryoverError(
            f"`carryover.rows` is {rows!r}, and only hidden_states are carried over in serving",
            f"Train with carry.rows: hidden_states, {without}",
        )
    # An export with `none` holds an E_carry of zeros.
    distinction = field.get("distinction", "embedding")
    if distinction not in ("embedding", "none"):
        raise CarryoverError(
            f"`carryover.distinction` is {distinction!r}, and only embedding and none are served",
            f"Train with carry.distinction: embedding, {without}",
        )


def check(vllm_config: VllmConfig) -> DrafterSettings:
    """Check a drafter against its target and the engine's settings.

    Returns what its `carryover` field says. Raises CarryoverError for a drafter of another target
    and for settings under which its drafts would be wrong or untested.
    """
    speculative = vllm_config.speculative_config
    assert speculative is not None
    drafter = speculative.draft_model_config.hf_config
    settings = DrafterSettings.of(drafter)
    _check_engine(vllm_config, drafter, settings)
    _check_target(vllm_config, drafter)
    _check_blocks(drafter)
    return settings


def _check_engine(vllm_config: VllmConfig, drafter: Any, settings: DrafterSettings) -> None:
    speculative = vllm_config.speculative_config
    parallel = vllm_config.parallel_config
    assert speculative is not None
    if speculative.method != settings.method:
        raise CarryoverError(
            f"a drafter with slot_layout {settings.slot_layout} is served with method "
            f"{settings.method}, not {speculative.method!r}",
            f'Put "method": "{settings.method}" into --speculative-config.',
        )
    if settings.architecture not in drafter.architectures:
        raise CarryoverError(
            f"`architectures` is {drafter.architectures}, and slot_layout {settings.slot_layout} "
            f"with {settings.blocks} blocks is served as {settings.architecture}",
            _EXPORT_AGAIN,
        )
    traced = TraceSettings.of(vllm_config.additional_config) is not None
    if vllm_config.use_v2_model_runner:
        _check_v2(speculative, settings)
        if traced:
            raise CarryoverError(
                "carryover_trace is written by vLLM's V1 model runner only",
                "Set the environment variable VLLM_USE_V2_MODEL_RUNNER=0.",
            )
    needed = settings.needs_worker
    if needed is None and traced:
        needed = "is to be traced, which vLLM's own worker does not do"
    if needed is not None and parallel.worker_cls != WORKER:
        raise CarryoverError(
            f"this drafter {needed}",
            f"Add --worker-cls {WORKER} (LLM(..., worker_cls=...) in Python).",
        )
    for name in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        size = getattr(parallel, name)
        if size > 1:
            raise CarryoverError(
                f"carryover drafters are served on one device, and {name} is {size}",
                f"Set {name} to 1.",
            )
    if speculative.draft_model_config.quantization is not None:
        raise CarryoverError(
            f"quantized drafters ({speculative.draft_model_config.quantization}) are not supported",
            "Serve the drafter unquantized.",
        )
    if get_draft_load_config(vllm_config).load_format == "dummy":
        raise CarryoverError(
            "load_format dummy reads no checkpoint, and so leaves the drafter without E_carry, d2t "
            "and the fused weights that vLLM's DFlash builds while reading",
            "To time a drafter, write random tensors into a checkpoint, as "
            "benchmarks/serving_latency.py does.",
        )
    # A block holds the anchor's slot too; anchor_first proposes from it.
    proposals = getattr(drafter, "block_size", 0) - (settings.slot_layout == "fill_in")
    if proposals < 1:
        raise CarryoverError(
            "the drafter's config.json has no `block_size` (the slots of a block)", _EXPORT_AGAIN
        )
    if speculative.num_speculative_tokens > proposals:
        raise CarryoverError(
            f"num_speculative_tokens is {speculative.num_speculative_tokens}, and the drafter was "
            f"trained to propose {proposals}",
            f"Set num_speculative_tokens to {proposals} or less.",
        )


def _check_v2(speculative: SpeculativeConfig, settings: DrafterSettings) -> None:
    if speculative.enable_adaptive_verification:
        raise CarryoverError(
            "enable_adaptive_verification is not supported with carryover drafters: it leaves the "
            "number of proposals to the device",
            "Leave it out of --speculative-config.",
        )
    if getattr(speculative.draft_model_config.hf_config, "dspark_draft_topk", None) is not None:
        raise CarryoverError(
            "dspark_draft_topk is not supported with carryover drafters",
            "Leave it out of --speculative-config and of the drafter's config.json.",
        )
    if settings.enabled and speculative.rejection_sample_method != "standard":
        raise CarryoverError(
            f"rejection_sample_method is {speculative.rejection_sample_method!r}, and the output "
            "with carried rows is shown to be the target's with 'standard' only",
            "Leave it out of --speculative-config.",
        )


def _check_target(vllm_config: VllmConfig, drafter: Any) -> None:
    target = vllm_config.model_config
    other = f"This drafter is for another target than {target.model}."
    width = getattr(drafter, "target_hidden_size", None) or drafter.hidden_size
    if width != target.get_hidden_size():
        raise CarryoverError(
            f"the drafter reads features of width {width} a layer, and the target's are "
            f"{target.get_hidden_size()} wide",
            other,
        )
    if drafter.hidden_size != target.get_hidden_size():
        raise CarryoverError(
            f"the drafter's hidden_size is {drafter.hidden_size}, and it shares the target's "
            f"embeddings, which are {target.get_hidden_size()} wide",
            other,
        )
    if drafter.vocab_size != target.get_vocab_size():
        raise CarryoverError(
            f"the drafter's vocab_size is {drafter.vocab_size}, and the target's is "
            f"{target.get_vocab_size()}",
            other,
        )
    layers = _setting(drafter, "target_layer_ids") or []
    blocks = target.get_total_num_hidden_layers()
    # vLLM hands the features over in layer order, whatever the order of this list.
    if not layers or layers != sorted(set(layers)):
        raise CarryoverError(
            f"`target_layer_ids` is {layers}, not an increasing list", _EXPORT_AGAIN
        )
    if layers[0] < 0 or layers[-1] >= blocks:
        raise CarryoverError(
            f"`target_layer_ids` is {layers}, and the target has blocks 0 to {blocks - 1}",
            other,
        )
    mask = _setting(drafter, "mask_token_id")
    if not isinstance(mask, int) or not 0 <= mask < drafter.vocab_size:
        raise CarryoverError(
            f"`mask_token_id` is {mask}, not a token id below {drafter.vocab_size}",
            _EXPORT_AGAIN,
        )


def _setting(drafter: Any, name: str) -> Any:
    """A key of `dflash_config` (z-lab), or of the top level (DeepSpec); vLLM reads them so."""
    inner = (getattr(drafter, "dflash_config", None) or {}).get(name)
    outer = getattr(drafter, name, None)
    if inner is not None and outer is not None and inner != outer:
        raise CarryoverError(
            f"the drafter's config.json has two values of `{name}`: {inner} in `dflash_config`, "
            f"{outer} at the top",
            _EXPORT_AGAIN,
        )
    return outer if inner is None else inner


def _check_blocks(drafter: Any) -> None:
    settings = getattr(drafter, "dflash_config", None) or {}
    layer_types = getattr(drafter, "layer_types", None) or []
    if settings.get("use_swa") or "sliding_attention" in layer_types:
        raise CarryoverError(
            "the drafter has sliding-window layers, which carryover does not support",
            "Use a drafter whose `layer_types` are all full_attention.",
        )
