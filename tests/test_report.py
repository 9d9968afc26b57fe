"""Report stage: statistics by hand, properties of the bootstrap, and the files as a whole.

All rows are made here, for a target and a drafter that do not exist.
"""

import json
import math
import random
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from carryover.artifacts import manifest_path, read_manifest, write_manifest
from carryover.config import VARIANTS, load_config
from carryover.errors import CarryoverError
from carryover.paths import Paths
from carryover.report import COLUMNS, figures, html, paper, run
from carryover.report import statistics as stats
from carryover.report.curves import read_curve
from carryover.report.rows import read_rows
from carryover.report.stage_times import jobs, read_provenance, read_stage_times
from carryover.report.table import AVERAGE, summarize
from carryover.report.verdict import fewest_prompts, headline, judge, verdicts

REPOSITORY = Path(__file__).parents[1]
CONFIG = REPOSITORY / "config" / "config.yaml"
TARGET, DRAFTER = "Synthetic-Target", "Synthetic-Drafter"
DATASETS = ["chat", "code"]
B = 3


def make_row(variant: str, dataset: str, prompt: int, **values) -> dict:
    per_position = values.pop("accepted_per_position", [0] * B)
    ids = values.pop("output_ids", [1, 2, 3, 4])
    return {
        "target": TARGET,
        "drafter": DRAFTER,
        "variant": variant,
        "dataset": dataset,
        "temperature": 0,
        "prompt_id": f"{dataset}-{prompt}",
        "prompt_tokens": 5,
        "output_tokens": len(ids),
        "seconds": 1.0,
        "rounds": 0,
        "accepted": sum(per_position),
        "accepted_per_position": per_position,
        "output_ids": ids,
        "finish_reason": "length",
        "order": 0,
    } | values


def make_rows(prompts: int, seed: int = 0, gain: float = 0.0) -> list[dict]:
    """Rows whose carryover needs `gain` (a share) fewer rounds than baseline and control."""
    rng = random.Random(seed)
    rows = []
    for dataset in DATASETS:
        for prompt in range(prompts):
            ids = [rng.randrange(100) for _ in range(rng.randint(40, 80))]
            base = rng.uniform(1.4, 2.4)
            slow = rng.uniform(0.8, 1.3)  # the machine, the same for all variants of a prompt
            for variant in VARIANTS:
                if variant == "autoregressive":
                    values = {"rounds": 0, "accepted_per_position": [], "seconds": len(ids) * slow}
                else:
                    tau = base * (1 + (gain if variant == "carryover" else 0))
                    tau *= rng.uniform(0.97, 1.03)
                    rounds = max(1, round(len(ids) / tau))
                    accepted = len(ids) - rounds
                    first = min(rounds, accepted)
                    values = {
                        "rounds": rounds,
                        "accepted_per_position": [first, accepted - first, 0],
                        "seconds": 1.6 * rounds * slow,
                    }
                rows.append(make_row(variant, dataset, prompt, output_ids=ids, **values))
    return rows


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> pd.DataFrame:
    return read_rows(path, target=TARGET, drafter=DRAFTER, temperature=0, datasets=DATASETS)


def table_of(tmp_path: Path, rows: list[dict], samples: int = 500) -> pd.DataFrame:
    frame = read(write_rows(tmp_path / "rows.jsonl", rows))
    return summarize(frame, DATASETS, samples=samples, confidence=0.95, seed=7)


def pick(table: pd.DataFrame, variant: str, dataset: str = AVERAGE) -> pd.Series:
    return table[(table["variant"] == variant) & (table["dataset"] == dataset)].iloc[0]


def make_config(tmp_path: Path):
    raw = yaml.safe_load(CONFIG.read_text())
    raw["results_dir"] = str(tmp_path / "results")
    raw["targets"] = {TARGET: next(iter(raw["targets"].values()))}
    raw["drafters"] = {DRAFTER: next(iter(raw["drafters"].values()))}
    raw["prompts"]["evaluation"]["datasets"] = DATASETS
    raw["report"]["bootstrap_samples"] = 200
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    return load_config(path)


