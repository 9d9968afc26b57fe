"""Stage `features`: the target's hidden states on every recorded response."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import torch

from carryover.artifacts import MANIFEST, atomic_path, read_manifest, write_manifest
from carryover.config import Config
from carryover.features.extract import FeatureExtractor, batches
from carryover.features.store import (
    INDEX,
    FeatureStore,
    Recorded,
    shard_name,
    write_index,
    write_shard,
)
from carryover.identity import result_key, stage_code
from carryover.ledger import Ledger
from carryover.paths import Paths
from carryover.progress import Progress
from carryover.responses import read_responses
from carryover.target import load_target, validate_target

__all__ = ["FeatureExtractor", "FeatureStore", "Recorded", "run"]


def run(config: Config, *, target: str) -> None:
    """Write `features/{target}/`: shards, `index.arrow`, manifest (format: store.py).

    Shards that an interrupted run has finished are kept. Raises CarryoverError when the responses
    are missing, damaged or of another config.
    """
    started = datetime.now(UTC)
    paths = Paths(config)
    subset = config.stage("features", target=target)
    responses_folder = paths.responses(target)
    read_manifest(
        responses_folder, stage="responses", config=config.stage("responses", target=target)
    )
    responses = read_responses(responses_folder)
    shards = _shards([_tokens(row) for row in responses], config.features.shard_tokens)

    settings = config.targets[target]
    validate_target(
        paths.target(target),
        name=target,
        feature_layers=settings.feature_layers,
        mask_token_id=settings.mask_token_id,
        thinking=settings.thinking,
    )
    folder = paths.features(target)
    inputs = {"responses": responses_folder, "target": paths.target(target)}
    key = result_key(subset, inputs, stage_code("features"))
    (folder / MANIFEST).unlink(missing_ok=True)
    ledger = Ledger(folder, key, "shard-*.arrow")
    missing = [number for number in range(len(shards)) if shard_name(number) not in ledger]
    model, _ = load_target(paths.target(target), settings.dtype)
    layers = settings.feature_layers
    width = len(layers) * model.config.get_text_config().hidden_size
    if missing:
        model.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))  # type: ignore[arg-type]
        extractor = FeatureExtractor(model, layers)
        total = sum(_tokens(responses[i]) for number in missing for i in shards[number])
        with Progress(total=total, unit="token", desc=f"features {target}") as progress:
            for number in missing:
                rows = [responses[i] for i in shards[number]]
                records = _extract(extractor, rows, config.features.batch_tokens, progress)
                path = folder / shard_name(number)
                with atomic_path(path) as temporary:
                    write_shard(temporary, records, key)
                ledger.add(path.name)
    with atomic_path(folder / INDEX) as temporary:
        write_index(
            temporary,
            [
                (number, position, _tokens(responses[i]), len(responses[i]["prompt_ids"]))
                for number, members in enumerate(shards)
                for position, i in enumerate(members)
            ],
        )
    write_manifest(
        folder,
        stage="features",
        config=subset,
        started=started,
        seed=config.seed,
        inputs=inputs,
        extra={
            "key": key,
            "width": width,
            "responses": len(responses),
            "tokens": sum(map(_tokens, responses)),
        },
    )


def _extract(
    extractor: FeatureExtractor,
    rows: list[dict[str, Any]],
    batch_tokens: int,
    progress: Progress,
) -> list[Recorded]:
    sequences = [row["prompt_ids"] + row["response_ids"] for row in rows]
    features: dict[int, torch.Tensor] = {}
    for group in batches([len(s) for s in sequences], batch_tokens):
        features.update(zip(group, extractor([sequences[i] for i in group]), strict=True))
        progress.update(sum(len(sequences[i]) for i in group))
    return [
        Recorded(
            response_id=row["prompt_id"],
            dataset=row["dataset"],
            token_ids=torch.tensor(sequences[i]),
            prompt_length=len(row["prompt_ids"]),
            features=features[i],
        )
        for i, row in enumerate(rows)
    ]


def _tokens(row: dict[str, Any]) -> int:
    return len(row["prompt_ids"]) + len(row["response_ids"])


def _shards(lengths: list[int], shard_tokens: int) -> list[list[int]]:
    """Cut the responses, in order, into shards of at most `shard_tokens` tokens (at least one)."""
    shards: list[list[int]] = []
    used = 0
    for index, length in enumerate(lengths):
        if not shards or used + length > shard_tokens:
            shards.append([])
            used = 0
        shards[-1].append(index)
        used += length
    return shards
