"""Where the time goes: what Snakemake and the manifests recorded about each job of a config.

The jobs follow from the config, as in workflow/rules: other runs may lie in the same folder.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from carryover.artifacts import config_hash, manifest_path
from carryover.config import TRAINED_VARIANTS, Config
from carryover.errors import CarryoverError
from carryover.paths import Paths


@dataclass(frozen=True)
class Job:
    """One job before this stage. `name`: its Snakemake benchmark file is `benchmarks/NAME.tsv`.

    `outputs` are those that have a manifest; training has none (its export does).
    """

    name: str
    stage: str
    subset: dict[str, Any]
    outputs: tuple[Path, ...]


@dataclass(frozen=True)
class StageTime:
    """What was recorded about the last attempt of one job; None where nothing was.

    seconds: of the job, as Snakemake measured it. stage_seconds: from start to end as in the
    manifests of its outputs. memory_mib: peak memory (RSS) of the job.
    """

    name: str
    seconds: float | None
    stage_seconds: float | None
    memory_mib: float | None

    @property
    def longer(self) -> float:
        return max(self.seconds or 0.0, self.stage_seconds or 0.0)


@dataclass(frozen=True)
class Provenance:
    """Who made one output, and when (UTC, ISO 8601)."""

    job: str
    stage: str
    output: str
    started: str
    ended: str
    seconds: float
    commit: str
    hardware: str
    seed: int
    packages: dict[str, str]


def jobs(config: Config) -> Iterator[Job]:
    """All jobs of the config but this stage's own, in the order of the workflow."""
    paths = Paths(config)
    for target in config.targets:
        subset = config.stage("target", target)
        yield Job(f"target/{target}", "target", subset, (paths.target(target),))
    subset = config.stage("train_prompts")
    yield Job("prompts/train", "prompts", subset, (paths.train_prompts(),))
    sets = tuple(paths.evaluation(name) for name in config.prompts.evaluation.datasets)
    yield Job("prompts/evaluation", "prompts", config.stage("evaluation_prompts"), sets)
    for target in config.targets:
        stages = [("responses", paths.responses(target))]
        if config.training.features == "cached":
            stages.append(("features", paths.features(target)))
        for stage, output in stages:
            yield Job(f"{stage}/{target}", stage, config.stage(stage, target), (output,))
        for drafter, wanted in config.drafters.items():
            if wanted.released:
                subset = config.stage("released", target, drafter)
                output = paths.released(target, drafter)
                yield Job(f"released/{target}/{drafter}", "released", subset, (output,))
            for variant in TRAINED_VARIANTS:
                name = f"{target}/{drafter}/{variant}"
                subset = config.stage("train", target, drafter, variant)
                yield Job(f"train/{name}", "train", subset, ())
                output = paths.drafter(target, drafter, variant)
                subset = config.stage("export", target, drafter, variant)
                yield Job(f"export/{name}", "export", subset, (output,))
            for temperature in config.benchmark.temperatures:
                output = paths.benchmark(target, drafter, temperature)
                subset = config.stage("benchmark", target, drafter)
                name = f"benchmark/{target}/{drafter}/{output.stem}"
                yield Job(name, "benchmark", subset, (output,))


def read_stage_times(config: Config, provenance: list[Provenance]) -> list[StageTime]:
    """The times of the jobs of the config, those of which something is recorded.

    A job that Snakemake repeated has several lines in its file: their sum is its time. Snakemake
    writes `-` or NA for a memory that it had no time to sample.
    """
    root = Paths(config).root
    times = []
    for job in jobs(config):
        seconds, memory = _measured(root / "benchmarks" / f"{job.name}.tsv")
        made = [entry for entry in provenance if entry.job == job.name]
        stage_seconds = None
        if made:
            # One run of the stage makes all outputs of a job.
            start = min(datetime.fromisoformat(entry.started) for entry in made)
            end = max(datetime.fromisoformat(entry.ended) for entry in made)
            stage_seconds = (end - start).total_seconds()
        if seconds is not None or stage_seconds is not None:
            times.append(StageTime(job.name, seconds, stage_seconds, memory))
    return times


def read_provenance(config: Config) -> tuple[list[Provenance], list[str]]:
    """The manifests of all earlier stages, in the order in which these started.

    Also returns the outputs, relative to `results_dir`, that have no manifest of this config.
    Raises CarryoverError, naming the file, for a manifest that cannot be read.
    """
    root = Paths(config).root
    found, missing = [], []
    for job in jobs(config):
        for output in job.outputs:
            path = manifest_path(output)
            name = output.relative_to(root).as_posix()
            if not path.is_file():
                missing.append(name)
                continue
            try:
                manifest = json.loads(path.read_text(encoding="utf-8"))
                ours = manifest["config_hash"] == config_hash(job.subset)
                entry = _entry(manifest, job, name)
            except (ValueError, KeyError, TypeError):
                raise CarryoverError(
                    f"{path} is damaged", "remove what it describes and run that stage again"
                ) from None
            if ours:
                found.append(entry)
            else:
                missing.append(name)
    return sorted(found, key=lambda entry: (entry.started, entry.output)), missing


def _measured(path: Path) -> tuple[float | None, float | None]:
    """Seconds and peak MiB out of one of Snakemake's benchmark files."""
    if not path.is_file():
        return None, None
    table = pd.read_csv(path, sep="\t", na_values=["-", "NA"])
    if "s" not in table or table["s"].isna().all():
        return None, None
    memory = table["max_rss"].max() if "max_rss" in table else float("nan")
    return float(table["s"].sum()), None if pd.isna(memory) else float(memory)


def _entry(manifest: dict[str, Any], job: Job, output: str) -> Provenance:
    facts = manifest["provenance"]
    duration = datetime.fromisoformat(facts["ended"]) - datetime.fromisoformat(facts["started"])
    return Provenance(
        job=job.name,
        stage=job.stage,
        output=output,
        started=facts["started"],
        ended=facts["ended"],
        seconds=duration.total_seconds(),
        commit=_commit(facts["git"]),
        hardware=_hardware(facts["hardware"]),
        seed=facts["seed"],
        packages=facts["packages"],
    )


def _commit(git: dict | None) -> str:
    if not git or not git["commit"]:
        return "not in a git checkout"
    return git["commit"][:12] + (" with uncommitted changes" if git["dirty"] else "")


def _hardware(facts: dict) -> str:
    text = f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']:g} GiB"
    return "; ".join([text, *facts["gpus"]])
