"""Stage `responses`: the target answers every training prompt.

Writes `responses/{target}/shard-00000.jsonl ...`, one object a line and prompt: `prompt_id`,
`dataset`, `prompt_ids`, `response_ids` (the end-of-sequence id included, where one was generated)
and `finish_reason` (`stop` or `length`). Shard k holds the prompts from k * shard_size on.

Finished shards are listed with their hash in `shards.json`, so that a run that was interrupted
goes on with the rest, and a shard that was cut short is written again. The manifest comes last.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from carryover.artifacts import atomic_path, read_manifest, write_manifest
from carryover.config import Config
from carryover.engine_process import EngineProcess, Message, Remedies
from carryover.errors import CarryoverError
from carryover.identity import result_key, stage_code
from carryover.jsonl import read_rows
from carryover.ledger import Ledger
from carryover.paths import Paths
from carryover.progress import Progress
from carryover.prompts.render import render
from carryover.seeds import derive_seed
from carryover.serving_env import vllm_environment
from carryover.target import DTYPES, load_tokenizer

_KV_BLOCK = 128  # tokens a KV-cache block, vLLM's CPU default
_REMEDIES = Remedies(
    no_memory="If memory is short, lower responses.max_num_seqs or stop other programs.",
    small_cache="Lower responses.max_model_len.",
)


@dataclass(frozen=True)
class Question:
    """A rendered training prompt and the shard that its answer belongs to."""

    prompt_id: str
    dataset: str
    prompt_ids: list[int]
    max_tokens: int
    shard: int


def run(config: Config, *, target: str) -> None:
    """Answer every training prompt that is not answered yet, then write the manifest.

    A prompt that leaves no room for an answer in `responses.max_model_len` is left out; the
    manifest counts them. Raises CarryoverError when an input is missing or an engine fails.
    """
    started = datetime.now(UTC)
    paths = Paths(config)
    model = paths.target(target)
    subset = config.stage("responses", target=target)
    read_manifest(model, stage="target", config=config.stage("target", target=target))
    read_manifest(paths.train_prompts(), stage="prompts", config=config.stage("train_prompts"))

    questions, left_out = _questions(config, target)
    folder = paths.responses(target)
    inputs = {"target": model, "prompts": paths.train_prompts()}
    (folder / "manifest.json").unlink(missing_ok=True)
    shards = _Shards(folder, questions, key=result_key(subset, inputs, stage_code("responses")))
    missing = [question for question in questions if question.shard not in shards]
    if missing:
        budget = sum(question.max_tokens for question in missing)
        with (
            Progress(total=budget, unit="token", desc=f"responses {target}") as progress,
            closing(_answers(config, target, missing)) as messages,
        ):
            answered = 0
            for message in messages:
                if "tokens" in message:
                    progress.update(message["tokens"], prompts=f"{answered}/{len(missing)}")
                else:
                    answered += 1
                    question = missing[int(message["id"])]
                    shards.add(question, message["response_ids"], message["finish_reason"])
                    # A response that ends early never uses the rest of its budget.
                    progress.total -= question.max_tokens - len(message["response_ids"])
    write_manifest(
        folder,
        stage="responses",
        config=subset,
        started=started,
        seed=config.seed,
        inputs=inputs,
        extra={"responses": len(questions), "prompts_without_room": left_out},
    )


def read_responses(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of all shards, in the order of the prompts."""
    rebuild = f"Delete {folder} and run `carryover responses` again."
    return [
        row for path in sorted(folder.glob("shard-*.jsonl")) for row in read_rows(path, rebuild)
    ]


def _questions(config: Config, target: str) -> tuple[list[Question], int]:
    paths, settings = Paths(config), config.responses
    tokenizer = load_tokenizer(paths.target(target))
    rows = read_rows(paths.train_prompts(), "Run `carryover prompts` again.")
    questions = []
    for index, row in enumerate(rows):
        ids = render(tokenizer, row["prompt"], thinking=config.targets[target].thinking)
        room = settings.max_model_len - len(ids)
        if room > 0:
            questions.append(
                Question(
                    prompt_id=row["id"],
                    dataset=row["dataset"],
                    prompt_ids=ids,
                    max_tokens=min(settings.max_tokens, room),
                    shard=index // settings.shard_size,
                )
            )
    if not questions:
        raise CarryoverError(
            f"none of the {len(rows)} training prompts leaves room for an answer",
            "Raise responses.max_model_len.",
        )
    return questions, len(rows) - len(questions)


