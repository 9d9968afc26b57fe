"""What the numbers say, in words: a gain only where its interval leaves zero out."""

import math
from dataclasses import dataclass

import pandas as pd

from carryover.report.table import AVERAGE, percent, plain, sections


@dataclass(frozen=True)
class Verdict:
    """The answer for one target, drafter and temperature, over all prompts.

    `acceptance` and `speed`: `gain`, `loss`, `none` or `unknown`, against baseline *and* control:
    a gain counts only when it also holds over the control, which had the same extra training
    steps without carried rows.
    """

    title: str
    acceptance: str
    speed: str
    sentences: list[str]


def judge(low: float, high: float, prompts: int) -> str:
    """`gain` or `loss` where the interval leaves 0 out, else `none`; `unknown` without one."""
    if prompts < 2 or not (math.isfinite(low) and math.isfinite(high)):
        return "unknown"
    if low > 0:
        return "gain"
    return "loss" if high < 0 else "none"


def verdicts(table: pd.DataFrame, confidence: float) -> list[Verdict]:
    """One verdict per target, drafter and temperature of the main table."""
    found = []
    for target, drafter, temperature, part in sections(table):
        by_variant = part[part["dataset"] == AVERAGE].set_index("variant")
        ours, baseline = by_variant.loc["carryover"], by_variant.loc["baseline"]
        acceptance = _both(ours, "gain")
        speed = _both(ours, "speedup_gain")
        sentences = [
            f"Acceptance length τ is {plain(ours['acceptance_length'])} with carryover and "
            f"{plain(baseline['acceptance_length'])} with the baseline: "
            f"{_change(ours, 'gain', confidence)} over the baseline, "
            f"{_change(ours, 'gain_over_control', confidence)} over the control with the same "
            f"extra training. {_conclusion(acceptance, ours, 'gain', 'acceptance length')}",
            f"Decoding runs at {plain(ours['speedup'])} times the autoregressive speed with "
            f"carryover and at {plain(baseline['speedup'])} times with the baseline: "
            f"{_change(ours, 'speedup_gain', confidence)} over the baseline, "
            f"{_change(ours, 'speedup_gain_over_control', confidence)} over the control. "
            f"{_conclusion(speed, ours, 'speedup_gain', 'speed')}",
        ]
        title = f"{target}, {drafter}, temperature {temperature:g}"
        found.append(Verdict(title, acceptance, speed, sentences))
    return found


def headline(found: list[Verdict]) -> str:
    """The page's first line: what carryover did to the acceptance length here."""
    results = [verdict.acceptance for verdict in found]
    if all(result == "gain" for result in results):
        return "Carryover lengthened acceptance here"
    if any(result == "gain" for result in results):
        return f"Carryover lengthened acceptance in {results.count('gain')} of {len(results)} cases"
    if any(result == "loss" for result in results):
        return f"Carryover shortened acceptance in {results.count('loss')} of {len(results)} cases"
    if all(result == "unknown" for result in results):
        return "Too few prompts to tell what carryover does here"
    return "No measurable gain from carryover here"


def _both(row: pd.Series, gain: str) -> str:
    results = [
        judge(row[f"{name}_percent_low"], row[f"{name}_percent_high"], row["prompts"])
        for name in (gain, f"{gain}_over_control")
    ]
    return results[0] if results[0] == results[1] else "none"


def _change(row: pd.Series, name: str, confidence: float) -> str:
    text = percent(row[f"{name}_percent"])
    if row["prompts"] < 2:
        return text
    low, high = (percent(row[f"{name}_percent_{end}"]) for end in ("low", "high"))
    return f"{text} ({100 * confidence:g}\N{NO-BREAK SPACE}% interval {low} to {high})"


def _conclusion(result: str, row: pd.Series, gain: str, what: str) -> str:
    if result == "unknown":
        return f"One prompt does not tell whether the {what} changed."
    if result == "gain":
        return f"This is a measurable gain in {what}."
    if result == "loss":
        return f"This is a measurable loss in {what}."
    alone = judge(row[f"{gain}_percent_low"], row[f"{gain}_percent_high"], row["prompts"])
    if alone == "gain":
        return (
            f"No measurable gain in {what} from the carried rows: the difference to the control, "
            "which saw the same steps, is not distinguishable from zero."
        )
    return f"No measurable gain in {what}: an interval of the paired difference includes zero."
