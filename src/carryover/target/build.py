"""Write a target as an ordinary safetensors folder."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from carryover.errors import CarryoverError
from carryover.target.load import DTYPES
from carryover.target.source import CHECKPOINT_FILES


def convert_gguf(gguf: Path, folder: Path, dtype: str) -> None:
    """Write the model, tokenizer and chat template of one GGUF file into `folder`.

    The weights are dequantized to `dtype`; without `dequantize` Transformers 5 keeps the blocks
    and refuses to save them.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=DTYPES[dtype],
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except (ValueError, OSError, NotImplementedError) as error:
        raise CarryoverError(
            f"{gguf.name} cannot be converted ({str(error).splitlines()[0]})",
            "Take a GGUF of an architecture that Transformers reads, or use path:DIR.",
        ) from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # Transformers writes the weights readable by their owner only


def link_checkpoint(source: Path, folder: Path) -> None:
    """Put the files of the checkpoint folder `source` into `folder` without copying the weights.

    Hard links where both are on one file system, else symbolic links.
    """
    for pattern in CHECKPOINT_FILES:
        for path in sorted(source.glob(pattern)):
            origin = path.resolve()
            try:
                os.link(origin, folder / path.name)
            except FileExistsError:
                continue  # two patterns match it
            except OSError:
                (folder / path.name).symlink_to(origin)
