"""Measure all variants on the same prompts, each in an engine process of its own.

Interleaved (the default), the engines are all alive and one prompt goes to each in turn, in an
order that rotates from prompt to prompt: what the machine does meanwhile (other programs, clock
rates) hits all variants alike and cancels in their ratios. Otherwise one variant follows another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from carryover.artifacts import (
    atomic_path,
    manifest_path,
    read_manifest,
    write_manifest,
)
from carryover.benchmark.engine import engine_arguments
from carryover.benchmark.journal import Journal, Row
from carryover.config import TRAINED_VARIANTS, VARIANTS, Config
from carryover.engine_process import EngineProcess, Message, Remedies
from carryover.errors import CarryoverError
from carryover.identity import result_key, stage_code
from carryover.jsonl import read_rows
from carryover.paths import Paths
from carryover.progress import Progress
from carryover.prompts.render import render
from carryover.seeds import derive_seed
from carryover.serving_env import vllm_environment
from carryover.target import load_tokenizer

REMEDIES = Remedies(
    no_memory="If memory is short, lower benchmark.kv_cache_gib, set benchmark.interleave: false "
    "(one engine at a time) or stop other programs.",
    small_cache="Raise benchmark.kv_cache_gib, or lower benchmark.max_model_len.",
)


@dataclass(frozen=True)
class Task:
    """One evaluation prompt."""

    dataset: str
    prompt_id: str
    prompt_ids: list[int]
    sampling: Message


@dataclass(frozen=True)
class Cell:
    """One measurement: a prompt by a variant, `order`-th among the variants on that prompt."""

    task: Task
    variant: str
    order: int

    @property
    def key(self) -> tuple[str, str, str]:
        return self.variant, self.task.dataset, self.task.prompt_id


def run(config: Config, *, target: str, drafter: str, temperature: float) -> None:
    """Write `benchmark/{target}/{drafter}/temperature-{temperature}.jsonl` and its manifest.

    One row per variant, data set and prompt (docs/architecture.md). What an interrupted run has
    measured is kept. Raises CarryoverError when an input is missing or of another config, a prompt
    does not fit `benchmark.max_model_len`, or an engine fails.
    """
    started = datetime.now(UTC)
    paths = Paths(config)
    subset = config.stage("benchmark", target=target, drafter=drafter)
    inputs = _inputs(config, target, drafter)
    tasks = _tasks(config, target, temperature)

    output = paths.benchmark(target, drafter, temperature)
    decides = {**subset, "temperature": temperature}
    journal = Journal(output, result_key(decides, inputs, stage_code("benchmark")))
    groups = _groups(tasks, interleave=config.benchmark.interleave)
    done = {(row["variant"], row["dataset"], row["prompt_id"]) for row in journal.rows}
    missing = [group for group in groups if any(cell.key not in done for cell in group)]
    resumed = len(journal.rows)
    engines: dict[str, Message] = {}
    facts = {"target": target, "drafter": drafter, "temperature": temperature}
    with Progress(
        total=sum(map(len, groups)),
        unit="generation",
        desc=f"benchmark {target} {drafter} T={temperature:g}",
        done=sum(len(group) for group in groups if group not in missing),
    ) as progress:
        for batch in _by_engines(missing, interleave=config.benchmark.interleave):
            with ExitStack() as stack:
                with progress.waiting("starting engines"):
                    running = stack.enter_context(
                        _Engines(config, target, drafter, output, batch[0])
                    )
                    running.warm_up(tasks[: config.benchmark.warmup_prompts])
                for group in batch:
                    rows = [facts | running.measure(cell) for cell in group]
                    journal.append(rows)
                    progress.update(len(rows), dataset=group[0].task.dataset)
                engines |= running.facts
    _write(output, journal.rows, groups)
    write_manifest(
        output,
        stage="benchmark",
        config=subset,
        started=started,
        seed=config.seed,
        inputs=inputs,
        extra={
            "temperature": temperature,
            "prompts": len(tasks),
            "engines": engines,
            "rows_of_an_earlier_run": resumed,
        },
    )
    journal.remove()


class _Engines:
    """The engine processes of the variants in one group, all alive while this is entered."""

    def __init__(
        self, config: Config, target: str, drafter: str, output: Path, group: Sequence[Cell]
    ) -> None:
        self._variants = sorted({cell.variant for cell in group}, key=VARIANTS.index)
        self._config, self._target, self._drafter = config, target, drafter
        self._output = output
        self._stack = ExitStack()
        self._processes: dict[str, EngineProcess] = {}
        self.facts: dict[str, Message] = {}
        """Of each variant: startup_seconds, peak_rss_mib."""

    def __enter__(self) -> _Engines:
        try:
            # One after another: a start is heavy on the CPU and for a moment on memory.
            for variant in self._variants:
                self._start(variant)
        except BaseException as error:
            self._stack.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def warm_up(self, tasks: Sequence[Task]) -> None:
        """Let every engine answer `tasks`, uncounted."""
        for process in self._processes.values():
            for task in tasks:
                _generate(process, task)

    def measure(self, cell: Cell) -> Row:
        """Return the row of one cell, without the columns that all rows share."""
        answer = _generate(self._processes[cell.variant], cell.task)
        self.facts[cell.variant]["peak_rss_mib"] = answer["peak_rss_mib"]
        tokens = len(answer["output_ids"])
        if cell.variant == "autoregressive":
            # Each token after the first (which the prefill yields) takes a forward pass: tau = 1.
            answer |= {"rounds": tokens - 1, "accepted": 0, "accepted_per_position": []}
        return {
            "variant": cell.variant,
            "dataset": cell.task.dataset,
            "prompt_id": cell.task.prompt_id,
            "prompt_tokens": len(cell.task.prompt_ids),
            "output_tokens": tokens,
            "seconds": answer["seconds"],
            "rounds": answer["rounds"],
            "accepted": answer["accepted"],
            "accepted_per_position": answer["accepted_per_position"],
            "output_ids": answer["output_ids"],
            "finish_reason": answer["finish_reason"],
            "order": cell.order,
        }

    def _start(self, variant: str) -> None:
        folder = (
            None
            if variant == "autoregressive"
            else Paths(self._config).drafter(self._target, self._drafter, variant)
        )
        process = self._stack.enter_context(
            EngineProcess(
                "carryover.benchmark.worker",
                vllm_environment(),
                self._output.with_name(f"{self._output.stem}.{variant}.log"),
                variant,
                REMEDIES,
            )
        )
        arguments = engine_arguments(self._config, self._target, self._drafter, folder)
        process.send({"engine": arguments})
        self.facts[variant] = process.receive()
        self._processes[variant] = process


def _generate(process: EngineProcess, task: Task) -> Message:
    process.send({"prompt_ids": task.prompt_ids, "sampling": task.sampling})
    return process.receive()


def _tasks(config: Config, target: str, temperature: float) -> list[Task]:
    paths, settings = Paths(config), config.benchmark
    tokenizer = load_tokenizer(paths.target(target))
    tasks = []
    for dataset in config.prompts.evaluation.datasets:
        rows = read_rows(paths.evaluation(dataset), "Run `carryover prompts` again.")
        for row in rows[: settings.prompts]:
            ids = render(tokenizer, row["prompt"], thinking=config.targets[target].thinking)
            if len(ids) + settings.max_tokens > settings.max_model_len:
                raise CarryoverError(
                    f"prompt {row['id']} of {dataset} has {len(ids)} tokens, which leaves fewer "
                    f"than benchmark.max_tokens ({settings.max_tokens}) of "
                    f"benchmark.max_model_len ({settings.max_model_len})",
                    "Raise benchmark.max_model_len.",
                )
            sampling: Message = {"temperature": temperature, "max_tokens": settings.max_tokens}
            if temperature > 0:
                sampling["seed"] = derive_seed(config.seed, "benchmark", row["id"])
            tasks.append(Task(dataset, row["id"], ids, sampling))
    return tasks


def _groups(tasks: Sequence[Task], *, interleave: bool) -> list[list[Cell]]:
    """Return the cells in the order of measurement, grouped by what is kept or redone together."""
    if not interleave:
        return [[Cell(task, variant, 0)] for variant in VARIANTS for task in tasks]
    groups = []
    for number, task in enumerate(tasks):
        shift = number % len(VARIANTS)
        rotated = VARIANTS[shift:] + VARIANTS[:shift]
        groups.append([Cell(task, variant, order) for order, variant in enumerate(rotated)])
    return groups


def _by_engines(groups: list[list[Cell]], *, interleave: bool) -> Iterator[list[list[Cell]]]:
    """Yield the groups that are measured by the same engines."""
    if interleave:
        if groups:
            yield groups
        return
    for variant in VARIANTS:
        own = [group for group in groups if group[0].variant == variant]
        if own:
            yield own


def _inputs(config: Config, target: str, drafter: str) -> dict[str, Path]:
    """Return all inputs by name, checked against the config."""
    paths = Paths(config)
    read_manifest(
        paths.target(target), stage="target", config=config.stage("target", target=target)
    )
    inputs = {"target": paths.target(target)}
    for dataset in config.prompts.evaluation.datasets:
        path = paths.evaluation(dataset)
        read_manifest(path, stage="prompts", config=config.stage("evaluation_prompts"))
        inputs[dataset] = path
    for variant in TRAINED_VARIANTS:
        folder = paths.drafter(target, drafter, variant)
        expected = config.stage("export", target=target, drafter=drafter, variant=variant)
        read_manifest(folder, stage="export", config=expected)
        inputs[variant] = folder
    return inputs


def _write(output: Path, rows: Sequence[Row], groups: Sequence[Sequence[Cell]]) -> None:
    """Write the rows in the order of measurement; of one measured twice, the later."""
    by_key = {(row["variant"], row["dataset"], row["prompt_id"]): row for row in rows}
    manifest_path(output).unlink(missing_ok=True)
    with atomic_path(output) as temporary:
        lines = (json.dumps(by_key[cell.key]) + "\n" for group in groups for cell in group)
        temporary.write_text("".join(lines), encoding="utf-8")