def write_results(config, rows: list[dict], trained=("baseline", "control", "carryover")) -> Path:
    paths = Paths(config)
    path = write_rows(paths.benchmark(TARGET, DRAFTER, 0), rows)
    write_manifest(
        path,
        stage="benchmark",
        config=config.stage("benchmark", TARGET, DRAFTER),
        started=datetime.now(UTC),
        seed=config.seed,
    )
    for variant in trained:
        steps = 400 if variant == "baseline" else 100
        start = 6.0 if variant == "baseline" else 3.0
        records: list[dict] = []
        for step in range(10, steps + 1, 10):
            records.append({"step": step, "loss": start - step / 200, "accuracy": [0.5] * B})
            if step % 50 == 0:
                records.append({"step": step, "held_out_acceptance_length": 1.5 + step / 1000})
                if variant == "carryover":
                    records[-1]["held_out_carry_on_acceptance_length"] = 1.7 + step / 500
                    records[-1]["held_out_carry_off_acceptance_length"] = 1.6
        write_rows(paths.training(TARGET, DRAFTER, variant) / "metrics.jsonl", records)
    timing = "s\th:m:s\tmax_rss\tmean_load\n185.4\t0:03:05\t2048.0\t-\n"
    write_timing(config, f"train/{TARGET}/{DRAFTER}/baseline", timing)
    return path


def write_timing(config, job: str, text: str) -> None:
    path = Path(config.results_dir) / "benchmarks" / f"{job}.tsv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# --- statistics -----------------------------------------------------------------------------


def test_acceptance_length_is_micro_and_counts_the_bonus_token():
    # Prompt 1: 2 rounds, 3 accepted; prompt 2: 8 rounds, 2 accepted. 1 + 5/10, not the mean of
    # 2.5 and 1.25.
    assert stats.acceptance_length([3, 2], [2, 8]) == pytest.approx(1.5)


def test_prompt_without_rounds_changes_nothing_and_none_at_all_is_undefined():
    assert stats.acceptance_length([3, 0], [2, 0]) == pytest.approx(2.5)
    assert math.isnan(stats.acceptance_length([0], [0]))


def test_summary_by_hand(tmp_path):
    rows = []
    for dataset in DATASETS:
        for prompt, (slow, fast) in enumerate([(4.0, 2.0), (6.0, 3.0)]):
            args = (dataset, prompt)
            rows.append(make_row("autoregressive", *args, seconds=slow, accepted_per_position=[]))
            accept = {"rounds": 2, "accepted_per_position": [1, 1, 0]}
            rows.append(make_row("baseline", *args, seconds=fast, **accept))
            rows.append(make_row("control", *args, seconds=2 * fast, **accept))
            accept = {"rounds": 1, "accepted_per_position": [1, 1, 1]}
            rows.append(make_row("carryover", *args, seconds=fast / 2, **accept))
    rows[-1]["output_ids"] = [1, 2, 3, 5]  # one of four outputs of carryover differs
    table = table_of(tmp_path, rows)

    assert tuple(table.columns[: len(COLUMNS)]) == COLUMNS
    assert len(table) == 3 * len(VARIANTS)
    ar = pick(table, "autoregressive")
    assert (ar["acceptance_length"], ar["speedup_low"], ar["speedup_high"]) == (1, 1, 1)
    baseline, control, ours = (pick(table, v) for v in ("baseline", "control", "carryover"))
    assert baseline["acceptance_length"] == pytest.approx(2.0)  # 1 + 2/2
    assert ours["acceptance_length"] == pytest.approx(4.0)  # 1 + 3/1
    assert baseline["speedup"] == pytest.approx(2.0)  # 16/10 over 16/20 tokens per second
    assert control["speedup"] == pytest.approx(1.0)
    assert ours["speedup"] == pytest.approx(4.0)
    assert (ours["rounds"], ours["output_tokens"], ours["prompts"]) == (4, 16, 4)
    assert ours["gain_percent"] == pytest.approx(100.0)
    assert ours["speedup_gain_over_control_percent"] == pytest.approx(300.0)
    # Every prompt has the same ratios, so pairing leaves no uncertainty at all.
    assert ours["speedup_low"] == pytest.approx(4.0)
    assert ours["speedup_high"] == pytest.approx(4.0)
    assert math.isnan(baseline["gain_percent"])
    assert ours["identical_outputs"] == pytest.approx(0.75)
    assert baseline["identical_outputs"] == 1


