import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from carryover import benchmark, target
from carryover.artifacts import read_manifest, write_manifest
from carryover.benchmark.journal import Journal
from carryover.benchmark.run import REMEDIES, Task, _groups
from carryover.benchmark.worker import Acceptance
from carryover.config import TRAINED_VARIANTS, Config, load_config
from carryover.engine_process import EngineProcess
from carryover.errors import CarryoverError
from carryover.paths import Paths
from carryover.serving_env import vllm_environment
from tests.ahead import Ahead, running
from tests.serving.checkpoints import FEATURE_LAYERS, PROPOSALS, write_drafter
from tests.tiny_target import (
    MASK_ID,
    VOCABULARY,
    put_prompts,
    tiny_config,
    write_tiny_target,
)

TEXTS = {"chat": ["carry on", "what now"], "math": ["1 + 1 = ?", "2 * 3 = ?"]}
MAX_TOKENS = 12


def prepare(folder: Path, **settings: object) -> Config:
    """A tiny target, three tiny random drafters and four prompts, in float32."""
    write_tiny_target(folder / "source")
    config = tiny_config(
        folder,
        target={"feature_layers": FEATURE_LAYERS},
        drafters={"DFlash": {"kind": "dflash", "layers": 2, "proposals": PROPOSALS}},
        prompts={
            "evaluation": {
                "source": "generated",
                "datasets": list(TEXTS),
                "prompts_per_dataset": 2,
            }
        },
        benchmark={
            "dtype": "float32",
            "prompts": 2,
            "max_tokens": MAX_TOKENS,
            "max_model_len": 128,
            "kv_cache_gib": 0.05,
            **settings,
        },
    )
    target.run(config, target="tiny")
    for dataset, texts in TEXTS.items():
        put_prompts(config, Paths(config).evaluation(dataset), texts, dataset)
    for seed, variant in enumerate(TRAINED_VARIANTS):
        drafter = Paths(config).drafter("tiny", "DFlash", variant)
        write_drafter(
            drafter,
            seed=seed,
            vocabulary=VOCABULARY,
            enabled=variant == "carryover",
            config={
                "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": FEATURE_LAYERS}
            },
        )
        write_manifest(
            drafter,
            stage="export",
            config=config.stage("export", "tiny", "DFlash", variant),
            started=datetime.now(UTC),
            seed=config.seed,
        )
    return config


def rows_of(config: Config, temperature: float = 0) -> list[dict]:
    path = Paths(config).benchmark("tiny", "DFlash", temperature)
    return [json.loads(line) for line in path.read_text().splitlines()]


