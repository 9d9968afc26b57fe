"""The trace of a real run says what happened: against the outputs and the dense reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from carryover.errors import CarryoverError
from carryover.serving.trace import FLUSH_ROUNDS, ROUNDS, TOP_K, TraceWriter, read_rows, read_trace
from carryover.serving.trace_settings import TraceSettings
from tests.serving import checkpoints
from tests.serving.harness import ACCEPTED, GENERATED, Served, random_prompts, run_jobs
from tests.serving.reference import DenseTarget

PROMPTS = random_prompts(0, checkpoints.VOCABULARY, (5, 70, 23, 3, 41, 11))
B = checkpoints.PROPOSALS
Rounds = list[dict[str, Any]]


class Run:
    """One traced engine: its output, its rounds by request, and its rows."""

    def __init__(self, folder: Path, job: dict[str, Any], result: dict[str, Any]) -> None:
        assert "error" not in result, result
        self.outputs: list[list[int]] = result["outputs"]
        self.proposer: str = result["proposer"]
        self.folder = folder
        self.rounds: list[Rounds] = [[] for _ in job["prompts"]]
        self.table = read_trace(folder)
        for row in self.table.to_pylist():
            # vLLM's internal id is the request's own, here its number, "-" and random digits.
            self.rounds[int(row["request"].split("-")[0])].append(row)


def run_ahead(folder: Path) -> dict[str, Run]:
    target = checkpoints.write_target(folder / "target", seed=0)
    drafters = {
        "carryover": checkpoints.write_drafter(folder / "carryover", seed=1),
        "Markov": checkpoints.write_drafter(folder / "Markov", seed=1, markov_rank=16),
        "baseline": checkpoints.write_drafter(folder / "baseline", seed=1, enabled=False),
    }
    base = {"target": target, "prompts": PROMPTS, "sampling": {"max_tokens": GENERATED}}
    edited = {"continue_from": 0, "accepted": ACCEPTED}
    jobs: dict[str, dict[str, Any]] = {
        "carryover": base | edited | {"drafter": drafters["carryover"], "features": True},
        "Markov": base | edited | {"drafter": drafters["Markov"]},
        "baseline": base | edited | {"drafter": drafters["baseline"]},
        "preempted": base
        | {
            "drafter": drafters["carryover"],
            "sampling": {"max_tokens": 2 * GENERATED},
            "llm": {"num_gpu_blocks_override": 10},
            "features": True,
        },
        "length limit": base
        | {
            "drafter": drafters["carryover"],
            "llm": {"max_model_len": 96},
            "features": True,
        },
    }
    for name, job in jobs.items():
        trace = {"folder": str(folder / "traces" / name), "features": job.pop("features", False)}
        job["llm"] = job.get("llm", {}) | {"additional_config": {"carryover_trace": trace}}
    long = {"max_tokens": 2 * GENERATED + 32}
    results = run_jobs(folder, [base | {"sampling": long}, *jobs.values()])[1:]
    return {
        name: Run(folder / "traces" / name, job, result)
        for (name, job), result in zip(jobs.items(), results, strict=True)
    }


@pytest.fixture(scope="module")
def runs(ran_ahead: dict[str, Run]) -> dict[str, Run]:
    return ran_ahead


@pytest.fixture(scope="module")
def target(runs: dict[str, Run]) -> DenseTarget:
    folder = runs["carryover"].folder.parents[1] / "target"
    return DenseTarget.load(folder, checkpoints.FEATURE_LAYERS)


ALL = ["carryover", "Markov", "baseline", "preempted", "length limit"]


@pytest.mark.parametrize("name", ALL)
def test_the_rounds_put_together_are_the_output(runs: dict[str, Run], name: str) -> None:
    for prompt, output, rounds in zip(PROMPTS, runs[name].outputs, runs[name].rounds, strict=True):
        assert [row["round"] for row in rounds] == list(range(len(rounds)))
        ids = list(prompt)
        for row in rounds:
            assert row["anchor_position"] == len(ids) - 1
            assert row["anchor_token"] == ids[-1]
            ids += [*row["proposals"][: row["accepted"]], row["next_token"]]
        # Tokens past max_tokens are committed, and cut off from the output.
        assert ids[len(prompt) :][: len(output)] == output
        assert len(ids) - len(prompt) - len(output) <= B


@pytest.mark.parametrize("name", ALL)
def test_accepted_and_carried_counts(runs: dict[str, Run], name: str) -> None:
    seen = set()
    for rounds in runs[name].rounds:
        rejected = None
        for row in rounds:
            proposals, best = row["proposals"], [ids[0] for ids in row["target_ids"]]
            assert len(best) == len(proposals) + 1
            # Greedy: accepted while the target would have said the same, then what it says.
            right = [a == b for a, b in zip(proposals, best, strict=False)] + [False]
            assert row["accepted"] == right.index(False)
            assert row["next_token"] == best[row["accepted"]]
            if not proposals:
                assert row["carried"] is None
            elif row["carried"] is None:  # vLLM skipped the drafter
                assert set(proposals) == {0} and name == "length limit"
            elif name == "baseline":
                assert row["carried"] == 0
            else:
                # Nothing is carried after prefill, and from proposals that were filled in.
                assert row["carried"] in {0 if rejected is None else rejected}
            filled_in = bool(proposals) and row["carried"] is None
            rejected = len(proposals) - row["accepted"] if proposals and not filled_in else None
            seen.add(row["carried"])
    if name in ("carryover", "Markov"):
        assert seen == {None, *range(B + 1)}
    if name == "length limit":
        assert any(
            row["proposals"] and row["carried"] is None
            for rounds in runs[name].rounds
            for row in rounds
        )


def sequences(rounds: Rounds, prompt: list[int]) -> list[tuple[dict[str, Any], list[int]]]:
    """Each round with the tokens that the target read: what was committed, and the proposals."""
    found, ids = [], list(prompt)
    for row in rounds:
        found.append((row, ids + row["proposals"]))
        ids = [*ids, *row["proposals"][: row["accepted"]], row["next_token"]]
    return found


def test_the_targets_best_tokens_after_accepted_and_rejected_ones(
    runs: dict[str, Run], target: DenseTarget
) -> None:
    rejected = 0
    for prompt, rounds in zip(PROMPTS, runs["carryover"].rounds, strict=True):
        for row, ids in sequences(rounds, prompt):
            _, logits = target(ids)
            logprobs = logits[row["anchor_position"] :].log_softmax(-1)
            best = torch.tensor(row["target_ids"])
            assert best.shape == (len(row["proposals"]) + 1, TOP_K)
            found = torch.tensor(row["target_logprobs"])
            torch.testing.assert_close(found, logprobs.gather(1, best), atol=1e-3, rtol=0)
            torch.testing.assert_close(found, logprobs.topk(TOP_K).values, atol=1e-3, rtol=0)
            rejected += len(row["proposals"]) - row["accepted"]
    assert rejected > 50


@pytest.mark.parametrize("name", ["carryover", "preempted", "length limit"])
def test_features_of_every_row(runs: dict[str, Run], target: DenseTarget, name: str) -> None:
    run = runs[name]
    (engine,) = set(run.table["engine"].to_pylist())
    rows, features = read_rows(run.folder, engine)
    assert features.shape == (len(rows), len(checkpoints.FEATURE_LAYERS) * checkpoints.HIDDEN)
    places = rows.to_pylist()
    missing = 0
    for prompt, rounds in zip(PROMPTS, run.rounds, strict=True):
        for row, ids in sequences(rounds, prompt):
            if row["row"] is None:
                missing += 1
                continue
            here = slice(row["row"], row["row"] + 1 + len(row["proposals"]))
            assert {p["request"] for p in places[here]} == {row["request"]}
            first = row["anchor_position"]
            assert [p["position"] for p in places[here]] == list(range(first, len(ids)))
            assert [p["token"] for p in places[here]] == ids[first:]
            expected, _ = target(ids)
            torch.testing.assert_close(features[here], expected[first:], atol=1e-4, rtol=1e-4)
        found = {p["position"] for p in places if p["request"] == rounds[0]["request"]}
        # The prompt's rows are there, too, unless vLLM skipped the drafter during prefill.
        assert found >= set(range(len(prompt))) or name == "length limit"
    # Only where vLLM skipped the drafter are there none.
    assert (missing > 0) == (name == "length limit")


def test_any_proposer_is_traced(runs: dict[str, Run]) -> None:
    assert runs["carryover"].proposer == runs["baseline"].proposer == "TracedCarryoverProposer"
    assert runs["Markov"].proposer == "TracedMarkovProposer"


def test_nothing_watches_when_it_is_off(served: Served) -> None:
    expected = {"carryover": "CarryoverProposer", "baseline": "DFlashProposer"}
    for name, proposer in expected.items():
        assert served.results[name]["proposer"] == proposer
        assert served.results[name]["hooks"] == 0


def a_round(number: int) -> list[Any]:
    return ["r", number, number, 7, [1, 2], 2, 1, 5, [[1], [2], [3]], [[0.0]] * 3, None]


def test_memory_is_bounded_and_what_was_flushed_outlives_a_crash(tmp_path: Path) -> None:
    writer = TraceWriter(TraceSettings(tmp_path, features=False), {"drafter": "d"})
    for number in range(3 * FLUSH_ROUNDS + 10):
        writer.flush_if_due()
        writer.add_round(a_round(number))
        assert len(writer._pending) <= FLUSH_ROUNDS
    # Not closed: this is what a killed engine leaves behind.
    (path,) = tmp_path.glob("*.rounds.arrow")
    whole = path.read_bytes()
    assert read_trace(tmp_path)["round"].to_pylist() == list(range(3 * FLUSH_ROUNDS))
    for kept in range(0, len(whole), 997):
        path.write_bytes(whole[:kept])
        rounds = read_trace(tmp_path)["round"].to_pylist()
        assert rounds == list(range(len(rounds))) and len(rounds) % FLUSH_ROUNDS == 0
    path.write_bytes(whole)
    writer.close()


def test_closing_writes_the_rest(tmp_path: Path) -> None:
    writer = TraceWriter(TraceSettings(tmp_path, features=False), {})
    writer.add_round(a_round(0))
    assert read_trace(tmp_path).num_rows == 0
    writer.close()
    assert read_trace(tmp_path).num_rows == 1
    assert read_trace(tmp_path).schema.names == [*ROUNDS.names, "engine"]


def test_another_version_and_no_trace_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CarryoverError, match="holds no trace"):
        read_trace(tmp_path)
    schema = ROUNDS.with_metadata({"version": "0"})
    with pa.OSFile(str(tmp_path / "1-1.rounds.arrow"), "wb") as sink:
        pa.ipc.new_stream(sink, schema).close()
    with pytest.raises(CarryoverError, match="version 0"):
        read_trace(tmp_path)
