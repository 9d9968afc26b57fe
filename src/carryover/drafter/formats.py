"""Released drafters: one reader per checkpoint format, into our config and tensor names.

    carryover      what `carryover export` and `carryover train` write
    z-lab          architecture DFlashDraftModel (z-lab/dflash: dflash/model.py)
    DeepSpec       architecture Qwen3DSparkModel (deepseek-ai/DeepSpec: deepspec/modeling/dspark)
    DeepSpec-Gemma architecture Gemma4DSparkModel (the same project)
    speculators    field speculators_model_type (vllm-project/speculators: models/{dflash,dspark})

Their tensors have the same names; their config.json files differ in keys and conventions. Every key
is read, known to change nothing in a draft, or refused by name: one that is passed over would give
a drafter that drafts badly, without a word.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from carryover.drafter.checkpoint import EMBEDDING, HEAD, MAP
from carryover.drafter.config import DrafterConfig
from carryover.errors import CarryoverError

BACK_MAP = "t2d"
MASK_EMBEDDING_FILE = "mask_embedding.pt"

# Keys that change nothing in what a drafter computes.
_METADATA = {
    "architectures", "auto_map", "model_type", "_name_or_path", "dtype", "torch_dtype",
    "transformers_version", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id",
    "tie_word_embeddings", "initializer_range", "num_anchors", "max_anchors", "config_class",
    "flex_attention_backend", "ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha",
}  # fmt: skip
_WHOLE_CONTEXT = "every layer of carryover's drafters reads the whole context"
# What our blocks do, where a key may ask for something else.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "is_neox_style": True,
    "is_causal": False,
    "logit_scale": 1.0,
    "add_swa_attention_sink_bias": False,
}
# The same of Gemma's blocks; of the further keys of a Gemma4TextConfig those change nothing that
# say something of sliding-window layers, per-layer embeddings, experts or images.
_FIXED_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "attn_logit_softcapping": None,
    "is_causal": False,
}
_METADATA_GEMMA = {
    "sliding_window", "vocab_size_per_layer_input", "num_kv_shared_layers", "num_experts",
    "top_k_experts", "moe_intermediate_size", "use_bidirectional_attention", "target_model_type",
    "target_text_model_type",
}  # fmt: skip
_WEIGHTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SHAPES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings", "vocab_size",
)  # fmt: skip


@dataclass(frozen=True)
class Released:
    """A drafter as it was released, in our terms.

    format: its name, for messages; fields: arguments of `DrafterConfig` (`target_blocks` and
    `target_hidden_size` only where the format says them); tensors: as in our checkpoints, a
    reduced vocabulary's head and map included; embedding, head: its copies of the target's
    [V, H], where it has them.
    """

    format: str
    fields: dict[str, Any]
    tensors: dict[str, Tensor]
    embedding: Tensor | None = None
    head: Tensor | None = None


class _Fields:
    """A config.json, or a section of it, of which every key has to be taken."""

    def __init__(self, data: dict[str, Any], folder: Path, at: str = "") -> None:
        self._data, self._folder, self._at = dict(data), folder, at

    def take(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """The value of a key that has to be there."""
        value = self.maybe(key, kind)
        if value is None:
            raise self._error(
                f"has no {self._at}{key}",
                "Name another drafter in drafters.*.initialize (formats: docs/warm-start.md).",
            )
        return value

    def maybe(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """The value of a key, None where it is absent or null."""
        value = self._data.pop(key, None)
        wrong = value is not None and not isinstance(value, kind)
        if wrong or (isinstance(value, bool) and kind is not bool):
            raise self._error(f"has {self._at}{key}: {json.dumps(value)}", "Correct that value.")
        return value

    def layer_ids(self, key: str, shift: int = 0) -> tuple[int, ...]:
        """Layer ids, lowered by `shift`: 0-based block outputs, increasing."""
        found = self.take(key, list)
        ids = [i - shift for i in found if type(i) is int]
        rising = ids == sorted(set(ids)) and len(ids) == len(found) > 0
        if not rising or ids[0] < 0:
            raise self._error(
                f"has {self._at}{key}: {json.dumps(found)}",
                "carryover reads outputs of the target's blocks, in increasing order (not the "
                "embedding's).",
            )
        return tuple(ids)

    def section(self, key: str) -> "_Fields":
        """A mapping below a key that has to be there."""
        return _Fields(self.take(key, dict), self._folder, f"{self._at}{key}.")

    def fixed(self, key: str, value: Any) -> None:
        """A key that may be there with one value (or null) alone."""
        found = self._data.pop(key, None)
        if found is not None and found != value:
            raise self.refused(key, found, f"carryover's drafters have {json.dumps(value)}")

    def drop(self, *keys: str) -> None:
        """Keys that change nothing."""
        for key in keys:
            self._data.pop(key, None)

    def end(self) -> None:
        """Refuse what was not taken. A null asks for nothing."""
        for key, value in self._data.items():
            if value is not None:
                raise self.refused(key, value, "carryover does not know that key")

    def refused(self, key: str, value: Any, why: str) -> CarryoverError:
        return self._error(
            f"sets {self._at}{key} to {json.dumps(value)}, and {why}",
            "Name another drafter in drafters.*.initialize: served with this one unread, its "
            "drafts would be wrong.",
        )

    def _error(self, problem: str, fix: str) -> CarryoverError:
        return CarryoverError(f"{self._folder / 'config.json'} {problem}", fix)


def detect(config: dict[str, Any]) -> str:
    """The format that a config.json is in: a key of `READERS`. Raises CarryoverError for others.

    The marks are looked for in this order: speculators calls its class DFlashDraftModel too, and
    our own checkpoints name every class that serves them.
    """
    architectures = config.get("architectures") or []
    if "carryover" in config:
        return "carryover"
    if "speculators_model_type" in config:
        return "speculators"
    if "Gemma4DSparkModel" in architectures:
        return "DeepSpec-Gemma"
    if "Qwen3DSparkModel" in architectures:
        return "DeepSpec"
    if "DFlashDraftModel" in architectures:
        return "z-lab"
    raise CarryoverError(
        f"no drafter format is known with architectures {json.dumps(architectures)}",
        "Known are z-lab's DFlashDraftModel, DeepSpec's Qwen3DSparkModel and Gemma4DSparkModel, "
        "speculators' dflash and dspark, and carryover's own.",
    )


def read(folder: Path) -> Released:
    """Read the drafter in `folder`.

    Raises CarryoverError where a file is missing or damaged, and for what our drafters cannot
    represent, by key or tensor.
    """
    path = folder / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        name = detect(data)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CarryoverError(
            f"{path} is no readable config ({str(error).splitlines()[0]})", "Fetch it again."
        ) from error
    except CarryoverError as error:
        raise CarryoverError(f"{folder}: {error.reason}", error.fix) from None
    if (folder / MASK_EMBEDDING_FILE).exists():
        raise CarryoverError(
            f"{folder} has a mask embedding of its own ({MASK_EMBEDDING_FILE}), and carryover's "
            "drafters take the target's",
            "Name another drafter in drafters.*.initialize.",
        )
    try:
        fields = READERS[name](data, folder)
    except (TypeError, AttributeError, ValueError, LookupError) as error:
        raise CarryoverError(
            f"{path} has a value of another kind than its key has ({str(error).splitlines()[0]})",
            "Fetch it again.",
        ) from error
    _check_numbers(fields, path)
    return _with_tensors(name, fields, _load(folder), folder)


def _check_numbers(fields: dict[str, Any], path: Path) -> None:
    """Refuse numbers with which no drafter can compute."""
    at_least_one = (
        *_SHAPES, "head_dim", "num_key_value_heads", "proposals", "target_blocks",
        "target_hidden_size",
    )  # fmt: skip
    limits: dict[str, tuple[float, float]] = {
        **dict.fromkeys(at_least_one, (1, math.inf)),
        "rms_norm_eps": (1e-30, 1),
        "rope_theta": (1 + 1e-6, math.inf),
        "partial_rotary_factor": (0, 1),
        "markov_rank": (0, math.inf),
        "final_logit_softcapping": (1e-6, math.inf),
    }
    for name, (low, high) in limits.items():
        value = fields.get(name)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not low <= value <= high:
            raise CarryoverError(f"{path} gives {value!r} as {name}", "Correct that value.")


def _own(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    fields = asdict(DrafterConfig.from_json(data))
    if fields.pop("carry"):
        raise CarryoverError(
            f"{folder} is a drafter that reads carried rows, and a baseline reads none",
            "Name the folder of its baseline or control in drafters.*.initialize.",
        )
    del fields["carry_distinction"]
    return fields


def _zlab(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """fill_in; ids are block outputs; `block_size` = B + 1, in newer ones inside dflash_config."""
    fields = _Fields(data, folder)
    dflash = fields.section("dflash_config")
    outer, inner = fields.maybe("block_size", int), dflash.maybe("block_size", int)
    if outer is not None and inner is not None and outer != inner:
        raise dflash.refused("block_size", inner, f"the top-level block_size is {outer}")
    block = outer or inner or fields.take("block_size", int)
    read = _transformer(fields) | {
        "target_layer_ids": dflash.layer_ids("target_layer_ids"),
        "mask_token_id": dflash.take("mask_token_id", int),
        "proposals": block - 1,
        "slot_layout": "fill_in",
    }
    dflash.fixed("causal", False)
    dflash.fixed("sample_from_anchor", False)
    dflash.fixed("use_swa", False)
    dflash.drop("swa_window_size")  # read where use_swa is true
    dflash.fixed("attention_sink_bias", False)
    dflash.fixed("attention_value_scale", 1.0)
    dflash.fixed("use_aux_hidden_state", True)
    dflash.end()
    fields.end()
    return read


def _deepspec(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """anchor_first; ids are block outputs; `block_size` = B; markov_rank 0 is its DFlash."""
    fields = _Fields(data, folder)
    return _dspark(fields, _transformer(fields))


def _deepspec_gemma(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same with a Gemma4TextConfig for the blocks."""
    fields = _Fields(data, folder)
    return _dspark(fields, _gemma_transformer(fields))


