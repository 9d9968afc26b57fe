"""Features on disk: Arrow IPC files that are memory-mapped, one record batch a response.

`shard-00000.arrow ...`, columns:
    response_id    string
    dataset        string
    token_ids      list<int32>   [T], prompt and response
    prompt_length  int32         the first token of the response is token_ids[prompt_length]
    features       list<uint16>  [T * n_layers * H], the bits of bfloat16 numbers, row-major: row t
                                 holds the layers of token t, concatenated in config order
`index.arrow`, one row a response in the order of the prompts: `shard`, `position` (of the record
batch in its shard), `tokens` (T), `prompt_length`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from carryover.artifacts import read_manifest
from carryover.errors import CarryoverError

INDEX = "index.arrow"
_KEY = b"carryover_key"
_SCHEMA = pa.schema(
    [
        ("response_id", pa.string()),
        ("dataset", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("prompt_length", pa.int32()),
        ("features", pa.list_(pa.uint16())),
    ]
)
_INDEX_SCHEMA = pa.schema(
    [
        ("shard", pa.int32()),
        ("position", pa.int32()),
        ("tokens", pa.int32()),
        ("prompt_length", pa.int32()),
    ]
)


@dataclass(frozen=True)
class Recorded:
    """One response with its features.

    token_ids: int64 [T], prompt and response. features: bfloat16 [T, n_layers * H].
    """

    response_id: str
    dataset: str
    token_ids: torch.Tensor
    prompt_length: int
    features: torch.Tensor


def shard_name(number: int) -> str:
    """Return the file name of one shard."""
    return f"shard-{number:05d}.arrow"


def write_shard(path: Path, records: Sequence[Recorded], key: str) -> None:
    """Write one shard; `key` ties it to what it was computed from."""
    schema = _SCHEMA.with_metadata({_KEY: key.encode()})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for record in records:
            bits = record.features.contiguous().view(torch.int16).numpy().view(np.uint16)
            writer.write_batch(
                pa.record_batch(
                    [
                        pa.array([record.response_id]),
                        pa.array([record.dataset]),
                        _single_list(record.token_ids.to(torch.int32).numpy()),
                        pa.array([record.prompt_length], pa.int32()),
                        _single_list(bits.reshape(-1)),
                    ],
                    schema=schema,
                )
            )


def write_index(path: Path, rows: Sequence[tuple[int, int, int, int]]) -> None:
    """Write (shard, position, tokens, prompt_length) of every response, in order."""
    columns = [
        pa.array(column, pa.int32()) for column in (zip(*rows, strict=True) if rows else [[]] * 4)
    ]
    table = pa.table(columns, schema=_INDEX_SCHEMA)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, _INDEX_SCHEMA) as writer:
        writer.write_table(table)


class FeatureStore:
    """Random access to the features of one target.

    `config` is `Config.stage("features", target)`: a store of another config is refused, as is
    one with a missing, truncated or foreign shard, by CarryoverError naming the file. `verify`
    also recomputes every file's SHA-256. Only the records that are asked for are read.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], *, verify: bool = False) -> None:
        self._folder = folder
        manifest = read_manifest(folder, stage="features", config=config, verify=verify)
        self._key: str = manifest["extra"]["key"]
        self.width: int = manifest["extra"]["width"]
        with pa.memory_map(str(folder / INDEX)) as source:
            index = pa.ipc.open_file(source).read_all()
        self._shard = index["shard"].to_numpy()
        self._position = index["position"].to_numpy()
        self.tokens = index["tokens"].to_numpy()
        self._open: dict[int, pa.ipc.RecordBatchFileReader] = {}

    def __len__(self) -> int:
        return len(self._shard)

    def __getitem__(self, index: int) -> Recorded:
        if not 0 <= index < len(self):
            raise IndexError(index)
        reader = self._reader(int(self._shard[index]))
        batch = reader.get_batch(int(self._position[index]))
        tokens = batch["token_ids"].values.to_numpy()
        bits = batch["features"].values.to_numpy()
        return Recorded(
            response_id=batch["response_id"][0].as_py(),
            dataset=batch["dataset"][0].as_py(),
            token_ids=torch.from_numpy(tokens.astype(np.int64)),
            prompt_length=batch["prompt_length"][0].as_py(),
            # Copied out of the read-only mapping: a tensor has no read-only state.
            features=torch.from_numpy(bits.copy().view(np.int16))
            .view(torch.bfloat16)
            .view(len(tokens), self.width),
        )

    def token_ids(self, index: int) -> torch.Tensor:
        """The token ids [T] int64 of one response, without its features."""
        batch = self._reader(int(self._shard[index])).get_batch(int(self._position[index]))
        return torch.from_numpy(batch["token_ids"].values.to_numpy().astype(np.int64))

    def _reader(self, shard: int) -> pa.ipc.RecordBatchFileReader:
        if shard not in self._open:
            path = self._folder / shard_name(shard)
            rebuild = f"Delete {path} and run `carryover features` again."
            try:
                reader = pa.ipc.open_file(pa.memory_map(str(path)))
            except (pa.ArrowInvalid, OSError) as error:
                raise CarryoverError(f"{path} cannot be read ({error})", rebuild) from error
            if (reader.schema.metadata or {}).get(_KEY, b"").decode() != self._key:
                raise CarryoverError(f"{path} belongs to another run", rebuild)
            self._open[shard] = reader
        return self._open[shard]


def _single_list(values: np.ndarray) -> pa.ListArray:
    """Return a list column with one entry, without copying `values`."""
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), pa.array(values))
