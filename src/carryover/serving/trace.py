"""What happened in every round, written down for the analyses: opt-in, and absent when off.

    LLM(..., additional_config={"carryover_trace": {"folder": "DIR", "features": false}})
    vllm serve ... --additional-config '{"carryover_trace": {"folder": "DIR"}}'

Each engine writes its own files, `ENGINE.rounds.arrow` and, with `features`, `ENGINE.rows.arrow`:
Arrow IPC streams, flushed every FLUSH_ROUNDS rounds, so that memory is bounded and a killed engine
leaves all but its last rounds. `read_trace(folder)` reads them.

A round is one step of the target in which a request got tokens. Columns (ROUNDS):

    request          vLLM's internal id: the request's id, "-", 8 hexadecimal digits
    round            counts from 0 within the request
    anchor_position  of the last token that was committed before the round ...
    anchor_token     ... and its id
    proposals        [n] token ids that were verified: none after prefill or preemption, else B
    carried          rejected rows that the drafter read for these proposals; null where it proposed
                     nothing: n = 0, or vLLM filled in (zeros where it skipped the drafter)
    accepted         m, how many of the proposals were accepted
    next_token       the token after them: the target's correction, or the bonus token
    target_ids       [n + 1][TOP_K] the target's best tokens after the anchor and after each
                     proposal, best first ...
    target_logprobs  [n + 1][TOP_K] ... and their log-probabilities, from the logits as they come
                     (temperature 1), after a grammar's mask
    row              of the anchor in the rows file, its proposals follow; null without `features`,
                     and where vLLM skipped the drafter in this step

So the tokens of a request are, round after round, proposals[:accepted] and next_token, up to where
a stop condition cuts, and target_ids[m + q], q = 1 .. n - m, is what the target predicted from the
q-th rejected state. The rows file holds, for every row that the target computed, prompts included,
the concatenated features that the drafter was given (before F), as bytes.
"""

from __future__ import annotations

import os
import time
import weakref
from itertools import accumulate, pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import torch

from carryover.errors import CarryoverError
from carryover.serving.trace_settings import SETTING, TraceSettings

TOP_K = 5
FLUSH_ROUNDS = 256
VERSION = "1"

_ROUNDS_SUFFIX, _ROWS_SUFFIX = ".rounds.arrow", ".rows.arrow"
ROUNDS = pa.schema(
    [
        ("request", pa.string()),
        ("round", pa.int32()),
        ("anchor_position", pa.int32()),
        ("anchor_token", pa.int32()),
        ("proposals", pa.list_(pa.int32())),
        ("carried", pa.int32()),
        ("accepted", pa.int32()),
        ("next_token", pa.int32()),
        ("target_ids", pa.list_(pa.list_(pa.int32()))),
        ("target_logprobs", pa.list_(pa.list_(pa.float32()))),
        ("row", pa.int64()),
    ]
)


def rows_schema(width: int, itemsize: int) -> pa.Schema:
    """Columns of the rows file, for features of `width` numbers of `itemsize` bytes."""
    return pa.schema(
        [
            ("request", pa.string()),
            ("position", pa.int32()),
            ("token", pa.int32()),
            ("features", pa.binary(width * itemsize)),
        ]
    )


