"""The benchmarks run, on toy shapes: what they would report, not how fast it is."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import flops, measure
from benchmarks.measure import arguments, in_turn, median_ratio, ratio
from benchmarks.shapes import TINY, random_batch, random_drafter, random_target
from carryover.training.dvd import Blocks
from carryover.training.objective import draft_loss, label

REPOSITORY = Path(__file__).parents[1]


def run(name: str, out: Path, *options: str) -> dict:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--tiny", "--out", str(out), *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    content = json.loads(out.read_text())
    assert content["benchmark"] == name
    provenance = content["provenance"]
    assert provenance["seed"] == 42 and provenance["packages"]["torch"] == torch.__version__
    assert {"before", "after"} == set(provenance["load_average"])
    return content


def test_gpu_script_runs_on_cpu_and_its_two_attentions_agree(tmp_path: Path) -> None:
    content = run("gpu_training", tmp_path / "gpu.json", "--rounds", "2")
    assert content["attention"]["equal"]
    assert content["attention"]["largest_difference"] < 1e-4
    steps = content["steps"]
    assert steps["anchors_per_s"]["baseline_step"] > steps["anchors_per_s"]["dvd_step"] > 0


def test_gpu_script_needs_torch_and_transformers_alone() -> None:
    """Its imports, in a process that cannot find what a bare GPU machine may lack."""
    code = """
import sys
for name in ('pydantic', 'pyarrow', 'deepspeed', 'vllm', 'pandas'):
    sys.modules[name] = None
import benchmarks.gpu_training
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]


def test_step_benchmark_runs(tmp_path: Path) -> None:
    content = run("training_step", tmp_path / "step.json", "--rounds", "2")
    steps = content["steps"]
    assert 0 < steps["first_draft_accepted"] < 1
    assert len(steps["times"]["dvd_step"]["seconds"]) == 2
    if importlib.util.find_spec("speculators"):
        for name in ("full", "reduced"):
            head = content["against_speculators"][name]
            assert head["fp32_difference_of_loss_and_gradients"] < 1e-4


@pytest.mark.long
def test_serving_latency_benchmark_runs(tmp_path: Path) -> None:
    """It stops by itself where a round carries other rows than it is to."""
    content = run("serving_latency", tmp_path / "latency.json", "--rounds", "5")
    for batch in ("1", "8"):
        found = content["batches"][batch]
        assert len(found["carry"]["seconds"]) == len(found["without"]["seconds"]) == 5


def test_memory_benchmark_measures_one_case() -> None:
    command = [sys.executable, "-m", "benchmarks.training_memory", "--tiny"]
    command += ["--case", "dvd_step", "300", "16"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["before_mib"] > 50 and measured["step_mib"] >= 0


@pytest.mark.parametrize("bad", ["", "a_file/out.json"], ids=["a folder", "below a file"])
def test_where_nothing_can_be_written_is_said_before_the_measurement(
    tmp_path: Path, bad: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a_file").touch()
    with pytest.raises(SystemExit):
        arguments("training_step", "").parse_args(["--out", str(tmp_path / bad)])
    assert f"{tmp_path / bad} cannot be written" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a_file"]


def test_the_folder_of_results_is_looked_at_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a_file").touch()
    monkeypatch.setattr(measure, "RESULTS", tmp_path / "a_file")
    with pytest.raises(SystemExit):
        arguments("training_step", "").parse_args([])


def test_all_steps_run_in_every_round_in_both_orders() -> None:
    calls: list[str] = []
    seconds = in_turn({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=2)
    assert calls == ["b", "a", "a", "b", "b", "a"]
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2}


def test_ratio_is_of_sums_and_its_interval_is_paired() -> None:
    slow_minute = [1.0, 1.0, 10.0, 1.0]
    result = ratio([2 * s for s in slow_minute], slow_minute, seed=0)
    assert result["ratio"] == result["low"] == result["high"] == 2.0
    spread = ratio([1.0, 3.0], [1.0, 1.0], seed=0)
    assert (spread["low"], spread["ratio"], spread["high"]) == (1.0, 2.0, 3.0)


def test_median_ratio_is_of_pairs_and_one_interruption_changes_little() -> None:
    bottom = [1.0, 2.0, 3.0, 4.0, 5.0]
    top = [1.1, 2.2, 300.0, 4.4, 5.5]
    result = median_ratio(top, bottom, seed=0)
    assert result["ratio"] == result["low"] == 1.1 and result["rounds"] == 5


@pytest.mark.parametrize("carried", [False, True])
def test_flops_are_those_of_torch_s_own_counter(carried: bool) -> None:
    """Forward and backward of a drafter, against torch counting the products that it runs."""
    from torch.utils.flop_counter import FlopCounterMode

    from carryover.drafter.model import Carry

    shape = TINY
    target = random_target(shape, 0, torch.float32)
    drafter, vocabulary = random_drafter(shape, target, 0, None, carry=True)
    batch = random_batch(shape, 0, torch.float32, "cpu", vocabulary)
    blocks = Blocks(batch.anchors, batch.valid)
    if carried:
        size = (*batch.anchors.shape, shape.proposals)
        blocks.carry = Carry(
            torch.randn(*size, drafter.config.feature_size),
            batch.anchors[..., None] + torch.arange(1, shape.proposals + 1),
            torch.ones(size, dtype=torch.bool),
        )
    labels = label(batch, blocks, vocabulary, shape.proposals, 4.0)
    with FlopCounterMode(display=False) as counter:
        draft_loss(drafter, vocabulary, batch, blocks, labels).loss.backward()
    want = counter.get_total_flops()
    got = flops.draft(shape, shape.vocabulary, carried=carried, backward=True)
    assert got == pytest.approx(want, rel=0.02)