def test_every_resample_draws_as_many_prompts_as_there_are():
    counts = stats.resamples(5, 300, seed=1, name="x")
    assert counts.shape == (300, 5)
    assert (counts.sum(axis=1) == 5).all()
    assert counts.mean() == pytest.approx(1.0)


def test_resamples_depend_on_seed_and_name_only():
    first = stats.resamples(9, 50, seed=3, name="a/b/0/chat")
    assert (first == stats.resamples(9, 50, seed=3, name="a/b/0/chat")).all()
    assert (first != stats.resamples(9, 50, seed=4, name="a/b/0/chat")).any()
    assert (first != stats.resamples(9, 50, seed=3, name="a/b/0/code")).any()


def test_draws_equal_resampling_prompt_by_prompt():
    accepted, rounds = np.array([3, 0, 7, 2]), np.array([2, 5, 4, 3])
    counts = stats.resamples(4, 20, seed=5, name="dense")
    draws = stats.acceptance_length_draws(counts, accepted, rounds)
    for count, draw in zip(counts.astype(int), draws, strict=True):
        chosen = np.repeat(np.arange(4), count)
        assert draw == pytest.approx(1 + accepted[chosen].sum() / rounds[chosen].sum())


def test_interval_of_two_prompts_by_enumeration():
    # Resamples of two prompts: aa, ab, ba, bb with tau 2, 3, 3, 4 (one round each).
    counts = stats.resamples(2, 4000, seed=11, name="two")
    draws = stats.acceptance_length_draws(counts, [1, 3], [1, 1])
    values, shares = np.unique(draws, return_counts=True)
    assert values.tolist() == [2, 3, 4]
    assert shares / 4000 == pytest.approx([0.25, 0.5, 0.25], abs=0.03)
    assert stats.percentile_interval(3.0, draws, 0.95) == stats.Interval(3.0, 2.0, 4.0)
    assert stats.percentile_interval(3.0, draws, 0.3) == stats.Interval(3.0, 3.0, 3.0)


def test_interval_covers_as_often_as_it_says():
    # True tau 1 + 0.6; 200 data sets of 40 prompts. A 90 % interval should miss about 20 of them.
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        rounds = rng.integers(5, 30, size=40)
        accepted = rng.binomial(rounds, 0.6)
        counts = stats.resamples(40, 400, seed=trial, name="coverage")
        draws = stats.acceptance_length_draws(counts, accepted, rounds)
        point = stats.acceptance_length(accepted, rounds)
        interval = stats.percentile_interval(point, draws, 0.9)
        hits += interval.low <= 1.6 <= interval.high
    assert 165 <= hits <= 195


def test_resamples_without_any_round_are_left_out():
    counts = np.array([[2.0, 0.0], [1.0, 1.0], [0.0, 2.0]])  # the second prompt has no round
    draws = stats.acceptance_length_draws(counts, [3, 0], [2, 0])
    assert math.isnan(draws[2])
    assert stats.percentile_interval(2.5, draws, 0.95) == stats.Interval(2.5, 2.5, 2.5)


def test_intervals_hold_the_point_and_narrow_with_more_prompts(tmp_path):
    widths = {}
    for prompts in (6, 96):
        table = table_of(tmp_path, make_rows(prompts, seed=2))
        for name in ("acceptance_length", "speedup"):
            row = pick(table, "carryover")
            assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]
            widths[name, prompts] = row[f"{name}_high"] - row[f"{name}_low"]
    assert widths["acceptance_length", 96] < 0.5 * widths["acceptance_length", 6]
    assert widths["speedup", 96] < 0.5 * widths["speedup", 6]


def test_pairing_removes_what_all_variants_share(tmp_path):
    # tau differs by 20 % between prompts, but carryover's gain over baseline is 6 % in each.
    row = pick(table_of(tmp_path, make_rows(24, seed=3, gain=0.06)), "carryover")
    spread = 100 * (row["acceptance_length_high"] / row["acceptance_length_low"] - 1)
    paired = row["gain_percent_high"] - row["gain_percent_low"]
    assert paired < spread / 2
    assert 3 < row["gain_percent"] < 9
    assert row["gain_percent_low"] > 0


