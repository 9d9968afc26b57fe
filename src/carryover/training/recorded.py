"""What a drafter trains on: recorded responses, with their features or (online) without."""

from array import array
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from carryover.artifacts import read_manifest
from carryover.config import Config
from carryover.features.store import FeatureStore, Recorded
from carryover.jsonl import read_rows
from carryover.paths import Paths


class RecordedResponses(Protocol):
    """Random access to the responses of one target, in the order of the prompts.

    tokens: [responses] int, prompt and response together.
    """

    tokens: np.ndarray

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Recorded: ...

    def token_ids(self, index: int) -> Tensor:
        """[T] int64, prompt and response."""
        ...


class ResponseStore:
    """The responses of one target without features: their `features` are [T, 0].

    All token ids are held in memory, 4 bytes each. Raises CarryoverError where the responses are
    missing, damaged or of another config.
    """

    def __init__(self, config: Config, target: str) -> None:
        folder = Paths(config).responses(target)
        read_manifest(folder, stage="responses", config=config.stage("responses", target=target))
        ids, ends, prompts = array("i"), array("q", [0]), array("i")
        self._names: list[tuple[str, str]] = []
        rebuild = f"Delete {folder} and run `carryover responses` again."
        for shard in sorted(folder.glob("shard-*.jsonl")):
            for row in read_rows(shard, rebuild):
                ids.extend(row["prompt_ids"])
                ids.extend(row["response_ids"])
                ends.append(len(ids))
                prompts.append(len(row["prompt_ids"]))
                self._names.append((row["prompt_id"], row["dataset"]))
        self._ids = np.frombuffer(ids, dtype=np.int32)
        self._ends = np.frombuffer(ends, dtype=np.int64)
        self._prompts = np.frombuffer(prompts, dtype=np.int32)
        self.tokens = np.diff(self._ends)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Recorded:
        response_id, dataset = self._names[index]
        token_ids = self.token_ids(index)
        return Recorded(
            response_id=response_id,
            dataset=dataset,
            token_ids=token_ids,
            prompt_length=int(self._prompts[index]),
            features=torch.empty(len(token_ids), 0, dtype=torch.bfloat16),
        )

    def token_ids(self, index: int) -> Tensor:
        """The token ids [T] int64 of one response."""
        return torch.from_numpy(
            self._ids[self._ends[index] : self._ends[index + 1]].astype(np.int64)
        )


def open_recorded(config: Config, target: str) -> RecordedResponses:
    """The responses that `training.features` asks for."""
    if config.training.features == "online":
        return ResponseStore(config, target)
    return FeatureStore(Paths(config).features(target), config.stage("features", target))
