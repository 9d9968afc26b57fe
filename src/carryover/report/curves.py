"""Training metrics of the drafters, as the trainer logged them."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from carryover.errors import CarryoverError
from carryover.jsonl import numbered_rows

HELD_OUT = (
    "held_out_acceptance_length",
    "held_out_carry_on_acceptance_length",
    "held_out_carry_off_acceptance_length",
)


@dataclass(frozen=True)
class Curve:
    """One training run. Both tables have a `step` column.

    `train`: `loss` per logged step. `held_out`, per evaluation, the expected (teacher forced)
    tau of the `HELD_OUT` columns: drafts without carried rows at the sampled anchors, and, for
    carryover only (else NaN), drafts at the anchors after a verification with carried rows and,
    from the same anchors and weights, without.
    """

    target: str
    drafter: str
    variant: str
    train: pd.DataFrame
    held_out: pd.DataFrame


def read_curve(folder: Path, target: str, drafter: str, variant: str) -> Curve | None:
    """Read `metrics.jsonl` of a training folder; None when that file is not there.

    Checkpoints and metrics are no declared output, so a user may have removed them. A run that
    was resumed logs some steps twice: the last record of a step counts.
    Raises CarryoverError, naming file and line, for a record that is not JSON or has no step.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return None
    train: dict[int, dict] = {}
    held_out: dict[int, dict] = {}
    fix = f"remove that line, or {folder} and train {variant} again"
    for number, record in numbered_rows(path, fix):
        step = record.get("step")
        if not isinstance(step, int):
            raise CarryoverError(f"{path}, line {number}: not a record with a step", fix)
        if "loss" in record:
            train[step] = {"step": step, "loss": record["loss"]}
        if HELD_OUT[0] in record:
            held_out[step] = {key: record.get(key) for key in ("step", *HELD_OUT)}
    return Curve(
        target,
        drafter,
        variant,
        _frame(train, ("step", "loss")),
        _frame(held_out, ("step", *HELD_OUT)),
    )


def _frame(records: dict[int, dict], columns: tuple[str, ...]) -> pd.DataFrame:
    rows = [records[step] for step in sorted(records)]
    return pd.DataFrame(rows, columns=list(columns), dtype=float)