def test_slow_minutes_of_the_machine_do_not_move_the_speedup(tmp_path):
    rows = make_rows(10, seed=4)
    rng = random.Random(1)
    drift = {}
    for row in rows:
        # All variants of a prompt run one after the other, so a slow minute hits them together;
        # tokens are equal, so time weights change and the ratio must move by little.
        row["seconds"] *= drift.setdefault(row["prompt_id"], rng.uniform(1, 3))
    calm = pick(table_of(tmp_path, make_rows(10, seed=4)), "carryover")
    noisy = pick(table_of(tmp_path, rows), "carryover")
    assert noisy["tokens_per_second"] < 0.7 * calm["tokens_per_second"]
    assert noisy["speedup"] == pytest.approx(calm["speedup"], rel=0.1)


def test_single_prompt_has_no_width_and_no_verdict(tmp_path):
    rows = [row for row in make_rows(1, gain=0.5) if row["dataset"] == "chat"]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    frame = read_rows(path, target=TARGET, drafter=DRAFTER, temperature=0, datasets=["chat"])
    table = summarize(frame, ["chat"], samples=50, confidence=0.95, seed=0)
    row = pick(table, "carryover")
    assert row["speedup_low"] == pytest.approx(row["speedup"])
    assert row["speedup_high"] == pytest.approx(row["speedup"])
    found = verdicts(table, 0.95)
    assert found[0].acceptance == "unknown"
    assert headline(found) == "Too few prompts to tell what carryover does here"


def test_prompt_order_in_the_file_does_not_matter(tmp_path):
    rows = make_rows(5)
    shuffled = rows[:]
    random.Random(9).shuffle(shuffled)
    pd.testing.assert_frame_equal(table_of(tmp_path, rows), table_of(tmp_path, shuffled))


def test_sampled_outputs_are_not_compared(tmp_path):
    rows = [row | {"temperature": 1.0} for row in make_rows(3)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    frame = read_rows(path, target=TARGET, drafter=DRAFTER, temperature=1, datasets=DATASETS)
    table = summarize(frame, DATASETS, samples=50, confidence=0.95, seed=0)
    assert table["identical_outputs"].isna().all()


# --- what the numbers say -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "prompts", "expected"),
    [
        (0.1, 5.0, 9, "gain"),
        (-5.0, -0.1, 9, "loss"),
        (-0.1, 5.0, 9, "none"),
        (0.0, 5.0, 9, "none"),
        (0.1, 5.0, 6, "gain"),
        (0.1, 5.0, 5, "unknown"),
        (-0.1, 5.0, 4, "unknown"),
        (1.0, 1.0, 1, "unknown"),
        (math.nan, math.nan, 9, "unknown"),
    ],
)
def test_judge(low, high, prompts, expected):
    assert judge(low, high, prompts, 0.95) == expected


@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.9, 0.95, 0.99])
def test_prompts_that_agree_by_chance_are_not_called_a_gain(confidence):
    # Without any true difference, n prompts have the same sign with probability 2 / 2^n.
    fewest = fewest_prompts(confidence)
    assert fewest >= 2
    for prompts in range(1, 12):
        by_chance = 2 * 0.5**prompts
        assert (prompts >= fewest) == (by_chance <= 1 - confidence + 1e-12)
    assert judge(1.0, 2.0, fewest, confidence) == "gain"
    assert judge(1.0, 2.0, fewest - 1, confidence) == "unknown"


def test_data_sets_of_few_prompts_are_not_marked(tmp_path):
    # Four prompts a set, all of which gain 30 %: their intervals leave out zero, and say little.
    table = table_of(tmp_path, make_rows(4, gain=0.3))
    ours = pick(table, "carryover", "chat")
    assert ours["gain_percent_low"] > 0
    rows = html._results(table, 0.95)[0]["rows"]
    marks = {row["dataset"]: {gain["verdict"] for gain in row["gains"]} for row in rows}
    assert marks == {"chat": {"unknown"}, "code": {"unknown"}, AVERAGE: {"gain"}}
    few = verdicts(table_of(tmp_path, make_rows(2, gain=0.3)), 0.95)
    assert few[0].acceptance == "unknown"
    assert "4 prompts are too few to tell" in few[0].sentences[0]


