"""Which files of an unfinished output are finished: what a stage resumes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from carryover.artifacts import file_sha256, remove_leftovers, write_json

LEDGER = "shards.json"


class Ledger:
    """`shards.json` of a folder: each finished shard with its SHA-256, under one key.

    `key` is a hash of everything that decides the content. On opening, a shard counts as finished
    only if it was recorded under the same key and its content is unchanged; every other file that
    matches `pattern` (damaged, or of another key) is removed, as is what a killed run left half
    written.
    """

    def __init__(self, folder: Path, key: str, pattern: str) -> None:
        self._folder = folder
        self._path = folder / LEDGER
        self._key = key
        folder.mkdir(parents=True, exist_ok=True)
        self._shards = {
            name: facts for name, facts in self._recorded().items() if self._unchanged(name, facts)
        }
        remove_leftovers(folder)
        for path in folder.glob(pattern):
            if path.name not in self._shards:
                path.unlink()

    def __contains__(self, name: str) -> bool:
        return name in self._shards

    def add(self, name: str) -> None:
        """Record a shard that has just been written as a whole."""
        self._shards[name] = {"sha256": file_sha256(self._folder / name)}
        write_json(self._path, {"key": self._key, "shards": self._shards})

    def _recorded(self) -> dict[str, dict[str, Any]]:
        try:
            ledger = json.loads(self._path.read_text(encoding="utf-8"))
            return ledger["shards"] if ledger["key"] == self._key else {}
        except (FileNotFoundError, json.JSONDecodeError, KeyError):
            return {}

    def _unchanged(self, name: str, facts: dict[str, Any]) -> bool:
        path = self._folder / name
        return path.is_file() and file_sha256(path) == facts["sha256"]
