"""Find a target's files from its `source` key.

package:NAME==VERSION   a Python package that ships one GGUF file
hub:ID@REVISION         a Hugging Face repository at one revision
path:DIR                a Hugging Face folder on this machine
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from carryover.errors import CarryoverError

# What a checkpoint needs: the weights, their config, the tokenizer and its chat template.
CHECKPOINT_FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
)


def find_source(source: str, key: str, files: Sequence[str] = CHECKPOINT_FILES) -> Path:
    """Return the GGUF file or the checkpoint folder that `source` names.

    `key` is the config key, for the error messages; `files` the patterns of what is fetched from
    the hub. Raises CarryoverError when the source cannot be read or is not there.
    """
    scheme, _, rest = source.partition(":")
    if scheme == "package":
        return _packaged_gguf(rest, key)
    if scheme == "hub":
        return _hub_snapshot(rest, key, files)
    if scheme == "path":
        return _checkpoint_folder(Path(rest).expanduser(), key)
    raise CarryoverError(
        f"{key} is {source!r}", "Write package:NAME==VERSION, hub:ID@REVISION or path:DIR."
    )


def _packaged_gguf(requirement: str, key: str) -> Path:
    match = re.fullmatch(r"([A-Za-z0-9._-]+)==([^=\s]+)", requirement)
    if match is None:
        raise CarryoverError(
            f"{key} names the package {requirement!r} without an exact version",
            "Write package:NAME==VERSION.",
        )
    name, version = match.groups()
    install = f"Install it with: pip install --no-deps {name}=={version}"
    try:
        package = distribution(name)
    except PackageNotFoundError:
        raise CarryoverError(f"{key}: the package {name} is not installed", install) from None
    if package.version != version:
        raise CarryoverError(f"{key}: {name} {package.version} is installed", install)
    # The package is never imported: its own dependencies (a llama.cpp build) are not needed.
    found = [file for file in package.files or [] if file.suffix == ".gguf"]
    if len(found) != 1:
        raise CarryoverError(
            f"{key}: {name} {version} lists {len(found)} GGUF files, one is needed",
            "Take a package with exactly one, or use path:DIR.",
        )
    path = Path(str(package.locate_file(found[0])))
    if not path.is_file():
        raise CarryoverError(f"{key}: {path} is missing from the installed {name}", install)
    return path


def _hub_snapshot(reference: str, key: str, files: Sequence[str]) -> Path:
    repository, _, revision = reference.partition("@")
    if not repository or not revision:
        raise CarryoverError(
            f"{key} names the repository {reference!r} without a revision",
            "Write hub:ID@REVISION, with a commit or a tag.",
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(repository, revision=revision, allow_patterns=list(files))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CarryoverError(
            f"{key}: {repository} at {revision} cannot be fetched from the model hub ({cause})",
            "Check the name, the revision and the network (HF_TOKEN for gated models), or "
            "download it elsewhere and use path:DIR.",
        ) from error
    return _checkpoint_folder(Path(folder), key)


def _checkpoint_folder(folder: Path, key: str) -> Path:
    if not folder.is_dir():
        raise CarryoverError(f"{key}: the folder {folder} does not exist", "Correct the path.")
    if not (folder / "config.json").is_file():
        raise CarryoverError(
            f"{key}: {folder} has no config.json", "Point it at a Hugging Face model folder."
        )
    if not any(folder.glob("*.safetensors")):
        raise CarryoverError(
            f"{key}: {folder} has no *.safetensors", "Convert its weights to safetensors."
        )
    return folder
