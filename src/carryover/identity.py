"""What decides a result: a stage's own code, and what its inputs are (not when they were made).

A stage goes on from what an interrupted run has finished only while these are the same. Times,
machine and commit are left out: an early stage that runs again and ends with the same files costs
the later ones nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from carryover.artifacts import config_hash, file_sha256, read_manifest
from carryover.errors import CarryoverError
from carryover.ledger import LEDGER

_PACKAGE = Path(__file__).resolve().parent
# Files and folders of the package. A stage whose result depends on another's code through an
# input alone does not name that code: the input's files say whether it changed anything.
_SOURCES = {
    "target": ("target",),
    "prompts": ("prompts",),
    "responses": (
        "responses.py",
        "generation.py",
        "prompts/render.py",
        "seeds.py",
        "ledger.py",
    ),
    "features": ("features", "target/hidden.py"),
    "released": ("drafter", "target/source.py", "target/load.py"),
    "train": (
        # Not the readers of released drafters: what they read is an input.
        *(
            f"drafter/{name}.py"
            for name in (
                "attention",
                "blocks",
                "checkpoint",
                "config",
                "gemma",
                "initialize",
                "layout",
                "markov",
                "model",
            )
        ),
        "training",
        "target/hidden.py",
        "target/load.py",
        "features/store.py",
        "seeds.py",
    ),
    "export": ("drafter", "target/load.py"),
    "benchmark": ("benchmark", "serving", "serving_env.py", "prompts/render.py", "seeds.py"),
    "report": ("report",),
}


def stage_code(stage: str) -> str:
    """Hash of the code of `stage` (a key of `carryover STAGE`), 16 hex digits."""
    return source_hash(*_SOURCES[stage])


def source_hash(*names: str) -> str:
    """Hash of files of this package, or of all files in folders of it, 16 hex digits."""
    digest = hashlib.sha256()
    for name in names:
        path = _PACKAGE / name
        for file in _files(path) if path.is_dir() else [path]:
            relative = file.relative_to(_PACKAGE).as_posix()
            digest.update(f"{relative}\0{file_sha256(file)}\0".encode())
    return digest.hexdigest()[:16]


def _files(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )


def input_identity(path: Path) -> str:
    """Hash of what an input is, 16 hex digits.

    A file is its content; a folder is what its manifest says: stage, config and the files' hashes.
    Raises CarryoverError where the file or the manifest is missing or damaged.
    """
    if path.is_file():
        return config_hash({"sha256": file_sha256(path)})
    if not path.exists():
        raise CarryoverError(f"{path} is missing", "Run the stage that makes it.")
    manifest = read_manifest(path)
    # The ledger names the code that made the shards; the shards themselves are what is read.
    files = {name: facts["sha256"] for name, facts in manifest["files"].items() if name != LEDGER}
    return config_hash(
        {"stage": manifest["stage"], "config": manifest["config_hash"], "files": files}
    )


def source_content(source: str) -> str | None:
    """Hash of the checkpoint (config.json and weights) in `path:DIR`, 16 hex digits.

    None for other sources, whose name says what they are (a revision on the hub), and where there
    is no such folder.
    """
    scheme, _, place = source.partition(":")
    folder = Path(place).expanduser()
    if scheme != "path" or not folder.is_dir():
        return None
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    return config_hash({path.name: file_sha256(path) for path in files if path.is_file()})


def made_from(inputs: Mapping[str, Path], code: str) -> dict[str, str]:
    """What a result is made from: the hash of each input by its name, and `code` (stage_code)."""
    return {"code": code, **{name: input_identity(path) for name, path in inputs.items()}}


def result_key(subset: Mapping[str, Any], inputs: Mapping[str, Path], code: str) -> str:
    """Hash of everything that decides a result, 16 hex digits.

    Args:
        subset: the part of the config, from `Config.stage(...)`.
        inputs: name -> file, or folder that has a manifest.
        code: from `stage_code`.
    """
    return config_hash({"config": subset, "made_from": made_from(inputs, code)})
