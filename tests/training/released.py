"""Writes small drafters as the projects that release them do: their config keys, their tensors.

Keys are those of the files that z-lab/dflash, deepseek-ai/DeepSpec and vllm-project/speculators
write with `save_pretrained` (Qwen3Config's own keys, then the project's). Weights are random.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 64, 4, 2, 32, 96
LAYERS, IDS, MASK, BLOCKS = 2, [0, 2], 3, 4
THETA = 500000.0
RANK = 8


def qwen3(vocabulary: int, layers: int = LAYERS) -> dict[str, Any]:
    """A Qwen3Config as transformers 5 writes it. Shapes and rope are not the tiny target's own."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": 0,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INNER,
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": 2048,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": HEADS,
        "num_hidden_layers": layers,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocabulary,
    }


def backbone(seed: int, layers: int = LAYERS, one_k_norm: bool = False) -> dict[str, Tensor]:
    """fc, norms and blocks; every norm weight differs. `one_k_norm`: the same in every block."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 1.5 * shape[-1] ** -0.5

    def norm(size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    tensors = {
        "fc.weight": normal(HIDDEN, len(IDS) * HIDDEN),
        "hidden_norm.weight": norm(HIDDEN),
        "norm.weight": norm(HIDDEN),
    }
    shared = norm(HEAD_DIM)
    for i in range(layers):
        at = f"layers.{i}."
        tensors |= {
            f"{at}self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.o_proj.weight": normal(HIDDEN, HEADS * HEAD_DIM),
            f"{at}self_attn.q_norm.weight": norm(HEAD_DIM),
            f"{at}self_attn.k_norm.weight": shared.clone() if one_k_norm else norm(HEAD_DIM),
            f"{at}mlp.gate_proj.weight": normal(INNER, HIDDEN),
            f"{at}mlp.up_proj.weight": normal(INNER, HIDDEN),
            f"{at}mlp.down_proj.weight": normal(HIDDEN, INNER),
            f"{at}input_layernorm.weight": norm(HIDDEN),
            f"{at}post_attention_layernorm.weight": norm(HIDDEN),
        }
    return tensors


def gemma_backbone(seed: int) -> dict[str, Tensor]:
    """The same with Gemma's blocks: one key head and no v_proj, four norms, a scalar."""
    tensors = backbone(seed)
    generator = torch.Generator().manual_seed(seed + 100)
    for i in range(LAYERS):
        at = f"layers.{i}."
        del tensors[f"{at}self_attn.v_proj.weight"]
        key = f"{at}self_attn.k_proj.weight"
        tensors[key] = tensors[key][:HEAD_DIM].clone()
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            tensors[f"{at}{name}.weight"] = 1 + 0.3 * torch.randn(HIDDEN, generator=generator)
        # Scores are not scaled by 1 / sqrt(head_dim): norms as large as trained ones would be.
        for name in ("q_norm", "k_norm"):
            tensors[f"{at}self_attn.{name}.weight"] *= 0.6
        tensors[f"{at}layer_scalar"] = torch.tensor([0.7 + 0.5 * i])
    return tensors


def heads(vocabulary: int, drafted: int, confidence: bool = True) -> dict[str, Tensor]:
    """DeepSpec's Markov and confidence heads; speculators names them alike."""
    generator = torch.Generator().manual_seed(9)
    tensors = {
        "markov_head.markov_w1.weight": torch.randn(vocabulary, RANK, generator=generator),
        "markov_head.markov_w2.weight": torch.randn(drafted, RANK, generator=generator),
    }
    if confidence:
        tensors["confidence_head.proj.weight"] = torch.randn(1, HIDDEN + RANK, generator=generator)
        tensors["confidence_head.proj.bias"] = torch.randn(1, generator=generator)
    return tensors


