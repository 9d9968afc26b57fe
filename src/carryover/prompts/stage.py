"""Writes `prompts/train.jsonl` and `prompts/evaluation/DATASET.jsonl`, each with a manifest."""

import json
from datetime import UTC, datetime
from pathlib import Path

from carryover.artifacts import atomic_path, write_manifest
from carryover.config import Config
from carryover.errors import CarryoverError
from carryover.paths import Paths
from carryover.prompts.files import read_subset
from carryover.prompts.generate import evaluation_prompts, train_prompts
from carryover.prompts.hub import hub_evaluation_prompts, hub_train_prompts
from carryover.prompts.prompt import Prompt


def run(config: Config, *, only: str | None = None) -> None:
    """Writes the training set and every evaluation set that the config names.

    only: "train" or "evaluation" for one of the two, each of which has its own part of the config,
    so that other benchmark prompts repeat no training.

    Raises CarryoverError when a source is missing, too small or (hub) out of reach, or when an
    evaluation prompt is also a training prompt.
    """
    paths = Paths(config)
    started = datetime.now(UTC)
    # Only our own training prompts are compared with evaluation prompts; those of the hub are not
    # fetched for it.
    compare = config.prompts.train.source == "generated"
    train = _train(config) if compare or only != "evaluation" else []
    seen = {prompt.prompt for prompt in train}
    source = config.prompts.evaluation.source
    inputs = {"file": Path(source.removeprefix("path:"))} if source.startswith("path:") else {}
    written: list[tuple[Path, list[Prompt], dict[str, Path]]] = []
    if only != "evaluation":
        written.append((paths.train_prompts(), train, {}))
    for dataset in [] if only == "train" else config.prompts.evaluation.datasets:
        prompts = _evaluation(config, dataset)
        if compare:
            _check_held_out(dataset, prompts, seen)
        written.append((paths.evaluation(dataset), prompts, inputs if _from_file(dataset) else {}))
    for path, prompts, read in written:
        write_prompts(path, prompts)
        write_manifest(
            path,
            stage="prompts",
            config=config.stage(
                "train_prompts" if path == paths.train_prompts() else "evaluation_prompts"
            ),
            started=started,
            seed=config.seed,
            inputs=read,
            extra={"prompts": len(prompts)},
        )


def write_prompts(path: Path, prompts: list[Prompt]) -> None:
    """One JSON object a line: id, dataset, prompt, template, topic."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # ASCII only: a raw U+2028 or U+0085 in a prompt would end the line for str.splitlines().
    lines = (json.dumps(prompt.row()) + "\n" for prompt in prompts)
    with atomic_path(path) as temporary:
        temporary.write_text("".join(lines), "utf-8")


def _train(config: Config) -> list[Prompt]:
    settings = config.prompts.train
    build = hub_train_prompts if settings.source == "hub" else train_prompts
    return build(settings.count, config.seed)


def _evaluation(config: Config, dataset: str) -> list[Prompt]:
    settings = config.prompts.evaluation
    count = settings.prompts_per_dataset
    if settings.source == "hub":
        return hub_evaluation_prompts(dataset, count)
    if settings.source.startswith("path:") and _from_file(dataset):
        return read_subset(Path(settings.source.removeprefix("path:")), dataset, count)
    return evaluation_prompts(dataset, count, config.seed)


def _from_file(dataset: str) -> bool:
    """Whether `path:FILE` applies: HumanEval has its own package, and such files rarely hold it."""
    return dataset != "HumanEval"


def _check_held_out(dataset: str, prompts: list[Prompt], seen: set[str]) -> None:
    shared = next((prompt for prompt in prompts if prompt.prompt in seen), None)
    if shared is not None:
        raise CarryoverError(
            f"evaluation set '{dataset}': prompt {shared.id} is also a training prompt",
            "Use another prompts.evaluation.source",
        )
