"""Checks a drafter's tensors before vLLM loads them.

vLLM leaves a parameter that the checkpoint lacks as it was initialised, without a word.
"""

from __future__ import annotations

import torch

from carryover.drafter.checkpoint import CARRY_EMBEDDING, HEAD, MAP
from carryover.errors import CarryoverError

MARKOV_EMBEDDING, MARKOV_HEAD = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
# Trained beside the Markov head, and not used for drafting.
CONFIDENCE = "confidence_head."
_OF_ANY_LAYER = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)
_OF_EACH_LAYER = {
    "qwen3": (*_OF_ANY_LAYER, "self_attn.v_proj.weight"),
    "gemma4": (
        *_OF_ANY_LAYER,
        "pre_feedforward_layernorm.weight",
        "post_feedforward_layernorm.weight",
        "layer_scalar",
    ),
}
_EXPORT_AGAIN = "Export the drafter again with `carryover export`."


def check_tensors(
    tensors: dict[str, torch.Tensor],
    *,
    blocks: str,
    width: int,
    hidden: int,
    layers: int,
    vocabulary: int,
    draft_vocabulary: int | None,
    carries: bool,
    markov_rank: int,
) -> None:
    """Raise CarryoverError where a tensor is missing, of another shape, or leads outside.

    Args:
        tensors: the checkpoint, by name.
        blocks: qwen3 or gemma4.
        width: of the concatenated target features.
        hidden: hidden size of the drafter.
        layers: blocks of the drafter.
        vocabulary: the target's.
        draft_vocabulary: tokens that the drafter can propose, if it has a head of its own.
        carries: whether rejected rows are to be carried.
        markov_rank: width of the Markov head's embedding, 0 without that head.
    """
    shapes: dict[str, tuple[int, ...] | None] = {
        "fc.weight": (hidden, width),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(layers):
        # Their shapes are checked by vLLM, which knows how it fuses them.
        shapes |= {f"layers.{layer}.{name}": None for name in _OF_EACH_LAYER[blocks]}
    if carries:
        shapes[CARRY_EMBEDDING] = (width,)
    if markov_rank:
        # Read by the token before, a target id; scores what the drafter can propose.
        shapes[MARKOV_EMBEDDING] = (vocabulary, markov_rank)
        shapes[MARKOV_HEAD] = (draft_vocabulary or vocabulary, markov_rank)
    if draft_vocabulary is not None:
        shapes |= {MAP: (draft_vocabulary,), HEAD: (draft_vocabulary, hidden)}

    for name, shape in shapes.items():
        if name not in tensors:
            fix = "Set `carryover.enabled` to false to serve it without carried rows."
            raise CarryoverError(
                f"the drafter's checkpoint has no tensor {name}",
                fix if name == CARRY_EMBEDDING else _EXPORT_AGAIN,
            )
        found = tuple(tensors[name].shape)
        if shape is not None and found != shape:
            raise CarryoverError(
                f"the drafter's tensor {name} has shape {list(found)}, and its config and target "
                f"ask for {list(shape)}",
                "This drafter is for another target, or its config.json was edited.",
            )
    if draft_vocabulary is not None:
        _check_draft_vocabulary(tensors[MAP], vocabulary)


def _check_draft_vocabulary(offsets: torch.Tensor, vocabulary: int) -> None:
    ids = torch.arange(offsets.shape[0]) + offsets.long().cpu()
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise CarryoverError(
            "the drafter's tensor d2t leads to token ids outside the target's vocabulary",
            f"d2t holds target id minus draft id. {_EXPORT_AGAIN}",
        )
