"""A new drafter for a target: its shapes, and weights copied from the target's last blocks."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from carryover.drafter.config import BlockKind, DrafterConfig
from carryover.drafter.model import Drafter
from carryover.errors import CarryoverError
from carryover.target.load import decoder_of, logit_cap


def new_config(
    target: PreTrainedModel,
    *,
    feature_layers: list[int],
    mask_token_id: int,
    layers: int,
    proposals: int,
    slot_layout: Any,
    qk_norm: bool,
    draft_vocab_size: int | None,
    markov_rank: int = 0,
    confidence: bool = False,
    blocks: BlockKind = "qwen3",
    rope_theta: float | None = None,
) -> DrafterConfig:
    """Drafter shapes: the target's own width, heads, feed-forward size, and rope base unless given.

    Where the target's layers differ in their heads (Gemma 4), those of full attention count.
    """
    text = target.config.get_text_config()
    heads, kinds = text.num_attention_heads, getattr(text, "layer_types", None) or []
    last = len(kinds) - 1 - kinds[::-1].index("full_attention") if "full_attention" in kinds else -1
    layer = text.per_layer_config[last]
    rope = getattr(text, "rope_parameters", None) or {}
    # Families with one rope per layer type keep a dict of them.
    rope = rope.get("full_attention", rope)
    rotating = 1.0
    if blocks == "gemma4" and rope.get("rope_type") == "proportional":
        rotating = float(rope.get("partial_rotary_factor", 1.0))
    return DrafterConfig(
        hidden_size=text.hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=layer.num_key_value_heads,
        head_dim=getattr(layer, "head_dim", None) or text.hidden_size // heads,
        intermediate_size=text.intermediate_size,
        rms_norm_eps=text.rms_norm_eps,
        rope_theta=float(rope_theta or rope.get("rope_theta", 10000.0)),
        max_position_embeddings=text.max_position_embeddings,
        vocab_size=text.vocab_size,
        target_hidden_size=text.hidden_size,
        target_layer_ids=tuple(feature_layers),
        target_blocks=text.num_hidden_layers,
        mask_token_id=mask_token_id,
        proposals=proposals,
        slot_layout=slot_layout,
        blocks=blocks,
        partial_rotary_factor=rotating,
        qk_norm=qk_norm,
        draft_vocab_size=draft_vocab_size,
        markov_rank=markov_rank,
        confidence=confidence,
        final_logit_softcapping=logit_cap(text),
    )


@torch.no_grad()
def initialize_random(drafter: Drafter, seed: int) -> None:
    """Linear and embedding weights from N(0, 0.02), biases at zero, norms at one.

    So does DeepSpec, both Markov matrices included: `Qwen3DSparkModel` ends its `__init__` with
    transformers' `post_init`. Their product starts near zero and both receive gradients.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in drafter.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.normal_(0.0, 0.02, generator=generator)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.zero_()


@torch.no_grad()
def initialize_from_target(drafter: Drafter, target: PreTrainedModel) -> None:
    """Copy the target's last blocks and let the last captured layer through F.

    With the capture right before the copied blocks the first drafter layer reads the very keys
    and values that the target's own block would; later ones share its `hidden_norm` and read a
    feature that is one block old.
    """
    stack, config = decoder_of(target), drafter.config
    blocks = stack.layers[-config.num_hidden_layers :]
    norm = blocks[0].input_layernorm.weight
    try:
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -config.target_hidden_size :] = torch.eye(config.hidden_size)
        drafter.hidden_norm.weight.copy_(norm)
        drafter.norm.weight.copy_(stack.norm.weight)
        for layer, block in zip(drafter.layers, blocks, strict=True):
            state = dict(block.state_dict())
            unknown = set(state) - set(layer.state_dict())
            if unknown:
                ours = "blocks" if config.blocks != "qwen3" else "qk_norm"
                raise CarryoverError(
                    f"the target's blocks have weights that a drafter block lacks: "
                    f"{', '.join(sorted(unknown)[:4])}",
                    f"Set drafters.*.{ours} to match the target or drafters.*.initialize: random.",
                )
            layer.load_state_dict(state)
    except (RuntimeError, AttributeError) as error:
        what = " ".join(line.strip() for line in str(error).splitlines()[:2])
        raise CarryoverError(
            f"the target's last blocks do not fit the drafter ({what})",
            "Set drafters.*.{blocks, qk_norm} to match it, or drafters.*.initialize: random.",
        ) from error
