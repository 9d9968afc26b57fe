"""Training metrics of the drafters, as the trainer logged them."""

import json
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from carryover.errors import CarryoverError

TRAINED = ("baseline", "control", "carryover")
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
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                step = int(record["step"])
            except (ValueError, KeyError, TypeError):
                raise CarryoverError(
                    f"{path}, line {number}: not a record with a step",
                    f"remove that line, or {folder} and train {variant} again",
                ) from None
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
