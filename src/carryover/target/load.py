"""Load a prepared target for inference with Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_target(
    folder: Path, dtype: str | torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the frozen target, in evaluation mode, and its tokenizer.

    `folder` is what the target stage wrote; `dtype` a torch dtype or its config name. No parameter
    requires a gradient.
    """
    torch_dtype = DTYPES[dtype] if isinstance(dtype, str) else dtype
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch_dtype, local_files_only=True)
    model.requires_grad_(False)
    return model.eval(), load_tokenizer(folder)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a prepared target, with its chat template."""
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def target_ends(folder: Path, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The target's input embedding and head, both [V, H], without loading the rest of it."""
    ends: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (it is no mapping)
                end = ".".join(name.rsplit(".", 2)[-2:])
                if end in ("embed_tokens.weight", "lm_head.weight"):
                    tensor = file.get_tensor(name)
                    if tuple(tensor.shape) == shape:
                        ends[end] = tensor
    embedding = ends["embed_tokens.weight"]
    return embedding, ends.get("lm_head.weight", embedding)


def logit_cap(config: Any) -> float | None:
    """The cap on a model's logits, cap tanh(logits / cap); None where they have none."""
    return getattr(config.get_text_config(), "final_logit_softcapping", None)


def decoder_of(model: PreTrainedModel) -> Any:
    """Return the text decoder below the LM head: it takes token ids and owns `.layers`.

    Multimodal checkpoints keep it one level deeper, beside the vision tower.
    """
    base: Any = model.get_decoder()
    if not isinstance(getattr(base, "layers", None), torch.nn.ModuleList):
        raise TypeError(f"{type(model).__name__} has no decoder with a list of layers")
    return base
