"""Read files of one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from carryover.errors import CarryoverError


def numbered_rows(path: Path, fix: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of a jsonl file, in order; blank lines are passed over.

    Raises CarryoverError naming the file and line; `fix` says what to do then.
    """
    try:
        # Not splitlines(): a raw U+2028 inside a string ends no line.
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise CarryoverError(
                        f"{path}, line {number}: not JSON ({error.msg})", fix
                    ) from None
                if not isinstance(row, dict):
                    raise CarryoverError(f"{path}, line {number}: not a JSON object", fix)
                yield number, row
    except FileNotFoundError:
        raise CarryoverError(f"{path} is missing", fix) from None
    except OSError as error:
        raise CarryoverError(f"{path} cannot be read ({error.strerror})", fix) from None
    except UnicodeDecodeError:
        raise CarryoverError(f"{path} is not UTF-8 text", fix) from None


def read_rows(path: Path, fix: str) -> list[dict[str, Any]]:
    """Return the objects of a jsonl file, in order; errors as in `numbered_rows`."""
    return [row for _, row in numbered_rows(path, fix)]
