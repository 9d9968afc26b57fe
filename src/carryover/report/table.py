"""The main table: acceptance length and speedup of every target, drafter, variant and data set."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd

from carryover.config import VARIANTS
from carryover.report import statistics as stats

AVERAGE = "average"  # the micro average over all prompts, not the mean of the data sets' rows
KEYS = ("target", "drafter", "variant", "dataset", "temperature")
COLUMNS = (
    *KEYS,
    "acceptance_length",
    "acceptance_length_low",
    "acceptance_length_high",
    "speedup",
    "speedup_low",
    "speedup_high",
    "rounds",
    "output_tokens",
    "prompts",
)


def summarize(
    rows: pd.DataFrame, datasets: list[str], *, samples: int, confidence: float, seed: int
) -> pd.DataFrame:
    """Summarize the rows of one benchmark file (one target, drafter and temperature).

    Returns one row per data set (in the given order, then `average`) and variant with `COLUMNS`,
    then `tokens_per_second`, `identical_outputs` (share of prompts whose output ids equal the
    autoregressive ones; at temperature 0 only) and `{name}_percent`, `_low`, `_high` for `gain`
    and `speedup_gain` (acceptance length and speed of control and carryover over baseline) and
    `gain_over_control` and `speedup_gain_over_control` (of carryover over control). Intervals are
    paired percentile bootstraps over prompts.
    """
    summary: list[dict[str, Any]] = []
    for dataset in [*datasets, AVERAGE]:
        part = rows if dataset == AVERAGE else rows[rows["dataset"] == dataset]
        by_variant = {variant: part[part["variant"] == variant] for variant in VARIANTS}
        first = part.iloc[0]
        name = f"{first['target']}/{first['drafter']}/{first['temperature']:g}/{dataset}"
        counts = stats.resamples(len(by_variant[VARIANTS[0]]), samples, seed, name)
        summary.extend(_summarize_dataset(by_variant, dataset, counts, confidence))
    return pd.DataFrame(summary)


def _summarize_dataset(
    by_variant: dict[str, pd.DataFrame], dataset: str, counts: stats.Floats, confidence: float
) -> Iterator[dict[str, Any]]:
    tau, tau_draws, speed, speed_draws = {}, {}, {}, {}
    for variant, rows in by_variant.items():
        tau[variant] = stats.acceptance_length(rows["accepted"], rows["rounds"])
        tau_draws[variant] = stats.acceptance_length_draws(counts, rows["accepted"], rows["rounds"])
        speed[variant] = stats.speed(rows["output_tokens"], rows["seconds"])
        speed_draws[variant] = stats.speed_draws(counts, rows["output_tokens"], rows["seconds"])

    for variant, rows in by_variant.items():
        first = rows.iloc[0]
        if variant == "autoregressive":  # one token a step, and its own reference
            length = speedup = stats.Interval(1.0, 1.0, 1.0)
        else:
            length = stats.percentile_interval(tau[variant], tau_draws[variant], confidence)
            speedup = stats.percentile_interval(
                speed[variant] / speed["autoregressive"],
                speed_draws[variant] / speed_draws["autoregressive"],
                confidence,
            )
        row: dict[str, Any] = {key: first[key] for key in KEYS}
        row["dataset"] = dataset
        row |= _spread("acceptance_length", length) | _spread("speedup", speedup)
        row |= {
            "rounds": int(rows["rounds"].sum()),
            "output_tokens": int(rows["output_tokens"].sum()),
            "prompts": len(rows),
            "tokens_per_second": speed[variant],
            "identical_outputs": _identical_share(rows, by_variant["autoregressive"]),
        }
        references = {"gain": "baseline", "gain_over_control": "control"}
        for gain, reference in references.items():
            if VARIANTS.index(variant) > VARIANTS.index(reference):
                args = variant, reference, confidence
                row |= _spread(f"{gain}_percent", _gain(tau, tau_draws, *args))
                row |= _spread(f"speedup_{gain}_percent", _gain(speed, speed_draws, *args))
            else:
                nothing = stats.Interval(math.nan, math.nan, math.nan)
                row |= _spread(f"{gain}_percent", nothing)
                row |= _spread(f"speedup_{gain}_percent", nothing)
        yield row


def _gain(
    values: dict[str, float],
    draws: dict[str, stats.Floats],
    variant: str,
    reference: str,
    confidence: float,
) -> stats.Interval:
    return stats.gain_percent(
        values[variant], values[reference], draws[variant], draws[reference], confidence
    )


def _spread(name: str, interval: stats.Interval) -> dict[str, float]:
    return {name: interval.point, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _identical_share(rows: pd.DataFrame, reference: pd.DataFrame) -> float:
    # At T > 0 two runs draw different samples; only greedy outputs are expected to agree.
    if rows["temperature"].iloc[0] != 0:
        return math.nan
    same = [
        ids == expected
        for ids, expected in zip(rows["output_ids"], reference["output_ids"], strict=True)
    ]
    return sum(same) / len(same)


def to_csv(table: pd.DataFrame) -> str:
    """The table as CSV text; six significant digits, undefined values left empty."""
    return table.to_csv(index=False, float_format="%.6g", lineterminator="\n")


def with_interval(row: Any, name: str, style: Callable[[float], str], separator: str = ", ") -> str:
    """`1.72 [1.60, 1.85]`; a dash where undefined, no brackets for a single prompt."""
    point = row[name]
    if not math.isfinite(point):
        return "\N{EN DASH}"
    if row["prompts"] < 2 or row["variant"] == "autoregressive":
        return style(point)
    return f"{style(point)} [{style(row[f'{name}_low'])}{separator}{style(row[f'{name}_high'])}]"


def plain(value: float) -> str:
    return f"{value:.2f}"


def percent(value: float) -> str:
    """A signed percentage with a real minus sign."""
    return f"{value:+.1f}\N{NO-BREAK SPACE}%".replace("-", "\N{MINUS SIGN}")


def sections(table: pd.DataFrame) -> Iterator[tuple[str, str, float, pd.DataFrame]]:
    """(target, drafter, temperature, its rows) in the table's own order."""
    for keys, part in table.groupby(["target", "drafter", "temperature"], sort=False):
        target, drafter, temperature = keys
        yield str(target), str(drafter), float(temperature), part