def zlab(vocabulary: int, **changes: Any) -> dict[str, Any]:
    """config.json of z-lab's Qwen3-4B-DFlash-b16 and its like, block of 4 proposals."""
    return qwen3(vocabulary) | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 5,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": IDS},
        "dtype": "float32",
        "num_target_layers": BLOCKS,
        "transformers_version": "4.57.3",
        **changes,
    }


def deepspec(vocabulary: int, *, rank: int = 0, **changes: Any) -> dict[str, Any]:
    """config.json of DeepSpec's Qwen3 drafters (modeling/dspark/qwen3/config.py)."""
    dspark: dict[str, Any] = {"markov_rank": rank, "enable_confidence_head": rank > 0}
    if rank:
        dspark |= {"markov_head_type": "vanilla", "confidence_head_with_markov": True}
    return qwen3(vocabulary) | {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 4,
        "dtype": "float32",
        "mask_token_id": MASK,
        "num_anchors": 512,
        "num_target_layers": BLOCKS,
        "target_layer_ids": IDS,
        "transformers_version": "4.57.3",
        **dspark,
        **changes,
    }


def gemma(vocabulary: int, *, rank: int = RANK, **changes: Any) -> dict[str, Any]:
    """config.json of DeepSpec's Gemma drafters (modeling/dspark/gemma4/config.py): the target's
    Gemma4TextConfig as older versions of transformers write it, the redundant rope keys included.
    """
    dspark: dict[str, Any] = {"markov_rank": rank, "enable_confidence_head": rank > 0}
    if rank:
        dspark |= {"markov_head_type": "vanilla", "confidence_head_with_markov": True}
    return {
        "architectures": ["Gemma4DSparkModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": True,
        "block_size": 4,
        "bos_token_id": 2,
        "dtype": "float32",
        "enable_moe_block": False,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": HEAD_DIM,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": HIDDEN,
        "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02,
        "intermediate_size": INNER,
        "layer_types": ["full_attention"] * LAYERS,
        "mask_token_id": MASK,
        "max_position_embeddings": 2048,
        "model_type": "gemma4_text",
        "moe_intermediate_size": None,
        "num_anchors": 512,
        "num_attention_heads": HEADS,
        "num_experts": None,
        "num_global_key_value_heads": 1,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "num_kv_shared_layers": 0,
        "num_target_layers": BLOCKS,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": THETA,
                "rope_type": "proportional",
            },
            "rope_theta": 10000.0,
            "rope_type": "default",
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024,
        "target_layer_ids": IDS,
        "target_model_type": "gemma4",
        "target_text_model_type": "gemma4_text",
        "tie_word_embeddings": False,
        "top_k_experts": None,
        "transformers_version": "5.8.0",
        "use_bidirectional_attention": "vision",
        "use_cache": True,
        "use_double_wide_mlp": False,
        "vocab_size": vocabulary,
        "vocab_size_per_layer_input": vocabulary,
        **dspark,
        **changes,
    }


def speculators(
    vocabulary: int, kind: str = "dflash", drafted: int | None = None, **changes: Any
) -> dict[str, Any]:
    """config.json of speculators' DFlash and DSpark drafters (models/{dflash,dspark}/config.py)."""
    anchor_first = kind == "dspark"
    config: dict[str, Any] = {
        "architectures": ["DSparkDraftModel" if anchor_first else "DFlashDraftModel"],
        "auto_map": {"": f"config.{'DSpark' if anchor_first else 'DFlash'}SpeculatorConfig"},
        "aux_hidden_state_layer_ids": [i + 1 for i in IDS],
        "block_size": 4 if anchor_first else 5,
        "draft_vocab_size": vocabulary if drafted is None else drafted,
        "dtype": "float32",
        "mask_token_id": MASK,
        "sample_from_anchor": anchor_first,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": 4,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "tiny"},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": qwen3(vocabulary),
        "transformers_version": "5.14.1",
    }
    if anchor_first:
        config |= {
            "markov_rank": RANK,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
    return config | changes


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write config.json and model.safetensors."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
