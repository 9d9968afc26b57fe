"""Stage `target`: fetch or convert a frozen target into one folder that every stage reads."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from carryover.artifacts import write_manifest
from carryover.target.build import convert_gguf, link_checkpoint
from carryover.target.load import DTYPES, decoder_of, load_target, load_tokenizer
from carryover.target.source import find_source
from carryover.target.validate import validate_target

if TYPE_CHECKING:
    from carryover.config import Config

__all__ = ["DTYPES", "decoder_of", "load_target", "load_tokenizer", "run", "validate_target"]


def run(config: Config, *, target: str) -> None:
    """Write `targets/{target}/`: config.json, safetensors, tokenizer, chat template, manifest.

    The folder appears complete or not at all. Raises CarryoverError when the source is not there
    or does not fit `feature_layers` and `mask_token_id`.
    """
    # Not above: a training step on given tensors reads this package too, and needs no pydantic.
    from carryover.config.stages import pick
    from carryover.paths import Paths

    started = datetime.now(UTC)
    settings = pick(config.targets, "target", target)
    source = find_source(settings.source, f"targets.{target}.source")
    folder = Paths(config).target(target)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    with tempfile.TemporaryDirectory(prefix=f".{target}.", dir=folder.parent) as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        if source.is_file():
            convert_gguf(source, new, settings.dtype)
        else:
            link_checkpoint(source, new)
        validate_target(
            new,
            name=target,
            feature_layers=settings.feature_layers,
            mask_token_id=settings.mask_token_id,
            thinking=settings.thinking,
        )
        write_manifest(
            new,
            stage="target",
            config=config.stage("target", target=target),
            started=started,
            seed=config.seed,
            inputs={"source": source} if source.is_file() else {},
        )
        _replace_folder(new, folder, Path(temporary) / "old")


def _remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders of runs that were killed (tempfile ends names in 8 of these)."""
    names = re.compile(rf"\.{re.escape(folder.name)}\.[a-z0-9_]{{8}}")
    for path in folder.parent.iterdir():
        if names.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _replace_folder(new: Path, folder: Path, aside: Path) -> None:
    """Move `new` to `folder`; a folder can only be renamed onto an empty one."""
    if folder.exists():
        os.rename(folder, aside)
    os.rename(new, folder)
    shutil.rmtree(aside, ignore_errors=True)