def living(of: Callable[[psutil.Process], bool]) -> list[int]:
    """Processes of which `of` is true, and that have not ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if of(process) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def is_own_engine(process: psutil.Process) -> bool:
    return process.ppid() == os.getpid() and "carryover.benchmark.worker" in process.cmdline()


def followers(session: int) -> list[int]:
    """The processes of a session without the one that began it, which may have ended."""
    return living(lambda process: os.getsid(process.pid) == session != process.pid)


def wait_for_followers(session: int) -> None:
    """They have nothing to do without their driver, but may end a little later."""
    deadline = time.monotonic() + 20
    while left := followers(session):
        assert time.monotonic() < deadline, f"{left} outlived their driver"
        time.sleep(0.05)


RUN = """
import sys
from carryover import benchmark
from carryover.config import load_config
benchmark.run(
    load_config(sys.argv[1]), target="tiny", drafter="DFlash", temperature=float(sys.argv[2])
)
"""


@contextlib.contextmanager
def driver(folder: Path, temperature: float) -> Iterator[subprocess.Popen[str]]:
    """The stage with the config in `folder`, in a session of its own."""
    command = [sys.executable, "-c", RUN, str(folder / "config.yaml"), str(temperature)]
    with (
        (folder / "driver.log").open("wb") as log,
        running(command, stderr=log, start_new_session=True) as process,
    ):
        yield process


def run_whole(folder: Path, config: Config) -> Config:
    with driver(folder, 0) as process:
        assert process.wait() == 0, (folder / "driver.log").read_text()
    wait_for_followers(process.pid)
    return config


def run_killed(folder: Path, config: Config) -> tuple[Config, list[dict]]:
    """kill -9 in the middle, then to the end. With the rows that the killed run has kept."""
    output = Paths(config).benchmark("tiny", "DFlash", 1)
    with driver(folder, 1) as process:
        deadline = time.monotonic() + 200
        while not (journals := list(output.parent.glob(".*.journal"))):
            assert process.poll() is None, (folder / "driver.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert followers(process.pid)
    wait_for_followers(process.pid)
    kept = [json.loads(line) for line in journals[0].read_text().splitlines()]
    assert not output.exists()
    with journals[0].open("a") as file:
        file.write('{"variant": "cut sho')  # as a crash in the middle of a write would
    with driver(folder, 1) as process:
        assert process.wait() == 0, (folder / "driver.log").read_text()
    return config, kept


@pytest.fixture(scope="module")
def ahead(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ahead]:
    """What the chosen tests need of both: engines spend most of their time on one core, to start.

    Prepared one after the other: torch has one random generator for all threads.
    """
    chosen = [item for item in request.session.items if item.path == request.path]
    needed = {name for item in chosen for name in getattr(item, "fixturenames", ())}
    functions = {}
    if "interleaved" in needed:
        folder = tmp_path_factory.mktemp("interleaved")
        functions["interleaved"] = partial(run_whole, folder, prepare(folder))
    if "killed" in needed:
        folder = tmp_path_factory.mktemp("killed")
        config = prepare(folder, interleave=False, warmup_prompts=0)
        functions["killed"] = partial(run_killed, folder, config)
    with Ahead(functions) as begun:
        yield begun


@pytest.fixture(scope="module")
def interleaved(ahead: Ahead) -> Config:
    """Of a finished benchmark at temperature 0, with the variants in turn."""
    return ahead("interleaved")


@pytest.fixture(scope="module")
def killed(ahead: Ahead) -> tuple[Config, list[dict]]:
    """Of one at temperature 1, one variant after another, and what it had when it was killed."""
    return ahead("killed")


def test_every_prompt_is_measured_once_by_every_variant_in_rotating_order(
    interleaved: Config,
) -> None:
    rows = rows_of(interleaved)
    assert len(rows) == 4 * 4
    groups = [rows[i : i + 4] for i in range(0, 16, 4)]
    for group in groups:
        assert {row["variant"] for row in group} == set(benchmark.VARIANTS)
        assert len({(row["dataset"], row["prompt_id"]) for row in group}) == 1
        assert [row["order"] for row in group] == [0, 1, 2, 3]
    # Over four prompts each variant was first once.
    assert {group[0]["variant"] for group in groups} == set(benchmark.VARIANTS)
    assert [group[0]["dataset"] for group in groups] == ["chat", "chat", "math", "math"]
    for row in rows:
        assert (row["target"], row["drafter"], row["temperature"]) == ("tiny", "DFlash", 0)
        assert row["seconds"] > 0


def test_outputs_are_the_targets_own_greedy_tokens(interleaved: Config) -> None:
    """With every drafter: speculation changes the speed, never the output."""
    model, tokenizer = target.load_target(Paths(interleaved).target("tiny"), "float32")
    texts = {p: t for texts in TEXTS.values() for t in texts for p in [t]}
    rows = rows_of(interleaved)
    for text in texts:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        prompt_tokens = len(ids)
        while len(ids) < prompt_tokens + MAX_TOKENS and (
            len(ids) == prompt_tokens or ids[-1] != tokenizer.eos_token_id
        ):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        matching = [row for row in rows if row["output_ids"] == ids[prompt_tokens:]]
        assert {row["variant"] for row in matching} == set(benchmark.VARIANTS)
        for row in matching:
            assert row["prompt_tokens"] == prompt_tokens
            assert row["output_tokens"] == len(row["output_ids"])


def test_counts_of_rounds_and_accepted_tokens_agree_with_the_output(interleaved: Config) -> None:
    for row in rows_of(interleaved):
        if row["variant"] == "autoregressive":
            assert (row["rounds"], row["accepted"]) == (row["output_tokens"] - 1, 0)
            continue
        assert len(row["accepted_per_position"]) == PROPOSALS
        assert sum(row["accepted_per_position"]) == row["accepted"]
        # A position counts only when all before it were accepted.
        assert row["accepted_per_position"] == sorted(row["accepted_per_position"], reverse=True)
        # One token from the prefill, then a round commits its accepted ones and one more; the last
        # round may run past the end.
        committed = 1 + row["accepted"] + row["rounds"]
        assert row["output_tokens"] <= committed <= row["output_tokens"] + PROPOSALS


def test_the_manifest_holds_the_engines_facts(interleaved: Config) -> None:
    manifest = read_manifest(
        Paths(interleaved).benchmark("tiny", "DFlash", 0),
        stage="benchmark",
        config=interleaved.stage("benchmark", "tiny", "DFlash"),
        verify=True,
    )
    found = manifest["extra"]["engines"]
    assert set(found) == set(benchmark.VARIANTS)
    assert all(facts["startup_seconds"] > 0 for facts in found.values())
    assert all(100 < facts["peak_rss_mib"] < 4000 for facts in found.values())
    assert set(manifest["inputs"]) == {"target", *TEXTS, *TRAINED_VARIANTS}


def test_a_killed_run_leaves_no_engine_and_goes_on_where_it_stopped(
    killed: tuple[Config, list[dict]],
) -> None:
    config, kept = killed
    assert 0 < len(kept) < 16
    rows = rows_of(config, 1)
    assert len(rows) == 16
    # What was measured before is there unchanged, its wall time too.
    assert rows[: len(kept)] == kept
    assert not list(Paths(config).benchmark("tiny", "DFlash", 1).parent.glob(".*.journal"))
    assert {row["temperature"] for row in rows} == {1.0}


def test_too_large_a_kv_cache_is_one_line_and_leaves_no_engine(tmp_path: Path) -> None:
    config = prepare(tmp_path, kv_cache_gib=1e5)
    with pytest.raises(CarryoverError, match=r"autoregressive engine failed: .*memory") as caught:
        benchmark.run(config, target="tiny", drafter="DFlash", temperature=0)
    assert "\n" not in str(caught.value)
    assert ".autoregressive.log" in caught.value.fix
    assert "lower benchmark.kv_cache_gib" in caught.value.fix
    assert living(is_own_engine) == []
    assert not Paths(config).benchmark("tiny", "DFlash", 0).exists()


def test_a_prompt_that_does_not_fit_is_named_before_any_engine_starts(tmp_path: Path) -> None:
    config = prepare(tmp_path)
    prompts = put_prompts(config, Paths(config).evaluation("math"), ["x" * 200], "math")
    with pytest.raises(CarryoverError, match=f"{prompts[0].id} .*max_model_len"):
        benchmark.run(config, target="tiny", drafter="DFlash", temperature=0)
    assert not list(Paths(config).benchmark("tiny", "DFlash", 0).parent.glob("*.log"))


def test_a_drafter_of_another_config_is_refused(tmp_path: Path) -> None:
    config = prepare(tmp_path)
    config = load_config(tmp_path / "config.yaml", ["training.baseline.steps=7"])
    with pytest.raises(CarryoverError, match=r"baseline.*another config.*steps"):
        benchmark.run(config, target="tiny", drafter="DFlash", temperature=0)


def test_a_worker_killed_for_memory_is_reported_as_such(tmp_path: Path) -> None:
    log = tmp_path / "w.log"
    with EngineProcess("carryover.benchmark.worker", {}, log, "control", REMEDIES) as worker:
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(CarryoverError, match="control engine was killed by SIGKILL") as caught:
            worker.receive()
    assert "memory" in caught.value.fix
    assert "w.log" in caught.value.fix


@pytest.mark.parametrize(
    ("failure", "remedy"),
    [
        # vLLM 0.32's own messages.
        (
            "ValueError: Available memory on node 0 (1.0/24.0 GiB) on kv cache allocation is less "
            "than requested memory for kv (2.0 GiB).",
            "lower benchmark.kv_cache_gib",
        ),
        (
            "ValueError: To serve at least one request with the model's max seq len (1024), (0.1 "
            "GiB KV cache is needed, which is larger than the available KV cache memory (0.0 GiB).",
            "Raise benchmark.kv_cache_gib, or lower benchmark.max_model_len",
        ),
        ("ValueError: No available memory for the cache blocks.", "lower benchmark.kv_cache_gib"),
        ("ModuleNotFoundError: No module named 'vllm'", "make setup"),
        ("ValueError: something else", ""),
    ],
)
def test_an_engines_failure_says_what_to_do(tmp_path: Path, failure: str, remedy: str) -> None:
    """A real worker that fails with this message, in place of an engine."""
    (tmp_path / "failing.py").write_text(
        "from carryover.engine_process import run_worker\n"
        "def body(channel):\n"
        f"    kind = type({failure.partition(':')[0]!r}, (Exception,), {{}})\n"
        f"    raise kind({failure.partition(': ')[2]!r})\n"
        "run_worker(body)\n"
    )
    log = tmp_path / "w.log"
    environment = {"PYTHONPATH": str(tmp_path)}
    with (
        EngineProcess("failing", environment, log, "control", REMEDIES) as worker,
        pytest.raises(CarryoverError) as caught,
    ):
        worker.receive()
    assert caught.value.reason == f"the control engine failed: {failure.rstrip('.')}"
    assert remedy in caught.value.fix
    assert caught.value.fix.endswith(f"See {log}.")
    if not remedy:
        assert caught.value.fix == f"See {log}."


def test_engines_run_in_the_model_runner_that_the_plugin_corrects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for cuda in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        assert vllm_environment()["VLLM_USE_V2_MODEL_RUNNER"] == "0"


def test_an_idle_engine_leaves_the_cores_alone(tmp_path: Path) -> None:
    """Else three waiting engines would slow the one that is measured."""
    config = prepare(tmp_path)
    arguments = benchmark.engine_arguments(config, "tiny", "DFlash", None)
    environment = vllm_environment()
    log = tmp_path / "w.log"
    with EngineProcess("carryover.benchmark.worker", environment, log, "idle", REMEDIES) as worker:
        worker.send({"engine": arguments})
        worker.receive()
        worker.send({"prompt_ids": [10, 11, 12], "sampling": {"max_tokens": 4}})
        assert len(worker.receive()["output_ids"]) <= 4
        time.sleep(0.5)  # the threads' last spin
        before = _cpu_seconds(worker.pid)
        time.sleep(2)
        assert _cpu_seconds(worker.pid) - before < 0.1


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_interleaving_gives_every_variant_every_place_equally_often() -> None:
    tasks = [Task("d", f"p{number}", [1], {}) for number in range(8)]
    groups = _groups(tasks, interleave=True)
    for variant in benchmark.VARIANTS:
        places = [cell.order for group in groups for cell in group if cell.variant == variant]
        assert sorted(places) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_acceptance_since_an_earlier_reading() -> None:
    now = Acceptance(rounds=9, accepted=12, per_position=[7, 5])
    assert now.since(Acceptance(4, 5, [3, 2])) == Acceptance(5, 7, [4, 3])
    assert now.since(Acceptance(0, 0, [])) == now


def test_a_journal_of_another_key_is_removed(tmp_path: Path) -> None:
    output, warmer = tmp_path / "temperature-0.jsonl", tmp_path / "temperature-0.7.jsonl"
    Journal(output, "aaaa").append([{"n": 0}])
    Journal(warmer, "aaaa").append([{"n": 7}])
    assert Journal(output, "bbbb").rows == []
    again = Journal(output, "aaaa")
    assert again.rows == []
    assert Journal(warmer, "aaaa").rows == [{"n": 7}]
    again.append([{"n": 1}])
    again.append([{"n": 2}])
    assert Journal(output, "aaaa").rows == [{"n": 1}, {"n": 2}]
    again.remove()
    assert Journal(output, "aaaa").rows == []