class _Stream:
    """An Arrow IPC stream file that is there after a crash, up to its last flush."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.schema = schema
        self._file: IO[bytes] = path.open("xb")
        self._writer = pa.ipc.new_stream(self._file, schema)

    def write(self, columns: list[Any]) -> None:
        batch = pa.record_batch(
            [
                column if isinstance(column, pa.Array) else pa.array(column, kind.type)
                for column, kind in zip(columns, self.schema, strict=True)
            ],
            schema=self.schema,
        )
        self._writer.write_batch(batch)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._writer.close()
        self._file.close()


class TraceWriter:
    """The files of one engine. Closed when it is collected or the process ends, or by `close`.

    Args:
        settings: where to, and whether with features.
        about: what the readers will want to know of the engine; kept in the schema's metadata.
    """

    def __init__(self, settings: TraceSettings, about: dict[str, str]) -> None:
        try:
            settings.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CarryoverError(
                f"the folder of `{SETTING}`, {settings.folder}, cannot be made ({error.strerror})",
                "Name one that can be written.",
            ) from error
        self._stem = settings.folder / f"{time.time_ns()}-{os.getpid()}"
        self._about = about | {"version": VERSION, "top_k": str(TOP_K)}
        self._pending: list[list[Any]] = []
        self._open: dict[str, _Stream] = {}
        self._stream(_ROUNDS_SUFFIX, ROUNDS).flush()
        self.rows = 0
        self.close = weakref.finalize(self, _close, self._pending, self._open)

    def add_round(self, values: list[Any]) -> None:
        """Add a round: its columns, in the order of ROUNDS. Until the next flush it may change."""
        self._pending.append(values)

    def flush_if_due(self) -> None:
        """Write what has gathered, if it is FLUSH_ROUNDS rounds or more."""
        if len(self._pending) >= FLUSH_ROUNDS:
            self.flush()

    def flush(self) -> None:
        """Write what has gathered."""
        _flush(self._pending, self._open)

    def add_rows(
        self, requests: list[str], positions: Any, tokens: Any, features: torch.Tensor
    ) -> None:
        """Add rows [n] and their features [n, width], written through at once."""
        rows, width = features.shape
        size = features.element_size()
        if _ROWS_SUFFIX not in self._open:
            self._about["dtype"] = str(features.dtype).removeprefix("torch.")
            self._stream(_ROWS_SUFFIX, rows_schema(width, size))
        data = features.detach().cpu().contiguous().view(torch.uint8).numpy()
        column = pa.Array.from_buffers(
            pa.binary(width * size), rows, [None, pa.py_buffer(np.ascontiguousarray(data))]
        )
        self._open[_ROWS_SUFFIX].write([requests, positions, tokens, column])
        self.rows += rows

    def _stream(self, suffix: str, schema: pa.Schema) -> _Stream:
        path = self._stem.with_name(self._stem.name + suffix)
        stream = _Stream(path, schema.with_metadata(self._about))
        self._open[suffix] = stream
        return stream


def _flush(pending: list[list[Any]], streams: dict[str, _Stream]) -> None:
    # The rows first: no round may refer to one that is not there.
    if _ROWS_SUFFIX in streams:
        streams[_ROWS_SUFFIX].flush()
    if pending:
        streams[_ROUNDS_SUFFIX].write([list(column) for column in zip(*pending, strict=True)])
        pending.clear()
    streams[_ROUNDS_SUFFIX].flush()


def _close(pending: list[list[Any]], streams: dict[str, _Stream]) -> None:
    _flush(pending, streams)
    for stream in streams.values():
        stream.close()


class Recorder:
    """Watches the V1 model runner's samplers, and is told by the proposer what it drafts.

    The target's step comes first (hooks on the two sampler modules), then the draft (`carried`,
    `features`), unless vLLM skips it. The features belong to the rounds that the step has just
    ended, so these are kept within reach until the next step.
    """

    def __init__(self, runner: Any, writer: TraceWriter, *, features: bool) -> None:
        self._runner = runner
        self._writer = writer
        self._features = features
        self._best: tuple[list[list[int]], list[list[float]]] = ([], [])
        # The step's rounds, each with the row of its anchor within the step.
        self._step: list[tuple[list[Any], int]] = []
        # Of each request: rounds so far; rows carried into its last draft, absent if none was made.
        self._seen: dict[str, int] = {}
        self._carried: dict[str, int] = {}
        for sampler in (runner.sampler, runner.rejection_sampler):
            sampler.register_forward_pre_hook(self._before, with_kwargs=True)
            sampler.register_forward_hook(self._after, with_kwargs=True)

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the target's best tokens, before the sampler scales its logits in place."""
        if self._runner.input_batch.num_reqs == 0 or kwargs.get("predict_bonus_token"):
            return  # vLLM's warm-up; the rejection sampler's own call
        logits = (kwargs["logits"] if "logits" in kwargs else args[2]).float()
        best = logits.topk(min(TOP_K, logits.shape[-1]), dim=-1)
        logprobs = best.values - logits.logsumexp(dim=-1, keepdim=True)
        self._best = best.indices.tolist(), logprobs.tolist()

    def _after(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Write the round of each request that got tokens."""
        runner = self._runner
        batch = runner.input_batch
        if batch.num_reqs == 0 or kwargs.get("predict_bonus_token"):
            return
        metadata = args[0] if module is runner.rejection_sampler else None
        drafts = metadata.num_draft_tokens if metadata is not None else [0] * batch.num_reqs
        proposed = metadata.draft_token_ids.tolist() if metadata is not None else []
        sampled = output.sampled_token_ids.tolist()
        ends = runner.query_start_loc.np[1 : batch.num_reqs + 1]
        ids, logprobs = self._best
        last_draft = list(accumulate(drafts))
        self._writer.flush_if_due()
        self._step = []
        for index, request in enumerate(batch.req_ids):
            if runner.discard_request_mask.np[index]:
                continue  # in the middle of its prompt
            count = drafts[index]
            tokens = [t for t in sampled[index] if 0 <= t < batch.vocab_size]
            anchor = int(ends[index]) - 1 - count
            first, last = last_draft[index] - count, last_draft[index]
            scored = slice(first + index, last + index + 1)
            carried = self._carried.pop(request, None)
            values = [
                request,
                self._seen.setdefault(request, 0),
                int(runner.positions[anchor]),
                int(runner.input_ids.gpu[anchor]),
                proposed[first:last],
                carried if count else None,
                len(tokens) - 1,
                tokens[-1],
                ids[scored],
                logprobs[scored],
                None,
            ]
            self._writer.add_round(values)
            self._step.append((values, anchor))
            self._seen[request] += 1
        if len(self._seen) > 4 * runner.max_num_reqs:
            self._forget_finished()

    def carried(self, counts: torch.Tensor | None) -> None:
        """Note how many rows each request of the batch carries into the draft now made."""
        requests = self._runner.input_batch.req_ids
        numbers = [0] * len(requests) if counts is None else counts.tolist()
        self._carried.update(zip(requests, numbers, strict=True))

    def features(
        self, starts: list[int], positions: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Write the features of the step's rows.

        Args:
            starts: [requests + 1], first row of each request, then the number of rows.
            positions, tokens: [rows].
            rows: [rows, width], before F.
        """
        if not self._features:
            return
        for values, anchor in self._step:
            values[-1] = self._writer.rows + anchor
        requests = self._runner.input_batch.req_ids
        owners = [
            request
            for request, (start, end) in zip(requests, pairwise(starts), strict=True)
            for _ in range(start, end)
        ]
        self._writer.add_rows(owners, positions.tolist(), tokens.tolist(), rows)

    def _forget_finished(self) -> None:
        alive = self._runner.requests
        self._seen = {request: n for request, n in self._seen.items() if request in alive}
        self._carried = {request: n for request, n in self._carried.items() if request in alive}


def _batches(path: Path) -> tuple[pa.Schema | None, list[pa.RecordBatch]]:
    """Schema and whole batches of a stream; whatever a crash cut off is left out."""
    batches: list[pa.RecordBatch] = []
    # Nothing is mapped: the file may still grow.
    with pa.OSFile(str(path)) as source:
        try:
            reader = pa.ipc.open_stream(source)
        except pa.ArrowInvalid:
            return None, []
        try:
            while True:
                batches.append(reader.read_next_batch())
        except (StopIteration, pa.ArrowInvalid, OSError):
            return reader.schema, batches


def _read(path: Path) -> pa.Table | None:
    schema, batches = _batches(path)
    if schema is None:
        return None
    version = (schema.metadata or {}).get(b"version", b"").decode()
    if version != VERSION:
        raise CarryoverError(
            f"{path} is a trace of version {version or 'unknown'}, and this reads {VERSION}",
            "Read it with the carryover that wrote it.",
        )
    return pa.Table.from_batches(batches, schema)


def read_trace(folder: Path) -> pa.Table:
    """All rounds in a folder: the columns of ROUNDS, and `engine`, which names the file.

    An engine that was killed before its first flush adds none. Raises CarryoverError where there is
    no trace, or one of another version.
    """
    paths = sorted(folder.glob(f"*{_ROUNDS_SUFFIX}"))
    if not paths:
        raise CarryoverError(
            f"{folder} holds no trace (*{_ROUNDS_SUFFIX})",
            f"Serve with {SETTING} in additional_config; docs/serving.md says how.",
        )
    tables = [ROUNDS.append(pa.field("engine", pa.string())).empty_table()]
    for path in paths:
        table = _read(path)
        if table is not None:
            engine = path.name.removesuffix(_ROUNDS_SUFFIX)
            names = pa.array([engine] * table.num_rows, pa.string())
            tables.append(table.append_column("engine", names).replace_schema_metadata(None))
    return pa.concat_tables(tables)


def read_rows(folder: Path, engine: str) -> tuple[pa.Table, torch.Tensor]:
    """The rows of one engine: their request, position and token, and their features [rows, width].

    Raises CarryoverError where the engine wrote none.
    """
    path = folder / f"{engine}{_ROWS_SUFFIX}"
    table = _read(path) if path.is_file() else None
    if table is None:
        raise CarryoverError(f"{path} is not there", f'Serve with "features": true in {SETTING}.')
    dtype: torch.dtype = getattr(torch, table.schema.metadata[b"dtype"].decode())
    column = table["features"].combine_chunks()
    width = column.type.byte_width // dtype.itemsize
    raw = torch.frombuffer(bytearray(column.buffers()[1] or b""), dtype=torch.uint8)
    features = raw[: len(table) * column.type.byte_width].view(dtype).view(len(table), width)
    return table.drop_columns(["features"]), features
