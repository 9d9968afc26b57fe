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


def fewest_prompts(confidence: float) -> int:
    """From how many prompts on an interval that leaves 0 out can be as sure as `confidence`.

    Where all n prompts differ in the same direction, so does every resample, and the interval
    leaves 0 out. Without any true difference that happens with probability 2^(1-n), which must
    not be above 1 - confidence: 6 prompts at 95 %.
    """
    return math.ceil(1 - math.log2(1 - confidence))


def judge(low: float, high: float, prompts: int, confidence: float) -> str:
    """`gain` or `loss` where the interval leaves 0 out, else `none`.

    `unknown` without an interval or from fewer than `fewest_prompts`.
    """
    if prompts < fewest_prompts(confidence) or not (math.isfinite(low) and math.isfinite(high)):
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
        acceptance = _judged(ours, "gain", confidence)
        speed = _judged(ours, "speedup_gain", confidence)
        sentences = [
            f"Acceptance length τ is {plain(ours['acceptance_length'])} with carryover and "
            f"{plain(baseline['acceptance_length'])} with the baseline: "
            f"{_change(ours, 'gain', confidence)} over the baseline, "
            f"{_change(ours, 'gain_over_control', confidence)} over the control with the same "
            f"extra training. {_conclusion(acceptance, ours, confidence, 'acceptance length')}",
            f"Decoding runs at {plain(ours['speedup'])} times the autoregressive speed with "
            f"carryover and at {plain(baseline['speedup'])} times with the baseline: "
            f"{_change(ours, 'speedup_gain', confidence)} over the baseline, "
            f"{_change(ours, 'speedup_gain_over_control', confidence)} over the control. "
            f"{_conclusion(speed, ours, confidence, 'speed')}",
        ]
        title = f"{target}, {drafter}, temperature {temperature:g}"
        found.append(Verdict(title, _both(acceptance), _both(speed), sentences))
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


def _judged(row: pd.Series, gain: str, confidence: float) -> tuple[str, str]:
    """The judgements over the baseline and over the control."""
    over_baseline, over_control = (
        judge(row[f"{name}_percent_low"], row[f"{name}_percent_high"], row["prompts"], confidence)
        for name in (gain, f"{gain}_over_control")
    )
    return over_baseline, over_control


def _both(judged: tuple[str, str]) -> str:
    if "unknown" in judged:
        return "unknown"
    return judged[0] if judged[0] == judged[1] else "none"


def _change(row: pd.Series, name: str, confidence: float) -> str:
    text = percent(row[f"{name}_percent"])
    if row["prompts"] < 2:
        return text
    low, high = (percent(row[f"{name}_percent_{end}"]) for end in ("low", "high"))
    return f"{text} ({100 * confidence:g}\N{NO-BREAK SPACE}% interval {low} to {high})"


def _conclusion(judged: tuple[str, str], row: pd.Series, confidence: float, what: str) -> str:
    result = _both(judged)
    if result == "unknown":
        if row["prompts"] >= fewest_prompts(confidence):
            return f"Nothing was drafted that would tell whether the {what} changed."
        few = "One prompt is" if row["prompts"] == 1 else f"{row['prompts']} prompts are"
        return f"{few} too few to tell whether the {what} changed."
    if result == "gain":
        return f"This is a measurable gain in {what}."
    if result == "loss":
        return f"This is a measurable loss in {what}."
    if judged == ("none", "none"):
        return (
            f"No measurable gain in {what}: the intervals of the paired differences to the "
            "baseline and to the control both include zero."
        )
    words = {
        "gain": "measurably better than",
        "loss": "measurably worse than",
        "none": "not distinguishable from",
    }
    over_baseline, over_control = (words[verdict] for verdict in judged)
    return (
        f"No measurable gain in {what} from the carried rows: carryover is {over_baseline} the "
        f"baseline, but {over_control} the control, which saw the same further steps."
    )