def to_markdown(table: pd.DataFrame, confidence: float) -> str:
    """The same numbers for people: two GitHub tables per target, drafter and temperature."""
    lines = [
        "# Acceptance length and speedup",
        "",
        f"In brackets: {100 * confidence:g} % intervals, percentile bootstrap over prompts, paired "
        "between variants. Speedup is over autoregressive decoding of the same prompts. `average` "
        "is the micro average over all prompts. Intervals from few prompts are too "
        "narrow; one prompt has none.",
    ]
    for target, drafter, temperature, part in sections(table):
        for title, name, gain in (
            ("acceptance length", "acceptance_length", "gain"),
            ("speedup", "speedup", "speedup_gain"),
        ):
            lines += [
                "",
                f"## {target}, {drafter}, temperature {temperature:g}: {title}",
                "",
                "| dataset | prompts | baseline | control | carryover "
                "| carryover over baseline | carryover over control |",
                "|:--|--:|--:|--:|--:|--:|--:|",
            ]
            for dataset, rows in part.groupby("dataset", sort=False):
                by_variant = {row["variant"]: row for _, row in rows.iterrows()}
                ours = by_variant["carryover"]
                cells = [
                    str(dataset),
                    str(ours["prompts"]),
                    *(with_interval(by_variant[v], name, plain) for v in VARIANTS[1:]),
                    with_interval(ours, f"{gain}_percent", percent),
                    with_interval(ours, f"{gain}_over_control_percent", percent),
                ]
                if dataset == AVERAGE:
                    cells = [f"**{cell}**" for cell in cells]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