@pytest.mark.parametrize(
    ("over_baseline", "over_control", "acceptance", "sentence"),
    [
        ((1, 5), (1, 5), "gain", "This is a measurable gain in acceptance length."),
        ((-5, -1), (-5, -1), "loss", "This is a measurable loss in acceptance length."),
        (
            (1, 5),
            (-5, -1),
            "none",
            "measurably better than the baseline, but measurably worse than the control",
        ),
        (
            (1, 5),
            (-1, 5),
            "none",
            "measurably better than the baseline, but not distinguishable from the control",
        ),
        (
            (-1, 5),
            (-5, -1),
            "none",
            "not distinguishable from the baseline, but measurably worse than the control",
        ),
        (
            (-1, 5),
            (1, 5),
            "none",
            "not distinguishable from the baseline, but measurably better than the control",
        ),
        ((-1, 5), (-1, 5), "none", "both include zero"),
        ((1, 5), (math.nan, math.nan), "unknown", "Nothing was drafted"),
    ],
)
def test_sentence_says_what_both_comparisons_say(
    tmp_path, over_baseline, over_control, acceptance, sentence
):
    table = table_of(tmp_path, make_rows(4), samples=50)
    ours = (table["variant"] == "carryover") & (table["dataset"] == AVERAGE)
    for name, bounds in (("gain", over_baseline), ("gain_over_control", over_control)):
        for end, bound in zip(("low", "high"), bounds, strict=True):
            table.loc[ours, f"{name}_percent_{end}"] = float(bound)
    (found,) = verdicts(table, 0.95)
    assert found.acceptance == acceptance
    assert sentence in found.sentences[0]


def test_gain_is_only_claimed_where_it_holds_over_the_control_too(tmp_path):
    real = verdicts(table_of(tmp_path, make_rows(24, seed=3, gain=0.1)), 0.95)
    assert real[0].acceptance == "gain"
    assert headline(real) == "Carryover lengthened acceptance here"

    rows = make_rows(24, seed=3, gain=0.1)
    ours = {row["prompt_id"]: row for row in rows if row["variant"] == "carryover"}
    for row in rows:
        if row["variant"] == "control":  # the control gains as much
            same = ours[row["prompt_id"]]
            row |= {key: same[key] for key in ("rounds", "accepted", "accepted_per_position")}
    further = verdicts(table_of(tmp_path, rows), 0.95)
    assert further[0].acceptance == "none"
    assert "No measurable gain in acceptance length" in further[0].sentences[0]
    assert "control" in further[0].sentences[0]
    assert headline(further) == "No measurable gain from carryover here"


# --- ragged input ---------------------------------------------------------------------------


def broken(rows: list[dict], change) -> list[dict]:
    rows = [dict(row) for row in rows]
    result = change(rows)
    return rows if result is None else result


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: [r for r in rows if r["variant"] != "control"], "variant control"),
        (lambda rows: [r for r in rows if r["dataset"] != "code"], "data set code"),
        (lambda rows: rows[:-1], "same prompts of code"),
        (lambda rows: [*rows, rows[-1]], "twice"),
        (lambda rows: rows[0].pop("seconds") and None, "line 1: the key seconds is missing"),
        (lambda rows: rows[2].update(seconds=0.0), "line 3: seconds"),
        (lambda rows: rows[1].update(rounds=-1), "line 2: rounds"),
        (lambda rows: rows[1].update(accepted=rows[1]["accepted"] + 1), "line 2: accepted_per"),
        (lambda rows: rows[1].update(output_tokens=1), "line 2: output_ids"),
        (lambda rows: rows[0].update(variant="other"), "unknown variant 'other'"),
        (lambda rows: rows[3].update(target="Another"), "line 4: target is 'Another'"),
        (lambda rows: [], "no rows"),
    ],
)
def test_ragged_rows_name_the_file(tmp_path, change, message):
    path = write_rows(tmp_path / "bench.jsonl", broken(make_rows(2), change))
    with pytest.raises(CarryoverError) as caught:
        read(path)
    assert message in caught.value.reason
    assert str(path) in caught.value.reason
    assert caught.value.fix


def test_line_that_is_no_object_is_named(tmp_path):
    path = write_rows(tmp_path / "bench.jsonl", make_rows(1))
    path.write_text(path.read_text() + "\n[1]\n")
    with pytest.raises(CarryoverError, match=r"bench\.jsonl, line 10: not a JSON object"):
        read(path)


