"""Acceptance length, speed and their paired percentile bootstrap over prompts.

Every quantity here is a ratio of sums over prompts (micro average). A bootstrap resample is
therefore a vector of how often each prompt was drawn, and using the *same* resamples for every
variant is what makes a comparison paired: whatever a prompt does to all variants (its length,
its difficulty, a slow minute of the machine) cancels in the ratio of two variants.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A value and its two-sided interval. All three are NaN where the value is undefined."""

    point: float
    low: float
    high: float


def acceptance_length(accepted: ArrayLike, rounds: ArrayLike) -> float:
    """tau: committed tokens per verification round, bonus/correction token included.

    1 + sum(accepted) / sum(rounds), micro over all rounds (paper, "Terms" of its section 2).
    `accepted` and `rounds`: counts per prompt, [prompts]. A prompt with no round (its first
    token ended it) adds nothing to either sum; without any round tau is NaN.
    """
    total = float(np.sum(rounds))
    return 1.0 + float(np.sum(accepted)) / total if total > 0 else float("nan")


def speed(tokens: ArrayLike, seconds: ArrayLike) -> float:
    """Output tokens per second: sum(tokens) / sum(seconds), both per prompt, [prompts]."""
    return float(np.sum(tokens)) / float(np.sum(seconds))


def resamples(prompts: int, samples: int, seed: int, name: str) -> Floats:
    """How often each prompt is drawn in each bootstrap resample, float64 [samples, prompts].

    Rows sum to `prompts`. The stream depends on `seed` and `name` (which comparison it is) only,
    so adding a data set or a drafter to a run does not move the intervals of the others.
    """
    digest = hashlib.sha256(name.encode()).digest()
    words = [int.from_bytes(digest[i : i + 4], "big") for i in range(0, 16, 4)]
    rng = np.random.default_rng([seed, *words])
    return rng.multinomial(prompts, np.full(prompts, 1.0 / prompts), size=samples).astype(float)


def acceptance_length_draws(counts: Floats, accepted: ArrayLike, rounds: ArrayLike) -> Floats:
    """tau of every resample, float64 [samples]; NaN where a resample holds no round."""
    return 1.0 + _ratio(counts, accepted, rounds)


def speed_draws(counts: Floats, tokens: ArrayLike, seconds: ArrayLike) -> Floats:
    """Tokens per second of every resample, float64 [samples]."""
    return _ratio(counts, tokens, seconds)


def percentile_interval(point: float, draws: Floats, confidence: float) -> Interval:
    """The central `confidence` share of the draws; undefined (NaN) draws are left out.

    With one prompt every resample is that prompt, so low = point = high: this says nothing
    about the uncertainty, and readers are told so wherever `prompts` is 1.
    """
    defined = draws[np.isfinite(draws)]
    if not np.isfinite(point) or defined.size == 0:
        return Interval(float("nan"), float("nan"), float("nan"))
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(defined, [tail, 1.0 - tail])
    return Interval(float(point), float(low), float(high))


def gain_percent(
    value: float, reference: float, draws: Floats, reference_draws: Floats, confidence: float
) -> Interval:
    """100 (value / reference - 1) with its paired interval; draws share their resamples."""
    return percentile_interval(
        100.0 * (value / reference - 1.0), 100.0 * (draws / reference_draws - 1.0), confidence
    )


def _ratio(counts: Floats, numerator: ArrayLike, denominator: ArrayLike) -> Floats:
    top = counts @ np.asarray(numerator, dtype=float)
    bottom = counts @ np.asarray(denominator, dtype=float)
    return np.divide(top, bottom, out=np.full_like(top, np.nan), where=bottom > 0)
