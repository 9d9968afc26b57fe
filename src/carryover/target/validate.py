"""Check that a target and its config keys fit together before anything is computed with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoConfig, GenerationConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from carryover.errors import CarryoverError
from carryover.target.load import load_tokenizer


def validate_target(
    folder: Path, *, name: str, feature_layers: Sequence[int], mask_token_id: int, thinking: bool
) -> None:
    """Raise CarryoverError when the checkpoint in `folder` cannot serve the target `name`."""
    key = f"targets.{name}"
    config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    blocks = config.num_hidden_layers
    outside = [layer for layer in feature_layers if not 0 <= layer < blocks]
    if outside:
        raise CarryoverError(
            f"{key}.feature_layers names block {outside[0]}, the target has {blocks} blocks",
            f"Use 0-based block outputs from 0 to {blocks - 1}.",
        )
    if not 0 <= mask_token_id < config.vocab_size:
        raise CarryoverError(
            f"{key}.mask_token_id is {mask_token_id}, the vocabulary has {config.vocab_size} ids",
            "Choose an id inside it that no text uses.",
        )
    tokenizer = load_tokenizer(folder)
    if not tokenizer.chat_template:
        raise CarryoverError(
            f"{key}: the target has no chat template", "Add chat_template.jinja to its folder."
        )
    if mask_token_id in _structural_ids(folder, tokenizer, thinking):
        raise CarryoverError(
            f"{key}.mask_token_id {mask_token_id} is "
            f"{tokenizer.convert_ids_to_tokens(mask_token_id)!r}, which the chat template or the "
            "end of a response uses",
            "Choose an id that no text uses.",
        )


def _structural_ids(folder: Path, tokenizer: PreTrainedTokenizerBase, thinking: bool) -> set[int]:
    """Return the ids that every dialogue holds: those of the template and the ends of sequence."""
    from carryover.prompts.render import render  # its package reads configs; see __init__.py

    ids = set(render(tokenizer, "", thinking=thinking))
    ids.update(
        i
        for i in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        if i is not None
    )
    if (folder / "generation_config.json").is_file():
        ends = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
        ids.update([ends] if isinstance(ends, int) else ends or [])
    return ids
