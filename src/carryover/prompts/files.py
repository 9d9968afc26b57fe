"""Evaluation prompts out of a jsonl file: one object a line with `prompt`, perhaps `subset`."""

from pathlib import Path

from carryover.errors import CarryoverError
from carryover.jsonl import numbered_rows
from carryover.prompts.prompt import Prompt, stable_id

# Our kinds under the file names of the Red Hat speculator benchmark (paper, Table 5).
BENCHMARK_NAMES = {"chat": "question", "math": "math_reasoning", "tool": "tool_call"}


def read_prompts(path: Path, dataset: str) -> list[Prompt]:
    """All prompts of a file, in its order.

    Raises CarryoverError naming file, line and key when the file, or a line's `prompt`, is bad.
    """
    return [prompt for _, prompt in _rows(path, dataset, needs_subset=False)]


def read_subset(path: Path, dataset: str, count: int) -> list[Prompt]:
    """The first `count` prompts whose `subset` is `dataset` or its name in the Red Hat benchmark.

    Raises CarryoverError naming the file, and the line or the subset, when they are not there.
    """
    names = {dataset, BENCHMARK_NAMES.get(dataset, dataset)}
    rows = _rows(path, dataset, needs_subset=True)
    found = [prompt for subset, prompt in rows if subset in names]
    if not found:
        raise CarryoverError(
            f"{path}: no line has subset '{dataset}'; there are "
            f"{', '.join(sorted({subset for subset, _ in rows}))}",
            "Correct prompts.evaluation.datasets",
        )
    if len(found) < count:
        raise CarryoverError(
            f"{path}: subset '{dataset}' has {len(found)} prompts, {count} wanted",
            "Lower prompts.evaluation.prompts_per_dataset",
        )
    return found[:count]


def _rows(path: Path, dataset: str, *, needs_subset: bool) -> list[tuple[str, Prompt]]:
    fix = "Let prompts.evaluation.source name a UTF-8 file of one JSON object a line, as path:FILE"
    keys = ("subset", "prompt") if needs_subset else ("prompt",)
    rows = []
    for number, row in numbered_rows(path, fix):
        for key in keys:
            if not isinstance(row.get(key), str) or not row[key]:
                raise CarryoverError(
                    f"{path}, line {number}: no text under the key '{key}'",
                    f"Give every line {' and '.join(keys)}",
                )
        text = row["prompt"]
        rows.append((row.get("subset", ""), Prompt(stable_id(dataset, text), dataset, text)))
    if not rows:
        raise CarryoverError(f"{path}: the file is empty", fix)
    return rows