def test_half_written_line_names_its_line(tmp_path):
    path = write_rows(tmp_path / "bench.jsonl", make_rows(1))
    path.write_text(path.read_text()[:-40])
    with pytest.raises(CarryoverError, match=r"bench\.jsonl, line 8"):
        read(path)


def test_missing_benchmark_names_file_and_command(tmp_path):
    config = make_config(tmp_path)
    with pytest.raises(CarryoverError) as caught:
        run(config)
    assert str(Paths(config).benchmark(TARGET, DRAFTER, 0)) in caught.value.reason
    assert "carryover benchmark" in caught.value.fix


def test_benchmark_that_changed_since_its_manifest_is_refused(tmp_path):
    config = make_config(tmp_path)
    path = write_results(config, make_rows(2))
    write_rows(path, make_rows(1))
    with pytest.raises(CarryoverError, match="truncated"):
        run(config)
    assert not Paths(config).speedup_csv().exists()


# --- the paper ------------------------------------------------------------------------------


def test_paper_numbers_stand_beside_ours(tmp_path):
    table = table_of(tmp_path, make_rows(4))
    comparison = paper.compare(table, {DRAFTER: "dflash"})
    assert not comparison.isna().any().any()
    assert set(comparison["dataset"]) == {"chat", AVERAGE}  # the paper has no code set
    row = comparison[
        (comparison["dataset"] == "chat") & (comparison["paper_target"] == "Qwen3-4B")
    ].iloc[0]
    assert row["paper_dataset"] == "MT-Bench"
    assert (row["paper_acceptance_length_baseline"], row["paper_speedup_carryover"]) == (3.45, 3.72)
    assert row["paper_acceptance_length_gain_percent"] == pytest.approx(100 * (3.77 / 3.45 - 1))
    ours = pick(table, "carryover", "chat")
    assert row["acceptance_length_carryover"] == ours["acceptance_length"]
    assert row["acceptance_length_gain_percent_low"] == ours["gain_percent_low"]


def test_unprinted_temperature_has_no_comparison(tmp_path):
    table = table_of(tmp_path, make_rows(2)).assign(temperature=0.5)
    comparison = paper.compare(table, {DRAFTER: "dflash"})
    assert comparison.empty
    assert tuple(comparison.columns) == paper.COLUMNS  # so the file keeps its header


# --- figures, page, files -------------------------------------------------------------------


def test_svg_is_deterministic(tmp_path):
    table = table_of(tmp_path, make_rows(4))
    first = figures.to_svg(figures.acceptance_length(table, 0.95))
    second = figures.to_svg(figures.acceptance_length(table, 0.95))
    assert first == second
    assert "dc:date" not in first
    assert ">carryover<" in first  # text stays text


def test_bars_have_the_heights_of_the_table(tmp_path):
    table = table_of(tmp_path, make_rows(4))
    axis = figures.speedup(table, 0.95).axes[0]
    heights = [patch.get_height() for patch in axis.patches]
    expected = [
        pick(table, variant, dataset)["speedup"]
        for variant in ("baseline", "control", "carryover")
        for dataset in [*DATASETS, AVERAGE]
    ]
    assert heights == pytest.approx(expected)


def test_inlined_svgs_share_no_ids(tmp_path):
    table = table_of(tmp_path, make_rows(3))
    text = figures.to_svg(figures.acceptance_length(table, 0.95))
    one, two = html.inline_svg(text, "one"), html.inline_svg(text, "two")
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in (one, two)]
    assert ids[0] and not ids[0] & ids[1]
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', one))
    assert used and used <= ids[0]
    assert figures.INK not in one and "currentColor" in one


def test_metrics_of_a_resumed_run_count_once(tmp_path):
    records = [{"step": 10, "loss": 3.0}, {"step": 20, "loss": 2.0}, {"step": 20, "loss": 1.0}]
    write_rows(tmp_path / "metrics.jsonl", records)
    curve = read_curve(tmp_path, TARGET, DRAFTER, "baseline")
    assert curve is not None
    assert curve.train["loss"].tolist() == [3.0, 1.0]
    assert curve.held_out.empty


def test_record_without_a_step_is_named(tmp_path):
    write_rows(tmp_path / "metrics.jsonl", [{"step": 10, "loss": 3.0}, {"loss": 2.0}])
    with pytest.raises(CarryoverError, match=r"metrics\.jsonl, line 2: not a record with a step"):
        read_curve(tmp_path, TARGET, DRAFTER, "baseline")


