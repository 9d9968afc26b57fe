"""Where the time goes: what Snakemake and the manifests recorded about each stage."""

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from carryover.artifacts import MANIFEST
from carryover.errors import CarryoverError


@dataclass(frozen=True)
class StageTime:
    """Wall time in seconds and peak memory (RSS) in MiB of one job; None where not recorded."""

    name: str
    seconds: float
    memory_mib: float | None


@dataclass(frozen=True)
class Provenance:
    """Who made one output, and when (UTC, ISO 8601)."""

    stage: str
    output: str
    started: str
    ended: str
    seconds: float
    commit: str
    hardware: str
    seed: int
    packages: dict[str, str]


def read_stage_times(results: Path) -> list[StageTime]:
    """Read Snakemake's benchmark tables, `benchmarks/**/*.tsv`, in the order of their names.

    A job that Snakemake repeated has several lines: their sum is its time. Snakemake writes `-`
    or NA for a memory that it had no time to sample.
    """
    folder = results / "benchmarks"
    times = []
    for path in sorted(folder.rglob("*.tsv")):
        table = pd.read_csv(path, sep="\t", na_values=["-", "NA"])
        if "s" not in table or table["s"].isna().all():
            continue
        memory = table["max_rss"].max() if "max_rss" in table else float("nan")
        times.append(
            StageTime(
                name=path.relative_to(folder).with_suffix("").as_posix(),
                seconds=float(table["s"].sum()),
                memory_mib=None if pd.isna(memory) else float(memory),
            )
        )
    return times


def read_provenance(results: Path) -> list[Provenance]:
    """Read the manifests of all earlier stages, in the order in which these started.

    Raises CarryoverError, naming the file, for a manifest that cannot be read.
    """
    found = []
    for path in results.rglob("*manifest.json"):
        # Checkpoints are many and no result of their own; their export has its own manifest.
        if path.relative_to(results).parts[0] == "training":
            continue
        try:
            entry = _entry(json.loads(path.read_text(encoding="utf-8")), path, results)
        except (ValueError, KeyError, TypeError):
            raise CarryoverError(
                f"{path} is damaged", "remove what it describes and run that stage again"
            ) from None
        if entry.stage != "report":  # an older run of this stage, about to be replaced
            found.append(entry)
    return sorted(found, key=lambda entry: (entry.started, entry.output))


def _entry(manifest: dict[str, Any], path: Path, results: Path) -> Provenance:
    facts = manifest["provenance"]
    output = (
        path.parent
        if path.name == MANIFEST
        else path.with_name(path.name.removesuffix(f".{MANIFEST}"))
    )
    duration = datetime.fromisoformat(facts["ended"]) - datetime.fromisoformat(facts["started"])
    return Provenance(
        stage=manifest["stage"],
        output=output.relative_to(results).as_posix(),
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
