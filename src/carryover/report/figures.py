"""The figures: bars of acceptance length (the paper's Figure 3) and speedup, and training curves.

Figures are written as PNG and SVG. The SVG text stays text, ids are salted and no date is
embedded, so the same numbers give the same bytes. Colours are Okabe and Ito's, which people
with colour vision deficiencies can tell apart; hatching says the same without colour.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from carryover.artifacts import atomic_path
from carryover.report.curves import HELD_OUT, Curve
from carryover.report.table import AVERAGE, sections

INK = "#1b1b1f"  # text and axes; the page replaces it by the colour of its own text
_STYLE: Any = {
    "svg.hashsalt": "carryover",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": "#8a8a8a",
    "grid.alpha": 0.35,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
}
COLORS = {"baseline": "#999999", "control": "#56B4E9", "carryover": "#D55E00"}
_HATCHES = {"baseline": "", "control": "///", "carryover": ""}
_BAR = 0.27


def acceptance_length(table: pd.DataFrame, confidence: float) -> Figure:
    """tau per data set, one panel per target, drafter and temperature."""
    return _bars(table, "acceptance_length", "acceptance length τ", confidence)


def speedup(table: pd.DataFrame, confidence: float) -> Figure:
    """Speed over autoregressive decoding, arranged as `acceptance_length`."""
    return _bars(table, "speedup", "speedup over autoregressive", confidence)


def _bars(table: pd.DataFrame, name: str, label: str, confidence: float) -> Figure:
    panels = list(sections(table))
    with matplotlib.rc_context(_STYLE):
        widest = max(part["dataset"].nunique() for *_, part in panels)
        figure = Figure(
            figsize=(max(6.4, 1.6 + 0.86 * widest), 0.9 + 2.9 * len(panels)), layout="constrained"
        )
        axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for axis, (target, drafter, temperature, part) in zip(axes, panels, strict=True):
            _panel(axis, part, name)
            axis.set_title(f"{target}, {drafter}, T = {temperature:g}", fontweight="bold")
            axis.set_ylabel(label)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=4)
        figure.supxlabel(
            f"Whiskers: {100 * confidence:g} % bootstrap interval over prompts; "
            "none for a single prompt",
            fontsize=8.5,
        )
    return figure


def _panel(axis: Axes, part: pd.DataFrame, name: str) -> None:
    datasets = list(dict.fromkeys(part["dataset"]))
    # The average stands apart from the data sets that it summarizes.
    places = [index + (0.35 if dataset == AVERAGE else 0) for index, dataset in enumerate(datasets)]
    axis.axhline(1.0, color=INK, linewidth=1.0, linestyle=(0, (4, 3)), label="autoregressive")
    for index, (variant, color) in enumerate(COLORS.items()):
        rows = part[part["variant"] == variant].set_index("dataset").loc[datasets]
        x = [place + (index - 1) * _BAR for place in places]
        axis.bar(
            x,
            rows[name],
            width=_BAR * 0.94,
            color=color,
            hatch=_HATCHES[variant],
            edgecolor=INK,
            linewidth=0.5,
            label=variant,
        )
        several = (rows["prompts"] > 1).to_numpy()
        if several.any():
            shown = rows[several]
            axis.errorbar(
                [place for place, keep in zip(x, several, strict=True) if keep],
                shown[name],
                # A percentile interval of a skewed ratio need not hold its own point.
                yerr=[
                    (shown[name] - shown[f"{name}_low"]).clip(lower=0),
                    (shown[f"{name}_high"] - shown[name]).clip(lower=0),
                ],
                fmt="none",
                ecolor=INK,
                elinewidth=1.0,
                capsize=2.5,
            )
    axis.set_xticks(places, datasets, rotation=25, ha="right", rotation_mode="anchor")
    axis.set_xlim(-0.6, places[-1] + 0.6)
    axis.set_ylim(bottom=0)
    axis.grid(axis="y")
    axis.tick_params(length=0, axis="x")


def training_loss(curves: list[Curve], baseline_steps: int) -> Figure:
    """Training loss of the baseline, then of control and carryover; held-out tau, also on/off.

    One row per target and drafter. Control and carryover continue the baseline, so the held-out
    curve puts them after its `baseline_steps`. An empty list gives a figure that says so.
    """
    groups: dict[tuple[str, str], list[Curve]] = {}
    for curve in curves:
        groups.setdefault((curve.target, curve.drafter), []).append(curve)
    with matplotlib.rc_context(_STYLE):
        rows = max(1, len(groups))
        figure = Figure(figsize=(12.4, 3.2 * rows), layout="constrained")
        if not groups:
            figure.suptitle("No training metrics were found")
            return figure
        bands = figure.subfigures(rows, 1, squeeze=False)[:, 0]
        for band, ((target, drafter), group) in zip(bands, groups.items(), strict=True):
            band.suptitle(f"{target}, {drafter}", x=0.01, ha="left", fontsize=11, fontweight="bold")
            _training_row(band.subplots(1, 4), group, baseline_steps)
    return figure


def _training_row(row: Sequence[Axes], group: list[Curve], baseline_steps: int) -> None:
    for curve in group:
        color = COLORS[curve.variant]
        first = curve.variant == "baseline"
        axis = row[0 if first else 1]
        if len(curve.train):
            axis.plot(curve.train["step"], curve.train["loss"], color=color, alpha=0.35, lw=0.8)
            window = max(1, len(curve.train) // 20)
            smooth = curve.train["loss"].rolling(window, min_periods=1).mean()
            axis.plot(curve.train["step"], smooth, color=color, lw=1.8, label=curve.variant)
        steps = curve.held_out["step"] + (0 if first else baseline_steps)
        plain, carried, dropped = (curve.held_out[key] for key in HELD_OUT)
        points: Any = {"color": color, "marker": "o", "ms": 3.5, "lw": 1.4}
        row[2].plot(steps, plain, label=curve.variant, **points)
        if carried.notna().any():
            row[3].plot(curve.held_out["step"], carried, label="with carried rows", **points)
            points |= {"color": INK, "marker": "s", "ls": "--"}
            row[3].plot(curve.held_out["step"], dropped, label="without", **points)
    for axis, label in zip(row, ("training loss", "training loss", "τ", "τ"), strict=True):
        axis.set_ylabel(label)
    titles = {
        "baseline": "step",
        "control and carryover": "further step",
        "held out": "step, all training",
        "held out, after a round": "further step",
    }
    for axis, (title, label) in zip(row, titles.items(), strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(label)
        axis.grid()
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8.5)


def to_svg(figure: Figure) -> str:
    """The figure as SVG text; the same figure gives the same bytes."""
    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    # Where DejaVu Sans is not installed, the next best is a font of the same width.
    return buffer.getvalue().replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")


def save(figure: Figure, png: Path, svg: Path) -> str:
    """Write both files atomically; returns the SVG text."""
    text = to_svg(figure)
    with atomic_path(svg) as temporary:
        temporary.write_text(text, encoding="utf-8")
    with atomic_path(png) as temporary, matplotlib.rc_context(_STYLE):
        figure.savefig(temporary, format="png", dpi=160, metadata={"Software": None})
    return text