def test_training_figure_draws_what_was_logged(tmp_path):
    config = make_config(tmp_path)
    write_results(config, make_rows(1))
    variants = ("baseline", "control", "carryover")
    folders = {v: Paths(config).training(TARGET, DRAFTER, v) for v in variants}
    curves = [read_curve(folder, TARGET, DRAFTER, v) for v, folder in folders.items()]
    axes = figures.training_loss([c for c in curves if c], baseline_steps=400).axes
    # Further training continues at step 400; carry on and off are the carryover run's alone.
    held_out = {line.get_label(): line.get_xdata()[0] for line in axes[2].lines}
    assert held_out == {"baseline": 50, "control": 450, "carryover": 450}
    last = {line.get_label(): line.get_ydata()[-1] for line in axes[3].lines}
    assert last == {"with carried rows": pytest.approx(1.9), "without": pytest.approx(1.6)}


def test_stage_times_sum_repeats_and_admit_missing_memory(tmp_path):
    config = make_config(tmp_path)
    write_timing(config, f"features/{TARGET}", "s\tmax_rss\n2.5\t100\n1.5\t300\n")
    write_timing(config, "prompts/evaluation", "s\tmax_rss\n0.2\t-\n")
    first, second = read_stage_times(config, [])
    assert (first.name, first.seconds, first.memory_mib) == ("prompts/evaluation", 0.2, None)
    assert (second.name, second.seconds, second.memory_mib) == (f"features/{TARGET}", 4.0, 300)
    assert second.stage_seconds is None


def test_stage_alone_is_timed_by_its_manifests(tmp_path):
    config = make_config(tmp_path)
    for dataset, seconds in zip(DATASETS, (20, 50), strict=True):
        path = Paths(config).evaluation(dataset)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}\n")
        subset = config.stage("evaluation_prompts")
        now = datetime.now(UTC)
        write_manifest(path, stage="prompts", config=subset, started=now, seed=0)
        manifest = json.loads((recorded := manifest_path(path)).read_text())
        ended = (now + timedelta(seconds=seconds)).isoformat(timespec="seconds")
        manifest["provenance"]["ended"] = ended
        recorded.write_text(json.dumps(manifest))
    write_timing(config, "prompts/evaluation", "s\tmax_rss\n9.0\t-\n")
    provenance, _ = read_provenance(config)
    (found,) = read_stage_times(config, provenance)
    assert found.seconds == 9.0
    assert found.stage_seconds == pytest.approx(50, abs=2)
    assert found.longer == found.stage_seconds


def test_jobs_have_the_names_of_the_workflows_benchmark_files(tmp_path):
    make_config(tmp_path)
    path = tmp_path / "config.yaml"
    raw = yaml.safe_load(path.read_text())
    raw["drafters"]["Public"] = raw["drafters"][DRAFTER] | {"initialize": "path:released"}
    path.write_text(yaml.safe_dump(raw))
    names = [job.name for job in jobs(load_config(path))]
    assert len(set(names)) == len(names)
    declared = []
    for path in (REPOSITORY / "workflow" / "rules").glob("*.smk"):
        declared += re.findall(r'"\{results\}/benchmarks/(\S+)\.tsv"', path.read_text())
    assert len(declared) == 11 and "report" in declared
    patterns = {name: re.sub(r"\\\{\\\{\w+\\\}\\\}", "[^/]+", re.escape(name)) for name in declared}
    hits = {name: {job for job in names if re.fullmatch(patterns[name], job)} for name in declared}
    assert hits.pop("report") == set()  # its own time is not known before it ends
    assert all(hits.values()), hits
    assert set().union(*hits.values()) == set(names)


