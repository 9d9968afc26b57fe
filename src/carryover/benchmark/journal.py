"""Rows that are measured already, so that an interrupted benchmark goes on where it stopped."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Journal:
    """An append-only jsonl file beside `output`, named after `key`.

    `key` is a hash of everything that decides the rows: journals of other keys are removed. Each
    `append` is on the disk when it returns; a last line that a crash cut short is dropped.
    """

    def __init__(self, output: Path, key: str) -> None:
        output.parent.mkdir(parents=True, exist_ok=True)
        self._path = output.with_name(f".{output.stem}.{key}.journal")
        # A key has no dot: the journal of temperature-0.7 is none of temperature-0's.
        journals = re.compile(rf"\.{re.escape(output.stem)}\.[^.]+\.journal")
        for path in output.parent.iterdir():
            if path != self._path and journals.fullmatch(path.name):
                path.unlink()
        self.rows: list[Row] = []
        if self._path.is_file():
            whole = self._path.read_bytes()
            whole = whole[: whole.rfind(b"\n") + 1]
            self.rows = [json.loads(line) for line in whole.splitlines()]
            os.truncate(self._path, len(whole))

    def append(self, rows: Sequence[Row]) -> None:
        """Add rows that belong together."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
            file.flush()
            os.fsync(file.fileno())
        self.rows.extend(rows)

    def remove(self) -> None:
        """Delete the file: its rows are in the finished output."""
        self._path.unlink(missing_ok=True)
