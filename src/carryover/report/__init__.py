"""Stage `report`: benchmark rows to the table, the figures and the page.

It only reads what earlier stages wrote and computes no new measurement. Everything is written
atomically, the folder's manifest last.
"""

from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

from carryover.artifacts import atomic_path, read_manifest, write_manifest
from carryover.config import TRAINED_VARIANTS, Config
from carryover.errors import CarryoverError
from carryover.paths import Paths
from carryover.report import figures, html, paper
from carryover.report.curves import Curve, read_curve
from carryover.report.rows import read_rows
from carryover.report.stage_times import read_provenance, read_stage_times
from carryover.report.table import COLUMNS, summarize, to_csv, to_markdown

__all__ = ["COLUMNS", "run"]


def run(config: Config) -> None:
    """Write `tables/`, `figures/` and `report.html` from the benchmark files of the config.

    `tables/speedup.csv` has `COLUMNS` first. Raises CarryoverError, naming the file, when a
    benchmark file is missing, truncated, incomplete or from another config. Training metrics may
    be gone (they are no declared output); the page then says which.
    """
    started = datetime.now(UTC)
    paths = Paths(config)
    table, inputs = _read_benchmarks(config, paths)
    kinds = {name: drafter.kind for name, drafter in config.drafters.items()}
    comparison = paper.compare(table, kinds)
    curves, missing = _read_curves(config, paths)

    confidence = config.report.confidence
    _write(paths.speedup_csv(), to_csv(table))
    _write(paths.speedup_md(), to_markdown(table, confidence))
    _write(paths.comparison_csv(), to_csv(comparison))
    drawn = {
        "acceptance_length": figures.acceptance_length(table, confidence),
        "speedup": figures.speedup(table, confidence),
        "training_loss": figures.training_loss(curves, config.training.baseline.steps),
    }
    svgs = {
        name: figures.save(figure, paths.figure(f"{name}.png"), paths.figure(f"{name}.svg"))
        for name, figure in drawn.items()
    }
    provenance, unrecorded = read_provenance(config)
    page = html.render(
        config,
        table,
        comparison,
        svgs,
        missing,
        read_stage_times(config, provenance),
        provenance,
        unrecorded,
    )
    _write(paths.report(), page)
    write_manifest(
        paths.speedup_csv().parent,
        stage="report",
        config=config.stage("report"),
        started=started,
        seed=config.seed,
        inputs=inputs,
    )


def _read_benchmarks(config: Config, paths: Paths) -> tuple[pd.DataFrame, dict[str, Path]]:
    parts, inputs = [], {}
    datasets = list(config.prompts.evaluation.datasets)
    for target in config.targets:
        for drafter in config.drafters:
            for temperature in config.benchmark.temperatures:
                path = paths.benchmark(target, drafter, temperature)
                if not path.is_file():
                    raise CarryoverError(
                        f"the benchmark file {path} is missing",
                        f"Run `carryover benchmark --target {target} --drafter {drafter} "
                        f"--temperature {temperature:g}`",
                    )
                expected = config.stage("benchmark", target, drafter)
                read_manifest(path, stage="benchmark", config=expected)
                rows = read_rows(
                    path,
                    target=target,
                    drafter=drafter,
                    temperature=temperature,
                    datasets=datasets,
                )
                parts.append(
                    summarize(
                        rows,
                        datasets,
                        samples=config.report.bootstrap_samples,
                        confidence=config.report.confidence,
                        seed=config.seed,
                    )
                )
                inputs[f"{target}/{drafter}/{temperature:g}"] = path
    return pd.concat(parts, ignore_index=True), inputs


def _read_curves(config: Config, paths: Paths) -> tuple[list[Curve], list[str]]:
    curves, missing = [], []
    for target in config.targets:
        for drafter in config.drafters:
            for variant in TRAINED_VARIANTS:
                folder = paths.training(target, drafter, variant)
                curve = read_curve(folder, target, drafter, variant)
                if curve is None:
                    missing.append(folder.relative_to(paths.report().parent).as_posix())
                else:
                    curves.append(curve)
    return curves, missing


def _write(path: Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