def _dspark(fields: _Fields, transformer: dict[str, Any]) -> dict[str, Any]:
    """DeepSpec's own keys, after those of the blocks."""
    read = transformer | {
        "target_layer_ids": fields.layer_ids("target_layer_ids"),
        "mask_token_id": fields.take("mask_token_id", int),
        "proposals": fields.take("block_size", int),
        "slot_layout": "anchor_first",
        **_markov(fields),
    }
    fields.fixed("sample_from_anchor", True)
    fields.fixed("dspark_bonus_anchor", False)
    fields.end()
    return read


def _speculators(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Ids are block *inputs*, one higher; `sample_from_anchor` says the slot layout."""
    fields = _Fields(data, folder)
    kind = fields.take("speculators_model_type", str)
    if kind not in ("dflash", "dspark"):
        raise fields.refused("speculators_model_type", kind, "carryover reads dflash and dspark")
    inner = fields.section("transformer_layer_config")
    read = _transformer(inner)
    # Absent in checkpoints that are older than the key, for both kinds: vLLM takes it as false.
    anchor_first = fields.maybe("sample_from_anchor", bool) or False
    block = fields.take("block_size", int)
    proposals = block if anchor_first else block - 1
    _check_proposals(fields.section("speculators_config"), proposals)
    read |= {
        "target_layer_ids": fields.layer_ids("aux_hidden_state_layer_ids", shift=1),
        "mask_token_id": fields.take("mask_token_id", int),
        "proposals": proposals,
        "slot_layout": "anchor_first" if anchor_first else "fill_in",
        "draft_vocab_size": fields.maybe("draft_vocab_size", int),
    }
    width = fields.maybe("target_hidden_size", int)
    if width is not None:
        read["target_hidden_size"] = width
    if kind == "dspark":
        read |= _markov(fields)
    # Of sliding-window layers, which `_transformer` refuses; full ones look both ways in a block.
    fields.drop("sliding_window_non_causal")
    fields.drop("speculators_version", *_METADATA)
    inner.end()
    fields.end()
    return read


def _check_proposals(fields: _Fields, proposals: int) -> None:
    """Refuse a drafter whose speculative_tokens are not those of its block and slot layout."""
    for method in fields.take("proposal_methods", list):
        found = method.get("speculative_tokens")
        if found != proposals:
            raise fields.refused(
                "proposal_methods.speculative_tokens",
                found,
                f"its block_size and sample_from_anchor give {proposals}",
            )


READERS: dict[str, Callable[[dict[str, Any], Path], dict[str, Any]]] = {
    "carryover": _own,
    "z-lab": _zlab,
    "DeepSpec": _deepspec,
    "DeepSpec-Gemma": _deepspec_gemma,
    "speculators": _speculators,
}


def _transformer(fields: _Fields) -> dict[str, Any]:
    """What the three foreign formats share: a Qwen3Config for the blocks, q/k norms included."""
    read = {name: fields.take(name, int) for name in ("num_key_value_heads", "head_dim")}
    read["rope_theta"] = _rope_theta(fields)
    _check_full_attention(fields)
    for key, value in _FIXED.items():
        fields.fixed(key, value)
    return read | _any_transformer(fields)


def _gemma_transformer(fields: _Fields) -> dict[str, Any]:
    """A Gemma4TextConfig for the blocks: full-attention layers whose values are their keys."""
    read: dict[str, Any] = {"blocks": "gemma4"}
    types = fields.take("layer_types", list)
    if any(kind != "full_attention" for kind in types):
        raise fields.refused("layer_types", types, _WHOLE_CONTEXT)
    if not fields.take("attention_k_eq_v", bool):
        why = "carryover's Gemma blocks have one projection for keys and values, as vLLM asks for"
        raise fields.refused("attention_k_eq_v", False, why)
    read |= _gemma_heads(fields, len(types)) | _gemma_rope(fields.section("rope_parameters"))
    for key, value in _FIXED_GEMMA.items():
        fields.fixed(key, value)
    fields.drop(*_METADATA_GEMMA)
    read |= _any_transformer(fields)
    if len(types) != read["num_hidden_layers"]:
        why = f"num_hidden_layers is {read['num_hidden_layers']}"
        raise fields.refused("layer_types", types, why)
    return read


def _gemma_heads(fields: _Fields, count: int) -> dict[str, Any]:
    """Head size and key heads of full-attention layers, the same in all of `count`.

    Newer versions of transformers write what a layer has of its own into `per_layer_config`, older
    ones two keys for full-attention layers, which are not read where the new one is there.
    """
    read = {name: fields.take(name, int) for name in ("head_dim", "num_key_value_heads")}
    layers = fields.maybe("per_layer_config", dict)
    if layers is None:
        read["head_dim"] = fields.take("global_head_dim", int)
        heads = fields.maybe("num_global_key_value_heads", int)
        return read if heads is None else read | {"num_key_value_heads": heads}
    fields.drop("global_head_dim", "num_global_key_value_heads")
    names = [str(i) for i in range(max(count, 1))]
    own = [read | dict(layers.get(name, {})) for name in names]
    alike = all(layer == own[0] and set(layer) == set(read) for layer in own)
    numbers = all(type(size) is int for layer in own for size in layer.values())
    if not alike or not numbers or not set(layers) <= set(names):
        raise fields.refused("per_layer_config", layers, "carryover's blocks are all alike")
    return own[0]


def _gemma_rope(fields: _Fields) -> dict[str, Any]:
    """Base and rotating part of full-attention layers, in `rope_parameters`.

    Beside them stand those of sliding-window layers, and in published files scalars that nothing
    reads (vLLM drops them).
    """
    full = fields.section("full_attention")
    fields.drop("sliding_attention", "rope_type", "rope_theta")
    kind = full.take("rope_type", str)
    if kind not in ("proportional", "default"):
        raise full.refused("rope_type", kind, "carryover's drafters rotate without scaling")
    part = full.maybe("partial_rotary_factor", (int, float))
    if kind == "default" and part not in (None, 1.0):
        raise full.refused("partial_rotary_factor", part, "only proportional rope rotates a part")
    full.fixed("factor", 1.0)
    read = {"rope_theta": float(full.take("rope_theta", (int, float)))}
    full.end()
    fields.end()
    return read | {"partial_rotary_factor": 1.0 if part is None else float(part)}


def _any_transformer(fields: _Fields) -> dict[str, Any]:
    """What Qwen3Config and Gemma4TextConfig share."""
    read: dict[str, Any] = {name: fields.take(name, int) for name in _SHAPES}
    read["rms_norm_eps"] = float(fields.take("rms_norm_eps", (int, float)))
    read["qk_norm"] = True
    for key, ours in (
        ("num_target_layers", "target_blocks"),
        ("target_hidden_size", "target_hidden_size"),
        ("draft_vocab_size", "draft_vocab_size"),
    ):
        value = fields.maybe(key, int)
        if value is not None:
            read[ours] = value
    cap = fields.maybe("final_logit_softcapping", (int, float))
    if cap is not None:
        read["final_logit_softcapping"] = float(cap)
    fields.drop(*_METADATA)
    return read


def _check_full_attention(fields: _Fields) -> None:
    """Refuse sliding-window layers. `layer_types` decides; without it the older keys do."""
    types = fields.maybe("layer_types", list)
    window, used = fields.maybe("sliding_window", int), fields.maybe("use_sliding_window", bool)
    if types is not None and any(kind != "full_attention" for kind in types):
        raise fields.refused("layer_types", types, _WHOLE_CONTEXT)
    if types is None and used and window is not None:
        raise fields.refused("sliding_window", window, _WHOLE_CONTEXT)
    fields.drop("max_window_layers")


def _rope_theta(fields: _Fields) -> float:
    """The base of plain rotary embeddings, from transformers 5's `rope_parameters` or the older
    `rope_theta` and `rope_scaling`; any scaling is refused."""
    outer = fields.maybe("rope_theta", (int, float))
    scaling = fields.maybe("rope_scaling", dict)
    given = fields.maybe("rope_parameters", dict)
    key = "rope_scaling" if given is None else "rope_parameters"
    rope = dict(scaling or {} if given is None else given)
    if given is not None and scaling is not None and scaling != given:
        raise fields.refused("rope_scaling", scaling, "rope_parameters says something else")
    inner = rope.pop("rope_theta", None)
    kinds = {rope.pop(name, "default") for name in ("rope_type", "type")}
    rest = {name: value for name, value in rope.items() if value is not None}
    if rest.get("partial_rotary_factor") == 1.0:
        del rest["partial_rotary_factor"]
    if kinds != {"default"} or rest:
        shown = scaling if given is None else given
        raise fields.refused(key, shown, "carryover's drafters rotate without scaling")
    if outer is not None and inner is not None and outer != inner:
        raise fields.refused("rope_theta", outer, f"rope_parameters.rope_theta is {inner}")
    theta = outer if inner is None else inner
    if theta is not None and (isinstance(theta, bool) or not isinstance(theta, int | float)):
        raise fields.refused("rope_theta", theta, "it has to be a number")
    return float(fields.take("rope_theta", (int, float)) if theta is None else theta)


def _markov(fields: _Fields) -> dict[str, Any]:
    """The Markov and confidence heads: `markov_rank` and `confidence`, only where they are."""
    rank = fields.take("markov_rank", int)
    kind = fields.maybe("markov_head_type", str)
    confidence = fields.maybe("enable_confidence_head", bool) or False
    with_markov = fields.maybe("confidence_head_with_markov", bool) or False
    if rank and kind != "vanilla":
        raise fields.refused("markov_head_type", kind, "carryover's Markov head is vanilla")
    if confidence and not (rank and with_markov):
        raise fields.refused(
            "confidence_head_with_markov",
            with_markov,
            "carryover's confidence head reads the Markov embedding",
        )
    return {"markov_rank": rank, "confidence": confidence} if rank else {}


def _load(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's safetensors files."""
    index = folder / "model.safetensors.index.json"
    tensors: dict[str, Tensor] = {}
    try:
        listed = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else ()
        for path in sorted({*folder.glob("*.safetensors"), *(folder / name for name in listed)}):
            part = load_file(path)
            twice = sorted(set(part) & set(tensors))
            if twice:
                raise ValueError(f"{twice[0]} is in two files")
            tensors |= part
        for name, tensor in tensors.items():
            if name not in (MAP, BACK_MAP) and tensor.dtype not in _WEIGHTS:
                raise ValueError(f"{name} is of type {str(tensor.dtype).removeprefix('torch.')}")
            if not tensor.isfinite().all():
                raise ValueError(f"{name} has values that are no finite numbers")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise CarryoverError(
            f"the weights in {folder} cannot be read ({str(error).splitlines()[0]})",
            "Fetch the drafter again.",
        ) from error
    return tensors


def _with_tensors(
    name: str, fields: dict[str, Any], tensors: dict[str, Tensor], folder: Path
) -> Released:
    """Part the drafter's own tensors from its copies of the target's."""
    embedding = tensors.pop(EMBEDDING, None)
    back = tensors.pop(BACK_MAP, None)
    size, given = fields.pop("draft_vocab_size", None), tensors.get(MAP)
    reduced = size is not None and size != fields["vocab_size"]
    if given is not None and given.ndim != 1:
        raise CarryoverError(f"d2t in {folder} is no list of numbers", "Fetch the drafter again.")
    if (0 if given is None else len(given)) != (size if reduced else 0):
        found = "has no d2t" if given is None else f"has d2t of {len(given)} entries"
        raise CarryoverError(
            f"{folder} {found}, and its draft_vocab_size is {size} of {fields['vocab_size']}",
            "A reduced vocabulary needs d2t, [draft_vocab_size], and a full one has none.",
        )
    if given is None:
        return Released(name, fields, tensors, embedding, tensors.pop(HEAD, None))
    fields["draft_vocab_size"] = size
    _check_map(given, back, fields["vocab_size"], folder)
    if HEAD not in tensors:
        raise CarryoverError(
            f"{folder} has a reduced vocabulary and no {HEAD}", "Fetch the drafter again."
        )
    return Released(name, fields, tensors, embedding)


def _check_map(offsets: Tensor, back: Tensor | None, vocabulary: int, folder: Path) -> None:
    """d2t [V_d] holds target id - draft id; t2d [V], where given, marks the same target ids."""
    ids = (offsets + torch.arange(len(offsets))).tolist()
    inside = all(0 <= i < vocabulary for i in ids) and len(set(ids)) == len(ids)
    if not inside or (back is not None and sorted(ids) != back.nonzero().flatten().tolist()):
        raise CarryoverError(
            f"d2t in {folder} is no list of target ids that fits its t2d and its vocabulary",
            "d2t holds target id minus draft id, each target id once. Fetch the drafter again.",
        )
