"""The page: one self-contained HTML file without scripts, fonts or pictures from elsewhere."""

import re
from datetime import UTC, datetime
from importlib import resources
from typing import Any

import jinja2
import pandas as pd
import yaml

from carryover.config import VARIANTS, Config
from carryover.report import paper
from carryover.report.figures import INK
from carryover.report.stage_times import Provenance, StageTime
from carryover.report.table import AVERAGE, percent, plain, sections, with_interval
from carryover.report.verdict import fewest_prompts, headline, judge, verdicts

PAPER_PROMPTS = 844
PAPER_OUTPUT_CAP = 2048
PAPER_PROPOSALS = 15


def render(
    config: Config,
    table: pd.DataFrame,
    comparison: pd.DataFrame,
    figures: dict[str, str],
    missing_curves: list[str],
    times: list[StageTime],
    provenance: list[Provenance],
    unrecorded: list[str],
) -> str:
    """Render the page.

    `figures`: name (`acceptance_length`, `speedup`, `training_loss`) to SVG text.
    `missing_curves`: the training folders whose metrics are gone; the page names them.
    `unrecorded`: the outputs that have no manifest of this config; the page names them too.
    """
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    source = resources.files("carryover.report") / "page.html.j2"
    found = verdicts(table, config.report.confidence)
    return environment.from_string(source.read_text(encoding="utf-8")).render(
        headline=headline(found),
        verdicts=found,
        confidence=f"{100 * config.report.confidence:g} %",
        samples=config.report.bootstrap_samples,
        fewest=fewest_prompts(config.report.confidence),
        results=_results(table, config.report.confidence),
        comparison=_comparison(comparison),
        identical=_identical(table),
        figures={name: inline_svg(text, name) for name, text in figures.items()},
        missing_curves=missing_curves,
        times=_times(times),
        provenance=provenance,
        unrecorded=unrecorded,
        facts=_facts(provenance, config),
        settings=yaml.safe_dump(
            config.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=88
        ),
        not_run=_not_run(config, table),
        other_tables={
            "Output tokens per second by concurrency (its Table 2)": _rows(
                paper.read_table("table2_throughput")
            ),
            "What is carried, and how it is told apart (its Table 3)": _rows(
                paper.read_table("table3_interface_ablation")
            ),
            "Re-converged positions per rejected round": _rows(
                paper.read_table("reconvergence_per_rejected_round")
            ),
        },
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def inline_svg(text: str, name: str) -> jinja2.utils.markupsafe.Markup:
    """A standalone SVG made part of the page.

    Its background becomes transparent and its ink the page's text colour (dark mode), its ids
    get a prefix (several figures share one page), and it scales with the page.
    """
    body = text[text.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = body.replace(INK, "currentColor").replace("#ffffff", "none")
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = body.replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    label = name.replace("_", " ")
    body = re.sub(
        r"<svg ([^>]*?)>",
        lambda found: (
            "<svg "
            + re.sub(r'\b(width|height)="[^"]*"\s*', "", found[1]).strip()
            + f' role="img" aria-label="{label}">'
        ),
        body,
        count=1,
        flags=re.DOTALL,
    )
    return jinja2.utils.markupsafe.Markup(body)


def _results(table: pd.DataFrame, confidence: float) -> list[dict[str, Any]]:
    results = []
    for target, drafter, temperature, part in sections(table):
        for title, name, gain in (
            ("Acceptance length τ", "acceptance_length", "gain"),
            ("Speedup over autoregressive decoding", "speedup", "speedup_gain"),
        ):
            rows = []
            for dataset, group in part.groupby("dataset", sort=False):
                by_variant = {row["variant"]: row for _, row in group.iterrows()}
                ours = by_variant["carryover"]
                rows.append(
                    {
                        "dataset": dataset,
                        "average": dataset == AVERAGE,
                        "prompts": ours["prompts"],
                        "values": [_split(by_variant[v], name, plain) for v in VARIANTS[1:]],
                        "gains": [
                            {
                                "text": _split(ours, f"{key}_percent", percent),
                                "verdict": judge(
                                    ours[f"{key}_percent_low"],
                                    ours[f"{key}_percent_high"],
                                    ours["prompts"],
                                    confidence,
                                ),
                            }
                            for key in (gain, f"{gain}_over_control")
                        ],
                    }
                )
            case = f"{target}, {drafter}, T = {temperature:g}"
            results.append({"case": case, "title": title, "rows": rows})
    return results


def _split(row: pd.Series, name: str, style: Any) -> tuple[str, str]:
    """(point, interval in brackets or nothing): the page sets the second smaller."""
    point, _, interval = with_interval(row, name, style, separator=" to ").partition(" [")
    return point, interval and f"[{interval}"


def _comparison(comparison: pd.DataFrame) -> list[dict[str, Any]]:
    if comparison.empty:
        return []
    blocks = []
    for keys, part in comparison.groupby(["target", "drafter", "temperature"], sort=False):
        others = list(dict.fromkeys(part["paper_target"]))
        rows = []
        for dataset, group in part.groupby("dataset", sort=False):
            first = group.iloc[0].copy()
            first["variant"] = "carryover"  # for with_interval
            theirs = group.set_index("paper_target")
            rows.append(
                {
                    "dataset": dataset,
                    "paper_dataset": first["paper_dataset"],
                    "average": dataset == AVERAGE,
                    "ours": _absolute(first, ""),
                    "gain": _split(first, "acceptance_length_gain_percent", percent),
                    "theirs": [
                        {
                            "absolute": _absolute(theirs.loc[other], "paper_"),
                            "gain": percent(
                                theirs.at[other, "paper_acceptance_length_gain_percent"]
                            ),
                        }
                        for other in others
                    ],
                    "speed": _absolute(first, "", "speedup"),
                    "speed_gain": _split(first, "speedup_gain_percent", percent),
                    "their_speed": [
                        {
                            "absolute": _absolute(theirs.loc[other], "paper_", "speedup"),
                            "gain": percent(theirs.at[other, "paper_speedup_gain_percent"]),
                        }
                        for other in others
                    ],
                }
            )
        case = f"{keys[0]}, {keys[1]}, T = {keys[2]:g}"
        blocks.append({"case": case, "target": keys[0], "others": others, "rows": rows})
    return blocks


def _absolute(row: pd.Series, prefix: str, name: str = "acceptance_length") -> str:
    before, after = row[f"{prefix}{name}_baseline"], row[f"{prefix}{name}_carryover"]
    return f"{plain(before)} → {plain(after)}"


def _identical(table: pd.DataFrame) -> list[dict[str, Any]]:
    greedy = table[table["identical_outputs"].notna()]
    blocks = []
    for target, drafter, _, part in sections(greedy):
        rows = [
            {
                "dataset": dataset,
                "average": dataset == AVERAGE,
                "prompts": group["prompts"].iloc[0],
                "shares": [
                    f"{100 * group.set_index('variant').at[variant, 'identical_outputs']:.0f} %"
                    for variant in VARIANTS[1:]
                ],
            }
            for dataset, group in part.groupby("dataset", sort=False)
        ]
        blocks.append({"case": f"{target}, {drafter}, T = 0", "rows": rows})
    return blocks


def _times(times: list[StageTime]) -> list[dict[str, Any]]:
    if not times:
        return []
    total = sum(entry.longer for entry in times) or 1.0
    longest = max(entry.longer for entry in times) or 1.0

    def shown(seconds: float | None) -> str:
        return "\N{EN DASH}" if seconds is None else duration(seconds)

    rows = [
        {
            "name": entry.name,
            "time": shown(entry.seconds),
            "stage": shown(entry.stage_seconds),
            "share": f"{100 * entry.longer / total:.0f} %",
            "width": f"{100 * entry.longer / longest:.1f}",
            "memory": "\N{EN DASH}"
            if entry.memory_mib is None
            else f"{entry.memory_mib / 1024:.1f} GiB",
        }
        for entry in sorted(times, key=lambda entry: -entry.longer)
    ]
    summed = {"time": (e.seconds for e in times), "stage": (e.stage_seconds for e in times)}
    sums = {key: duration(sum(filter(None, values))) for key, values in summed.items()}
    return [*rows, {"name": "sum", "share": "", "width": "", "memory": "", **sums}]


def duration(seconds: float) -> str:
    """`42 s`, `3 min 05 s`, `2 h 07 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _facts(provenance: list[Provenance], config: Config) -> dict[str, str]:
    """What holds for the whole run; a value that differs between stages is listed in full."""

    def distinct(values: list[str]) -> str:
        return "; ".join(dict.fromkeys(values)) or "no manifest was found"

    packages: dict[str, list[str]] = {}
    for entry in provenance:
        for package, version in entry.packages.items():
            packages.setdefault(package, []).append(version)
    versions = (f"{package} {' and '.join(dict.fromkeys(v))}" for package, v in packages.items())
    return {
        "Code": distinct([entry.commit for entry in provenance]),
        "Hardware": distinct([entry.hardware for entry in provenance]),
        "Versions": ", ".join(versions) or "no manifest was found",
        "Seed": distinct([str(entry.seed) for entry in provenance] or [str(config.seed)]),
        "First start": min((entry.started for entry in provenance), default="\N{EN DASH}"),
        "Last end": max((entry.ended for entry in provenance), default="\N{EN DASH}"),
    }


def _rows(table: pd.DataFrame) -> dict[str, Any]:
    text = table.astype(object).where(table.notna(), "")
    return {"columns": [c.replace("_", " ") for c in table.columns], "rows": text.values.tolist()}


def _not_run(config: Config, table: pd.DataFrame) -> list[str]:
    """What the paper did and this run did not, from the config."""
    notes = []
    printed = paper.read_table("table1_acceptance_speedup")
    others = [name for name in dict.fromkeys(printed["target"]) if name not in config.targets]
    if others:
        notes.append(
            f"The paper's targets {' and '.join(others)}: this run has {', '.join(config.targets)}."
        )
    kinds = {drafter.kind for drafter in config.drafters.values()}
    for kind, name in paper.DRAFTERS.items():
        if kind not in kinds:
            notes.append(f"The paper's {name} drafter.")
    for temperature in sorted(set(printed["temperature"])):
        if temperature not in config.benchmark.temperatures:
            notes.append(f"Temperature {temperature:g}.")
    covered = {paper.DATASETS.get(name) for name in config.prompts.evaluation.datasets}
    absent = [name for name in dict.fromkeys(printed["dataset"]) if name not in covered]
    absent = [name for name in absent if name != paper.DATASETS[AVERAGE]]
    if absent:
        notes.append(f"The paper's data sets {', '.join(absent)}.")
    if config.prompts.evaluation.source == "generated":
        notes.append(
            "The paper's evaluation prompts: those here are written by this project's generator "
            "(HumanEval is the public set), so equal names mean the same kind of task only."
        )
    prompts = int(table.loc[table["dataset"] == AVERAGE, "prompts"].max())
    if prompts < PAPER_PROMPTS:
        notes.append(f"The paper's {PAPER_PROMPTS} prompts: {prompts} were measured here.")
    if config.benchmark.max_tokens < PAPER_OUTPUT_CAP:
        notes.append(
            f"Outputs of up to {PAPER_OUTPUT_CAP} tokens: the cap was "
            f"{config.benchmark.max_tokens} here."
        )
    proposals = sorted({drafter.proposals for drafter in config.drafters.values()})
    if proposals != [PAPER_PROPOSALS]:
        notes.append(
            f"{PAPER_PROPOSALS} proposals a round: {', '.join(map(str, proposals))} here. Longer "
            "blocks reject more rows, which is what carryover feeds on."
        )
    notes += [
        "The paper's training scale (500K responses, 10 + 3 epochs): see the settings below.",
        "Online serving: the paper's average speedup and its concurrency sweep. Every number here "
        "is from offline decoding of one request at a time.",
        "Repeats: every prompt was decoded once per variant. The intervals cover the choice of "
        "prompts, not another training seed or another day of the machine.",
        "The analyses: recall at matched anchors, re-convergence, attention on carried rows, and "
        "the ablation of what is carried.",
    ]
    return notes
