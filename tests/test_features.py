import json
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from carryover import features, target
from carryover.artifacts import read_manifest, write_manifest
from carryover.config import Config
from carryover.errors import CarryoverError
from carryover.features import FeatureExtractor, FeatureStore, Recorded
from carryover.features.extract import batches
from carryover.features.store import write_index, write_shard
from carryover.jsonl import read_rows
from carryover.paths import Paths
from tests.tiny_target import HIDDEN, tiny_config, write_tiny_target

LAYERS = [0, 2, 3]  # the last block among them
SHARD_TOKENS = 60


def put_responses(config: Config, lengths: list[tuple[int, int]]) -> None:
    """Random token ids as if the responses stage had written them, in two shards."""
    folder = Paths(config).responses("tiny")
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(5)
    lines = []
    for number, (prompt, response) in enumerate(lengths):
        ids = torch.randint(10, 250, (prompt + response,), generator=generator).tolist()
        row = {
            "prompt_id": f"p{number}",
            "dataset": f"d{number % 2}",
            "prompt_ids": ids[:prompt],
            "response_ids": ids[prompt:],
            "finish_reason": "length",
        }
        lines.append(json.dumps(row) + "\n")
    (folder / "shard-00000.jsonl").write_text("".join(lines[:3]))
    (folder / "shard-00001.jsonl").write_text("".join(lines[3:]))
    write_manifest(
        folder,
        stage="responses",
        config=config.stage("responses", target="tiny"),
        started=datetime.now(UTC),
        seed=config.seed,
    )


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Finished features of the tiny float32 target on seven responses."""
    write_tiny_target(tmp_path / "source")
    config = tiny_config(
        tmp_path,
        target={"feature_layers": LAYERS},
        features={"batch_tokens": 48, "shard_tokens": SHARD_TOKENS},
    )
    target.run(config, target="tiny")
    put_responses(config, [(5, 9), (3, 20), (11, 1), (8, 30), (2, 2), (30, 40), (4, 13)])
    features.run(config, target="tiny")
    return config


def store_of(config: Config, **options: bool) -> FeatureStore:
    subset = config.stage("features", target="tiny")
    return FeatureStore(Paths(config).features("tiny"), subset, **options)


def shards(config: Config) -> list[Path]:
    return sorted(Paths(config).features("tiny").glob("shard-*.arrow"))


def test_every_response_has_the_hidden_states_of_a_plain_forward(config: Config) -> None:
    """Batching, padding and cutting the model above the last layer change nothing."""
    store = store_of(config, verify=True)
    model, _ = target.load_target(Paths(config).target("tiny"), "float32")
    folder = Paths(config).responses("tiny")
    rows = [row for n in (0, 1) for row in read_rows(folder / f"shard-0000{n}.jsonl", "")]
    assert len(store) == len(rows) == 7
    for index, row in enumerate(rows):
        record = store[index]
        ids = row["prompt_ids"] + row["response_ids"]
        assert record.token_ids.tolist() == ids
        assert record.prompt_length == len(row["prompt_ids"])
        assert (record.response_id, record.dataset) == (row["prompt_id"], row["dataset"])
        with torch.no_grad():
            # hidden_states[0] is the embedding and the last one is normed, so that block i's raw
            # output is hidden_states[i + 1] only below the top; take the top from the norm's input.
            top: list[torch.Tensor] = []
            hook = model.model.norm.register_forward_pre_hook(
                lambda _module, inputs, top=top: top.append(inputs[0])
            )
            states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
            hook.remove()
        expected = torch.cat([states[1], states[3], top[0]], dim=-1)[0]
        assert record.features.shape == (len(ids), 3 * HIDDEN)
        assert record.features.dtype == torch.bfloat16
        # One bfloat16 step at most: float32 noise may fall on a rounding boundary.
        torch.testing.assert_close(record.features.float(), expected, rtol=2**-7, atol=1e-5)


def test_layers_come_in_the_order_asked_for_and_the_rest_of_the_model_is_dropped(
    config: Config,
) -> None:
    folder = Paths(config).target("tiny")
    sequences = [[20, 30, 40], [50, 60, 70, 80, 90]]
    both = FeatureExtractor(target.load_target(folder, "float32")[0], [2, 1])(sequences)
    model, _ = target.load_target(folder, "float32")
    lower = FeatureExtractor(model, [1])(sequences)
    assert len(model.model.layers) == 2
    for whole, part in zip(both, lower, strict=True):
        torch.testing.assert_close(whole[:, HIDDEN:], part, rtol=2**-7, atol=1e-5)
        assert not torch.allclose(whole[:, :HIDDEN].float(), part.float(), atol=0.1)


def test_shards_are_filled_in_order_and_no_further_than_allowed(config: Config) -> None:
    store = store_of(config)
    assert store.tokens.tolist() == [14, 23, 12, 38, 4, 70, 17]
    counts = []
    for path in shards(config):
        with pa.ipc.open_file(pa.memory_map(str(path))) as reader:
            counts.append(
                [
                    len(reader.get_batch(i)["token_ids"].values)
                    for i in range(reader.num_record_batches)
                ]
            )
    assert counts == [[14, 23, 12], [38, 4], [70], [17]]  # 70 is above the limit, so alone


def test_a_crash_costs_only_the_unfinished_shards(config: Config) -> None:
    before = {path.name: path.read_bytes() for path in shards(config)}
    stamps = {path.name: path.stat().st_mtime_ns for path in shards(config)}
    first, second, *_ = shards(config)
    (first.parent / "manifest.json").unlink()
    first.write_bytes(before[first.name][:1000])
    second.unlink()
    features.run(config, target="tiny")
    assert {path.name: path.read_bytes() for path in shards(config)} == before
    rewritten = {p.name for p in shards(config) if p.stat().st_mtime_ns != stamps[p.name]}
    assert rewritten == {first.name, second.name}


def test_shards_outlive_a_rerun_of_the_responses_and_not_other_ones_or_other_code(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stamps() -> list[int]:
        features.run(config, target="tiny")
        return [path.stat().st_mtime_ns for path in shards(config)]

    made = stamps()
    lengths = [(5, 9), (3, 20), (11, 1), (8, 30), (2, 2), (30, 40), (4, 13)]
    put_responses(config, lengths)  # the same, in a manifest of another time
    leftover = Paths(config).features("tiny") / f".tmp-{2**30}-shard-00000.arrow"
    leftover.touch()  # of a process that is gone
    assert stamps() == made
    assert not leftover.exists()
    monkeypatch.setattr(features, "stage_code", lambda stage: "new")
    again = stamps()
    assert not set(again) & set(made)
    put_responses(config, lengths[:-1])
    assert not set(stamps()) & set(again)


def test_a_truncated_shard_is_refused_by_name(config: Config) -> None:
    path = shards(config)[1]
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CarryoverError, match=f"{path.name} is truncated") as caught:
        store_of(config)
    assert "carryover features" in caught.value.fix


def test_a_shard_of_another_run_is_refused_by_name(config: Config) -> None:
    """Also when it has the right size, so that the manifest's check cannot see it."""
    path = shards(config)[2]
    size = path.stat().st_size
    key = read_manifest(path.parent)["extra"]["key"]
    write_shard(path, [store_of(config)[5]], key=key[::-1])
    assert path.stat().st_size == size
    with pytest.raises(CarryoverError, match=f"{path.name} belongs to another run"):
        store_of(config)[5]


