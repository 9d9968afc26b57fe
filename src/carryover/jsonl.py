"""Read files of one JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from carryover.errors import CarryoverError


def read_rows(path: Path, rebuild: str) -> list[dict[str, Any]]:
    """Return the objects of a jsonl file, in order.

    Raises CarryoverError naming the file and line; `rebuild` says what to do then.
    """
    if not path.is_file():
        raise CarryoverError(f"{path} is missing", rebuild)
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise CarryoverError(f"{path}, line {number}, is not JSON ({error})", rebuild) from None
        if not isinstance(row, dict):
            raise CarryoverError(f"{path}, line {number}, is not a JSON object", rebuild)
        rows.append(row)
    return rows
