"""Benchmark rows: read, checked, and lined up so that variants can be compared prompt by prompt."""

import math
from pathlib import Path
from typing import Any

import pandas as pd

from carryover.config import VARIANTS
from carryover.errors import CarryoverError
from carryover.jsonl import numbered_rows

_TEXT = ("target", "drafter", "variant", "dataset")
_COUNTS = ("output_tokens", "rounds", "accepted")
_LISTS = ("accepted_per_position", "output_ids")
_COLUMNS = (*_TEXT, "temperature", "prompt_id", *_COUNTS, "seconds", *_LISTS)


def read_rows(
    path: Path, *, target: str, drafter: str, temperature: float, datasets: list[str]
) -> pd.DataFrame:
    """Read one benchmark file (docs/architecture.md, "Benchmark rows").

    Returns one row per (variant, dataset, prompt), sorted, so that the rows of two variants of
    one dataset line up prompt by prompt. Raises CarryoverError, naming the file and the line,
    when a row is malformed or belongs to another run, and when the variants or the data sets are
    incomplete or do not hold the same prompts: a paired comparison would be silently wrong.
    """
    fix = f"remove {path} and run the benchmark stage again"
    expected = {"target": target, "drafter": drafter, "temperature": temperature}
    rows: list[dict[str, Any]] = []
    for number, row in numbered_rows(path, fix):
        try:
            _check_row(row)
            for key, value in expected.items():
                if row[key] != value:
                    raise ValueError(f"{key} is {row[key]!r} instead of {value!r}")
        except ValueError as error:
            raise CarryoverError(f"{path}, line {number}: {error}", fix) from None
        rows.append({key: row[key] for key in _COLUMNS})
    if not rows:
        raise CarryoverError(f"the benchmark file {path} holds no rows", fix)
    frame = pd.DataFrame(rows, columns=list(_COLUMNS))
    frame["prompt_id"] = frame["prompt_id"].astype(str)
    _check_complete(frame, path, datasets, fix)
    return frame.sort_values(["variant", "dataset", "prompt_id"], ignore_index=True)


def _check_row(row: dict[str, Any]) -> None:
    absent = [key for key in _COLUMNS if key not in row]
    if absent:
        raise ValueError(f"the key {absent[0]} is missing")
    if row["variant"] not in VARIANTS:
        raise ValueError(f"unknown variant {row['variant']!r}")
    for key in _COUNTS:
        if not isinstance(row[key], int) or row[key] < 0:
            raise ValueError(f"{key} is {row[key]!r}, not a count")
    seconds = row["seconds"]
    if not isinstance(seconds, int | float) or not math.isfinite(seconds) or seconds <= 0:
        raise ValueError(f"seconds is {seconds!r}, not a positive time")
    for key in _LISTS:
        if not isinstance(row[key], list):
            raise ValueError(f"{key} is not a list")
    if row["variant"] != "autoregressive" and sum(row["accepted_per_position"]) != row["accepted"]:
        raise ValueError("accepted_per_position does not add up to accepted")
    if len(row["output_ids"]) != row["output_tokens"]:
        raise ValueError(
            f"output_ids holds {len(row['output_ids'])} ids, output_tokens says "
            f"{row['output_tokens']}"
        )


def _check_complete(frame: pd.DataFrame, path: Path, datasets: list[str], fix: str) -> None:
    missing = [variant for variant in VARIANTS if variant not in set(frame["variant"])]
    if missing:
        raise CarryoverError(f"{path} has no rows of the variant {', '.join(missing)}", fix)
    missing = [dataset for dataset in datasets if dataset not in set(frame["dataset"])]
    if missing:
        raise CarryoverError(f"{path} has no rows of the data set {', '.join(missing)}", fix)
    for dataset, rows in frame.groupby("dataset", sort=True):
        reference = set(rows.loc[rows["variant"] == VARIANTS[0], "prompt_id"])
        for variant in VARIANTS:
            ids = rows.loc[rows["variant"] == variant, "prompt_id"]
            if ids.duplicated().any():
                twice = ids[ids.duplicated()].iloc[0]
                raise CarryoverError(
                    f"{path} holds prompt {twice} of {dataset} twice for {variant}", fix
                )
            if set(ids) != reference:
                odd = sorted(set(ids) ^ reference)[0]
                raise CarryoverError(
                    f"{path}: {variant} and {VARIANTS[0]} do not hold the same prompts of "
                    f"{dataset} (for one, {odd})",
                    fix,
                )