def test_another_config_is_refused(config: Config) -> None:
    other = config.stage("features", target="tiny")
    other["target"]["feature_layers"] = [0, 1]
    with pytest.raises(CarryoverError, match=r"another config .*feature_layers"):
        FeatureStore(Paths(config).features("tiny"), other)


def test_an_index_beyond_the_end_is_refused(config: Config) -> None:
    with pytest.raises(IndexError):
        store_of(config)[7]


def test_all_bit_patterns_come_back(tmp_path: Path) -> None:
    """Every one of the 65,536 bfloat16 patterns: infinities, NaN payloads, subnormals, -0."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    record = Recorded("r", "d", torch.arange(256), 7, bits.view(torch.bfloat16).view(256, 256))
    write_shard(tmp_path / "shard-00000.arrow", [record], key="k")
    write_index(tmp_path / "index.arrow", [(0, 0, 256, 7)])
    write_manifest(
        tmp_path,
        stage="features",
        config={},
        started=datetime.now(UTC),
        seed=0,
        extra={"key": "k", "width": 256},
    )
    read = FeatureStore(tmp_path, {})[0]
    assert torch.equal(read.features.view(torch.int16).view(-1), bits)
    assert read.token_ids.tolist() == list(range(256))
    assert read.prompt_length == 7


@given(st.lists(st.integers(1, 300), max_size=40), st.integers(1, 500))
def test_batches_hold_everything_once_within_the_limit(lengths: list[int], limit: int) -> None:
    groups = list(batches(lengths, limit))
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        padded = len(group) * max(lengths[index] for index in group)
        assert padded <= limit or len(group) == 1