def test_other_runs_in_the_same_folder_are_left_out(tmp_path):
    config = make_config(tmp_path)
    path = write_results(config, make_rows(2))
    root = Path(config.results_dir)
    alien = root / "test" / "targets" / "Alien"
    alien.mkdir(parents=True)
    write_manifest(alien, stage="target", config={}, started=datetime.now(UTC), seed=1)
    # The same target, but as another config made it.
    foreign = Paths(config).target(TARGET)
    foreign.mkdir(parents=True)
    write_manifest(foreign, stage="target", config={"x": 1}, started=datetime.now(UTC), seed=1)
    write_timing(config, "train/Alien/baseline", "s\tmax_rss\n2.5\t100\n")
    provenance, missing = read_provenance(config)
    assert [entry.output for entry in provenance] == [path.relative_to(root).as_posix()]
    assert f"targets/{TARGET}" in missing and "prompts/train.jsonl" in missing
    run(config)
    page = Paths(config).report().read_text()
    assert "Alien" not in page
    assert f"<code>targets/{TARGET}</code>" in page


@pytest.mark.parametrize(
    ("seconds", "text"), [(41.6, "42 s"), (185, "3 min 05 s"), (7620, "2 h 07 min")]
)
def test_duration(seconds, text):
    assert html.duration(seconds) == text


def test_run_writes_everything(tmp_path):
    config = make_config(tmp_path)
    write_results(config, make_rows(4))
    run(config)
    paths = Paths(config)
    table = pd.read_csv(paths.speedup_csv())
    assert tuple(table.columns[: len(COLUMNS)]) == COLUMNS
    assert set(table["variant"]) == set(VARIANTS)
    assert set(table["dataset"]) == {*DATASETS, AVERAGE}
    assert not table[list(COLUMNS)].isna().any().any()
    for name in ("acceptance_length", "speedup", "training_loss"):
        assert paths.figure(f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in paths.figure(f"{name}.svg").read_text()
    markdown = paths.speedup_md().read_text()
    assert f"## {TARGET}, {DRAFTER}, temperature 0: speedup" in markdown
    widths = {line.count("|") for line in markdown.splitlines() if line.startswith("|")}
    assert widths == {8}
    tables = paths.speedup_csv().parent
    manifest = read_manifest(tables, stage="report", config=config.stage("report"), verify=True)
    assert paths.comparison_csv().is_file()
    assert set(manifest["files"]) == {"speedup.csv", "speedup.md", "paper_comparison.csv"}

    first = paths.speedup_csv().read_bytes(), paths.figure("speedup.svg").read_bytes()
    run(config)
    assert first == (paths.speedup_csv().read_bytes(), paths.figure("speedup.svg").read_bytes())


def test_page_is_self_contained_and_tells_what_is_missing(tmp_path):
    config = make_config(tmp_path)
    write_results(config, make_rows(4), trained=("baseline", "control"))
    run(config)
    page = Paths(config).report().read_text()
    assert "<script" not in page and "@import" not in page and "<link" not in page
    for match in re.finditer(r'(?:src|href)="([^"]*)"|url\(([^)]*)\)', page):
        assert (match[1] or match[2]).startswith("#")
    gone = Paths(config).training(TARGET, DRAFTER, "carryover")
    assert gone.name in page
    assert Paths(config).training(TARGET, DRAFTER, "control").name not in page
    assert f"train/{TARGET}/{DRAFTER}/baseline" in page and "3 min 05 s" in page
    assert "bootstrap_samples: 200" in page
    assert f"benchmark/{TARGET}/{DRAFTER}/temperature-0.jsonl" in page  # in the provenance


def test_damaged_manifest_is_named(tmp_path):
    config = make_config(tmp_path)
    folder = Paths(config).responses(TARGET)
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text('{"stage": "responses"')
    with pytest.raises(CarryoverError, match=rf"responses/{TARGET}/manifest\.json is damaged"):
        read_provenance(config)


def test_figure_has_a_panel_for_every_case(tmp_path):
    table = table_of(tmp_path, make_rows(3))
    both = pd.concat([table, table.assign(temperature=1), table.assign(drafter="Other")])
    titles = [axis.get_title(loc="left") for axis in figures.acceptance_length(both, 0.95).axes]
    assert titles == [
        f"{TARGET}, {DRAFTER}, T = 0",
        f"{TARGET}, {DRAFTER}, T = 1",
        f"{TARGET}, Other, T = 0",
    ]


def test_page_without_any_training_metrics(tmp_path):
    config = make_config(tmp_path)
    write_results(config, make_rows(2), trained=())
    run(config)
    page = Paths(config).report().read_text()
    for variant in ("baseline", "control", "carryover"):
        assert Paths(config).training(TARGET, DRAFTER, variant).name in page
    assert "No training metrics were found" in page