class _Shards:
    """Collects answers and writes each shard when its last one is there."""

    def __init__(self, folder: Path, questions: Sequence[Question], key: str) -> None:
        self._folder = folder
        self._ledger = Ledger(folder, key, "shard-*.jsonl")
        self._lines: dict[int, dict[str, str]] = {}
        self._order: dict[int, list[str]] = {}
        for question in questions:
            self._order.setdefault(question.shard, []).append(question.prompt_id)

    def __contains__(self, shard: int) -> bool:
        return _shard_name(shard) in self._ledger

    def add(self, question: Question, response_ids: list[int], finish_reason: str) -> None:
        lines = self._lines.setdefault(question.shard, {})
        lines[question.prompt_id] = json.dumps(
            {
                "prompt_id": question.prompt_id,
                "dataset": question.dataset,
                "prompt_ids": question.prompt_ids,
                "response_ids": response_ids,
                "finish_reason": finish_reason,
            }
        )
        order = self._order[question.shard]
        if len(lines) == len(order):
            name = _shard_name(question.shard)
            with atomic_path(self._folder / name) as temporary:
                temporary.write_text("".join(lines[i] + "\n" for i in order), encoding="utf-8")
            self._ledger.add(name)
            del self._lines[question.shard]


def _shard_name(shard: int) -> str:
    return f"shard-{shard:05d}.jsonl"


def _answers(
    config: Config, target: str, questions: Sequence[Question]
) -> Generator[Message, None, None]:
    """Start an engine, hand the questions to it and yield what it reports.

    It gets a new question for each answer, so that the first shard is finished first. One engine:
    two that share the cores gave fewer tokens a second (docs/performance.md).
    """
    settings = config.responses
    # A few more than are decoded together: a free slot is filled at once.
    window = settings.max_num_seqs + max(8, settings.max_num_seqs // 8)
    pending = deque(enumerate(questions))

    def hand_out(count: int) -> None:
        for _ in range(min(count, len(pending))):
            number, question = pending.popleft()
            engine.send(
                {
                    "id": str(number),
                    "prompt_ids": question.prompt_ids,
                    "max_tokens": question.max_tokens,
                    "seed": _seed(config, question),
                }
            )
            if not pending:
                engine.send({"end": True})

    log = Paths(config).responses(target).parent / f"{target}.engine.log"
    with EngineProcess(
        "carryover.generation", vllm_environment(), log, "responses", _REMEDIES
    ) as engine:
        engine.send(_setup(config, target, questions))
        while "end" not in (message := engine.receive()):
            if "ready" in message:
                hand_out(window)
                continue
            yield message
            if "id" in message:
                hand_out(1)


def _setup(config: Config, target: str, questions: Sequence[Question]) -> Message:
    settings = config.responses
    on_cpu = not torch.cuda.is_available()
    engine: dict[str, Any] = {
        "model": str(Paths(config).target(target)),
        "dtype": config.targets[target].dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "enforce_eager": on_cpu,
        "enable_prefix_caching": False,
        # vLLM's neutral defaults, not the sampling defaults that the model's authors ship.
        "generation_config": "vllm",
        "seed": config.seed,
    }
    if on_cpu:
        engine["kv_cache_memory_bytes"] = kv_cache_bytes(
            Paths(config).target(target),
            config.targets[target].dtype,
            longest=max(len(q.prompt_ids) + q.max_tokens for q in questions),
            sequences=min(settings.max_num_seqs, len(questions)),
            max_model_len=settings.max_model_len,
        )
    sampling = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
    }
    return {"engine": engine, "sampling": sampling}


def kv_cache_bytes(
    folder: Path, dtype: str, *, longest: int, sequences: int, max_model_len: int
) -> int:
    """Return the KV-cache size that holds `sequences` sequences of `longest` tokens at once.

    At least one sequence of `max_model_len` tokens, without which vLLM refuses to start.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    numbers = 0
    for layer in config.per_layer_config:  # Gemma 4's layers differ in their heads
        head_dim = getattr(layer, "head_dim", None)
        head_dim = head_dim or layer.hidden_size // layer.num_attention_heads
        numbers += 2 * layer.num_key_value_heads * head_dim  # K and V

    def blocks(tokens: int) -> int:
        return -(-tokens // _KV_BLOCK)

    # One block more: vLLM keeps the first one for itself.
    needed = 1 + max(sequences * blocks(longest), blocks(max_model_len))
    return needed * _KV_BLOCK * numbers * DTYPES[dtype].itemsize


def _seed(config: Config, question: Question) -> int | None:
    """Return a sampling seed that depends on the prompt alone; greedy decoding needs none."""
    if config.responses.temperature == 0:
        return None
    return derive_seed(config.seed, "responses", question.prompt_id)
