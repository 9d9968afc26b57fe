"""The paper's own prompts, from the Hugging Face hub (paper, Settings and Table 5).

Training: UltraChat-200K and Magpie-Llama-3.1-Pro-300K-Filtered. Evaluation: the Red Hat
speculator benchmark, each file checked against the SHA-256 that the paper's revision has.
"""

import hashlib
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carryover.errors import CarryoverError
from carryover.prompts.files import BENCHMARK_NAMES, read_prompts
from carryover.prompts.prompt import Prompt


@dataclass(frozen=True)
class Source:
    """A training data set: `column` of `split` of the hub's data set `repository`."""

    name: str
    repository: str
    split: str
    column: str


TRAIN_SOURCES = (
    Source("ultrachat", "HuggingFaceH4/ultrachat_200k", "train_sft", "prompt"),
    Source("magpie", "Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered", "train", "instruction"),
)
BENCHMARK = "RedHatAI/speculator_benchmarks"
BENCHMARK_REVISION = "2ae86affa2cb97a972b7fc681dd51c04fbff083e"
# File name without .jsonl -> the first eight digits of its SHA-256.
BENCHMARK_SHA256 = {
    "HumanEval": "1d49078b",
    "math_reasoning": "b73b686f",
    "qa": "17c7c2fb",
    "question": "9db8ea46",
    "rag": "d1644a20",
    "summarization": "e7d29450",
    "tool_call": "0f9ae4d2",
    "translation": "bd273527",
}


def hub_train_prompts(count: int, seed: int) -> list[Prompt]:
    """`count` prompts drawn by `seed` from the training sources together, without repeats."""
    from datasets import load_dataset

    prompts: list[Prompt] = []
    for source in TRAIN_SOURCES:
        try:
            rows = load_dataset(source.repository, split=source.split)
        # datasets and its HTTP client raise many kinds; the cause is the same for the user.
        except Exception as error:
            raise _unreachable(source.repository, error) from error
        prompts += map_rows(source, rows)
    return draw(prompts, count, seed)


def map_rows(source: Source, rows: Iterable[Mapping[str, Any]]) -> list[Prompt]:
    """The source's rows as prompts, id `NAME-ROW`; empty prompts are left out."""
    prompts = []
    for number, row in enumerate(rows):
        if source.column not in row:
            raise CarryoverError(
                f"{source.repository}, row {number}: no column '{source.column}'",
                "The data set has changed; see TRAIN_SOURCES in src/carryover/prompts/hub.py",
            )
        text = row[source.column]
        if isinstance(text, str) and text.strip():
            prompts.append(Prompt(f"{source.name}-{number:06d}", source.name, text))
    return prompts


def draw(prompts: list[Prompt], count: int, seed: int) -> list[Prompt]:
    """`count` of the prompts in random order, no text twice."""
    unique = list({prompt.prompt: prompt for prompt in reversed(prompts)}.values())[::-1]
    if count > len(unique):
        raise CarryoverError(
            f"prompts.train.count: {count} wanted, the hub's sources hold {len(unique)}", "Lower it"
        )
    return random.Random(seed).sample(unique, count)


def hub_evaluation_prompts(dataset: str, count: int) -> list[Prompt]:
    """The first `count` prompts of one file of the Red Hat speculator benchmark."""
    from huggingface_hub import hf_hub_download

    name = BENCHMARK_NAMES.get(dataset, dataset)
    if name not in BENCHMARK_SHA256:
        raise CarryoverError(
            f"prompts.evaluation.datasets: '{dataset}' is not in {BENCHMARK}",
            f"Use some of {', '.join(BENCHMARK_SHA256)}",
        )
    try:
        path = hf_hub_download(
            BENCHMARK, f"{name}.jsonl", repo_type="dataset", revision=BENCHMARK_REVISION
        )
    except Exception as error:
        raise _unreachable(f"{BENCHMARK}/{name}.jsonl", error) from error
    return read_benchmark_file(Path(path), dataset, count, BENCHMARK_SHA256[name])


def read_benchmark_file(path: Path, dataset: str, count: int, sha256: str) -> list[Prompt]:
    """The file's first `count` prompts, once its SHA-256 begins with `sha256`."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if not found.startswith(sha256):
        raise CarryoverError(
            f"{path}: SHA-256 is {found[:8]}..., the paper's file has {sha256}...",
            "Delete it from the hub's cache and download it again",
        )
    prompts = read_prompts(path, dataset)
    return prompts[:count]


def _unreachable(what: str, error: Exception) -> CarryoverError:
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return CarryoverError(
        f"{what}: cannot be loaded ({type(error).__name__}: {first_line[:160]})",
        "Check the connection to the Hugging Face hub, or set the source to generated",
    )
