"""Writes tiny random targets and drafters, in fp32, for the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN = 64
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
INTERMEDIATE = 128
VOCABULARY = 512
TARGET_BLOCKS = 4
DRAFTER_BLOCKS = 2
FEATURE_LAYERS = [0, 2, 3]
PROPOSALS = 7
ROPE_THETA = 10000.0
MASK = VOCABULARY - 1

_SHARED = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": INTERMEDIATE,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _normal(generator: torch.Generator, *shape: int, scale: float) -> torch.Tensor:
    return torch.randn(*shape, generator=generator) * scale


def _block(generator: torch.Generator, prefix: str) -> dict[str, torch.Tensor]:
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    tensors = {
        f"{prefix}.{name}.weight": _normal(generator, *shape, scale=1.5 * shape[1] ** -0.5)
        for name, shape in shapes.items()
    }
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}.{name}.weight"] = 1 + _normal(generator, HIDDEN, scale=0.2)
    return tensors


def write_target(
    folder: Path, *, seed: int, vocabulary: int = VOCABULARY, sharpness: float = 1.0
) -> Path:
    """A Llama with TARGET_BLOCKS blocks and an untied head. `sharpness` scales its logits."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "model.embed_tokens.weight": _normal(generator, vocabulary, HIDDEN, scale=1.0),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": _normal(
            generator, vocabulary, HIDDEN, scale=sharpness * 2.0 * HIDDEN**-0.5
        ),
    }
    for index in range(TARGET_BLOCKS):
        tensors |= _block(generator, f"model.layers.{index}")
    config = _SHARED | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": TARGET_BLOCKS,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
    }
    return _write(folder, config, tensors)


def write_drafter(
    folder: Path,
    *,
    seed: int,
    vocabulary: int = VOCABULARY,
    proposals: int = PROPOSALS,
    enabled: bool = True,
    qk_norm: bool = True,
    draft_vocabulary: int | None = None,
    projector: bool = False,
    markov_rank: int = 0,
    slot_layout: str = "fill_in",
    carry_scale: float = 1.0,
    config: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """A drafter with DRAFTER_BLOCKS blocks; `config` overrides keys, `without` drops tensors."""
    generator = torch.Generator().manual_seed(seed)
    width = len(FEATURE_LAYERS) * HIDDEN
    tensors = {
        "fc.weight": _normal(generator, HIDDEN, width, scale=width**-0.5),
        "hidden_norm.weight": 1 + _normal(generator, HIDDEN, scale=0.2),
        "norm.weight": 1 + _normal(generator, HIDDEN, scale=0.2),
        "carry_embedding": _normal(generator, width, scale=carry_scale),
    }
    if projector:
        tensors["carry_projector.weight"] = torch.zeros(HIDDEN, width)
    for index in range(DRAFTER_BLOCKS):
        tensors |= _block(generator, f"layers.{index}")
        for name in ("q_norm", "k_norm"):
            # Far from one and unlike in each block, so that a mix-up cannot go unseen.
            weight = 1 + index + _normal(generator, HEAD_DIM, scale=0.5)
            tensors[f"layers.{index}.self_attn.{name}.weight"] = weight
    settings = _SHARED | {
        "architectures": ["DFlashCarryoverDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": DRAFTER_BLOCKS,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "block_size": proposals + 1,
        "dflash_config": {"mask_token_id": vocabulary - 1, "target_layer_ids": FEATURE_LAYERS},
        "carryover": {"enabled": enabled, "slot_layout": slot_layout, "qk_norm": qk_norm},
    }
    if slot_layout == "anchor_first":
        settings |= {
            # As carryover.drafter.config exports them.
            "architectures": [
                "Qwen3CarryoverDSparkModel",
                "Qwen3DSparkModel" if qk_norm and not enabled else "K3DSparkModel",
            ],
            "block_size": proposals,
            **settings.pop("dflash_config"),
        }
    if draft_vocabulary is not None:
        kept = torch.randperm(vocabulary, generator=generator)[:draft_vocabulary].sort().values
        settings["draft_vocab_size"] = draft_vocabulary
        tensors["lm_head.weight"] = _normal(generator, draft_vocabulary, HIDDEN, scale=0.3)
        tensors["d2t"] = kept - torch.arange(draft_vocabulary)
    if markov_rank:
        # As large as the head's own scores, so that the token before decides as often as the state.
        tensors |= {
            "markov_head.markov_w1.weight": _normal(generator, vocabulary, markov_rank, scale=1.0),
            "markov_head.markov_w2.weight": _normal(
                generator, draft_vocabulary or vocabulary, markov_rank, scale=2 * markov_rank**-0.5
            ),
            "confidence_head.proj.weight": _normal(generator, 1, HIDDEN + markov_rank, scale=1.0),
            "confidence_head.proj.bias": _normal(generator, 1, scale=1.0),
        }
        settings |= {
            "markov_rank": markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
    for name in without:
        del tensors[name]
    return _write(folder, settings | (config or {}), tensors)


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder
