"""Atomic writes, manifests and provenance, and the progress lines."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carryover import progress as progress_module
from carryover.artifacts import (
    atomic_path,
    config_hash,
    disk_is_full,
    failed_write,
    git_state,
    hardware,
    package_versions,
    read_manifest,
    write_json,
    write_manifest,
)
from carryover.errors import CarryoverError
from carryover.progress import Progress

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
CONFIG = {"seed": 1, "training": {"steps": 10, "clip": 1.0}}


# Atomic writes


def test_atomic_path_replaces_only_on_success(tmp_path):
    path = tmp_path / "new" / "file.txt"
    with atomic_path(path) as temporary:
        assert temporary.parent == path.parent and temporary.suffix == ".txt"
        temporary.write_text("one")
        assert not path.exists()
    assert path.read_text() == "one"
    with pytest.raises(RuntimeError, match="midway"), atomic_path(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError("midway")
    assert path.read_text() == "one"
    assert os.listdir(path.parent) == ["file.txt"]


def test_a_killed_writer_leaves_the_old_file_and_no_entry(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    code = (
        "import os, signal, sys; from carryover.artifacts import atomic_path\n"
        "with atomic_path(sys.argv[1]) as temporary:\n"
        "    temporary.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)])
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    assert len(os.listdir(tmp_path)) == 2, "the temporary file of the killed process"
    manifest = write_manifest(tmp_path, stage="s", config=CONFIG, started=NOW, seed=1)
    assert list(manifest["files"]) == ["file.txt"]
    alive = tmp_path / f".tmp-{os.getppid()}-file.txt"
    alive.touch()
    with atomic_path(path) as temporary:
        temporary.write_text("new")
    assert sorted(os.listdir(tmp_path)) == [alive.name, "file.txt", "manifest.json"]


def test_full_disk_is_one_line(tmp_path):
    path = tmp_path / "file"
    # The kernel's own error: this device is always full.
    with (
        pytest.raises(CarryoverError, match="no space left") as caught,
        atomic_path(path),
        open("/dev/full", "wb", buffering=0) as full,
    ):
        full.write(b"x")
    assert str(path) in str(caught.value) and "run the same command again" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_full_disk_of_a_foreign_writer_is_recognised(tmp_path):
    message = "I/O error: No space left on device (os error 28)"
    with pytest.raises(CarryoverError, match="no space left"), atomic_path(tmp_path / "file"):
        raise RuntimeError(message)


@pytest.mark.parametrize(("free", "full"), [(4096, True), (10**10, False)])
def test_full_disk_of_torch_is_recognised_by_the_disk(monkeypatch, tmp_path, free, full):
    """torch.save's message is the same for every failed write."""
    asked = []

    def disk_usage(path):
        asked.append(path)
        return SimpleNamespace(free=free)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")
    assert disk_is_full(error, tmp_path / "absent" / "file") is full
    assert asked == [tmp_path]
    assert not disk_is_full(RuntimeError("shapes differ"), tmp_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda results: results.mkdir(), None),
        (lambda results: os.listdir("/absent"), None),
        (lambda results: (results / "absent").read_bytes(), None),
        (lambda results: Path("/proc/self/mem").read_bytes(), None),
        (lambda results: (results / "file" / "a").mkdir(), "file/a: Not a directory"),
        (lambda results: (results / "file").mkdir(), "file: .*file is a file, not a folder"),
        (lambda results: Path("/dev/full").write_text("x"), "no space left"),
    ],
)
def test_a_failed_write_is_told_from_a_fault(tmp_path, make, message):
    results = tmp_path / "results"
    results.mkdir()
    (results / "file").touch()
    with pytest.raises(OSError) as caught:
        make(results)
    told = failed_write(caught.value, results)
    if message is None:
        assert told is None
    else:
        assert re.search(message, str(told)) and "\n" not in str(told)
        assert "results_dir" in str(told)


def test_results_where_no_folder_can_be_are_one_line():
    results = Path("/proc/carryover/results")  # whatever the user's rights
    with pytest.raises(OSError) as caught:
        (results / "targets").mkdir(parents=True)
    assert str(failed_write(caught.value, results)).startswith("cannot write /proc/carryover: No ")


@contextmanager
def ordinary_user():
    """File permissions do not bind root, so root becomes nobody meanwhile."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_unwritable_folders_are_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    for path, reason in (
        (tmp_path / "file" / "x", "is a file, not a folder"),
        (tmp_path / "file" / "deep" / "x", "Not a directory"),
        (tmp_path, "Is a directory"),
    ):
        with pytest.raises(CarryoverError, match=f"cannot write .*{reason}") as caught:
            write_json(path, {})
        assert "results_dir" in str(caught.value) and "\n" not in str(caught.value)
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    with ordinary_user(), pytest.raises(CarryoverError, match=r"cannot write .*Permission"):
        write_json(folder / "x", {})
    assert os.listdir(folder) == []


def test_write_json_round_trip_and_refusal_of_nan(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"ü": [1, 2.5, None]})
    assert json.loads(path.read_text(encoding="utf-8")) == {"ü": [1, 2.5, None]}
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"x": float("nan")})
    assert json.loads(path.read_text(encoding="utf-8")) == {"ü": [1, 2.5, None]}


# Hashes

scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=4)
trees = st.dictionaries(st.text(max_size=3), scalars | st.lists(scalars, max_size=3), max_size=4)


@given(trees)
def test_config_hash_ignores_key_order(tree):
    backwards = dict(reversed(tree.items()))
    assert config_hash(tree) == config_hash(backwards)
    assert len(config_hash(tree)) == 16 and int(config_hash(tree), 16) >= 0


def test_config_hash_is_sha256_of_canonical_json():
    text = b'{"a":[1,2.5],"b":{"c":null,"d":2}}'
    expected = hashlib.sha256(text).hexdigest()[:16]
    assert config_hash({"b": {"d": 2.0, "c": None}, "a": (1, 2.5)}) == expected
    assert config_hash({"a": 1}) != config_hash({"a": "1"}) != config_hash({"a": True})
    assert config_hash([1, 2]) != config_hash([2, 1])


# Manifests


@pytest.fixture
def output(tmp_path):
    """A finished output: a folder with a file at two depths."""
    folder = tmp_path / "out"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"0123456789")
    (folder / "deep" / "b.bin").write_bytes(b"")
    write_manifest(folder, stage="responses", config=CONFIG, started=NOW, seed=7, extra={"rows": 3})
    return folder


def test_manifest_of_a_folder(output):
    manifest = read_manifest(output, stage="responses", config=CONFIG, verify=True)
    assert manifest == json.loads((output / "manifest.json").read_text())
    assert manifest["files"] == {
        "a.bin": {"bytes": 10, "sha256": hashlib.sha256(b"0123456789").hexdigest()},
        "deep/b.bin": {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()},
    }
    assert manifest["config"] == CONFIG
    assert manifest["config_hash"] == config_hash(CONFIG)
    assert manifest["extra"] == {"rows": 3}
    provenance = manifest["provenance"]
    assert provenance["seed"] == 7
    assert provenance["started"] == "2026-01-02T03:04:05+00:00"
    assert datetime.fromisoformat(provenance["ended"]) > NOW
    assert provenance["python"] == ".".join(map(str, sys.version_info[:3]))


def test_manifest_of_a_file_and_its_inputs(output, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("{}\n")
    other = tmp_path / "prompts.jsonl"
    other.write_text("{}\n")
    manifest = write_manifest(
        file,
        stage="benchmark",
        config=CONFIG,
        started=NOW,
        seed=1,
        inputs={"responses": output, "prompts": other},
    )
    assert (tmp_path / "rows.jsonl.manifest.json").is_file()
    assert list(manifest["files"]) == ["rows.jsonl"]
    of_output = hashlib.sha256((output / "manifest.json").read_bytes()).hexdigest()
    assert manifest["inputs"]["responses"]["sha256"] == of_output
    assert manifest["inputs"]["prompts"]["sha256"] == hashlib.sha256(b"{}\n").hexdigest()
    assert read_manifest(file, stage="benchmark", config=CONFIG, verify=True) == manifest
    (output / "manifest.json").unlink()
    with pytest.raises(CarryoverError, match=r"out/manifest\.json is missing"):
        write_manifest(
            file, stage="s", config={}, started=NOW, seed=1, inputs={"responses": output}
        )


def refusal(where: Path, **expected) -> str:
    with pytest.raises(CarryoverError) as caught:
        read_manifest(where, **expected)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_damage_is_named_with_the_way_to_rebuild(output):
    whole = (output / "a.bin").read_bytes()
    rebuild = f"Delete {output} and run `carryover responses` again."

    (output / "a.bin").write_bytes(whole[:4])
    message = refusal(output)
    assert f"{output / 'a.bin'} is truncated: 4 bytes instead of 10" in message
    assert rebuild in message

    (output / "a.bin").write_bytes(whole + b"x")
    assert "a.bin is changed: 11 bytes instead of 10" in refusal(output)

    (output / "a.bin").write_bytes(b"x" * len(whole))
    read_manifest(output)  # the size alone is right
    assert f"{output / 'a.bin'} is damaged" in refusal(output, verify=True)

    (output / "a.bin").unlink()
    assert f"{output / 'a.bin'} is missing" in refusal(output)


def test_an_output_without_a_whole_manifest_is_not_finished(output, tmp_path):
    path = output / "manifest.json"
    text = path.read_text()
    for cut in (0, 1, len(text) // 2, len(text) - 2):
        path.write_text(text[:cut])
        assert f"{path} is damaged" in refusal(output)
    for wrong in ("[]", "{}", "null", '{"files": {"a": 1}}'):
        path.write_text(wrong)
        assert f"{path} is damaged" in refusal(output)
    path.unlink()
    assert "has no manifest" in refusal(output, stage="responses")
    message = refusal(tmp_path / "none", stage="responses")
    assert f"{tmp_path / 'none'} is missing. Run `carryover responses`." == message


def test_another_config_or_stage_is_refused_and_named(output):
    other = {"seed": 1, "training": {"steps": 20, "clip": 1}}
    message = refusal(output, config=other)
    assert "made with another config (training.steps: 10, now 20)" in message
    assert "made by stage responses, not features" in refusal(output, stage="features")
    # 1 and 1.0 are the same value.
    read_manifest(output, config={"training": {"clip": 1, "steps": 10.0}, "seed": 1})


def test_a_time_without_a_zone_is_refused(output):
    with pytest.raises(ValueError, match="time zone"):
        write_manifest(output, stage="s", config={}, started=datetime(2026, 1, 1), seed=1)


# Provenance


def test_git_state_is_that_of_the_checkout():
    package = Path(__file__).resolve().parent.parent / "src" / "carryover"
    command = ["git", "-C", str(package), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    state = git_state()
    if done.returncode == 0:
        assert state is not None
        assert state["commit"] == done.stdout.strip()
        assert isinstance(state["dirty"], bool)
    else:
        assert state is None


def test_versions_come_without_importing():
    code = (
        "import sys; from carryover.artifacts import package_versions; package_versions();"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    import pydantic

    assert package_versions()["pydantic"] == pydantic.VERSION


def test_hardware_names_this_machine(monkeypatch, tmp_path):
    found = hardware()
    assert found["cpu"] and found["cores"] == len(os.sched_getaffinity(0))
    kib = int(Path("/proc/meminfo").read_text().split()[1])
    assert found["memory_gib"] == pytest.approx(kib / 2**20, rel=0.02)
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho 'NVIDIA X, 10 MiB, 1.2'\necho 'NVIDIA Y, 20 MiB, 1.2'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert hardware()["gpus"] == ["NVIDIA X, 10 MiB, 1.2", "NVIDIA Y, 20 MiB, 1.2"]
    fake.write_text("#!/bin/sh\nexit 9\n")
    assert hardware()["gpus"] == []


# Progress


def test_progress_writes_a_line_now_and_then(monkeypatch, capsys):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with Progress(total=100, unit="step", desc="train", done=20) as progress:
        for _ in range(10):
            clock[0] += 4
            progress.update(4, loss=1.23456)
        clock[0] += 40
        progress.update(40)
    lines = capsys.readouterr().err.splitlines()
    # 4 units in 4 s; lines are due at the first update 15 s or more after the last line.
    assert lines == [
        "train: 36/100 step, 1 step/s, 01:04 left, loss 1.235",
        "train: 52/100 step, 1 step/s, 00:48 left, loss 1.235",
        "train: 100/100 step, 1 step/s, 01:20 passed, loss 1.235",
    ]
    assert progress_module.LINE_SECONDS == 15


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_waited_for_does_not_slow_the_rate(monkeypatch, capsys, terminal):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    with Progress(total=40, unit="row", desc="measure") as progress:
        with progress.waiting("starting engines"):
            clock[0] += 60
        clock[0] += 20
        progress.update(20)
    shown = capsys.readouterr().err
    assert "starting engines" in shown
    assert re.search(r"20/40.* 1(\.00)? row/s", shown), shown


def test_progress_is_a_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress(total=4, unit="row", desc="read") as progress:
        progress.update(4, tau=2.5)
    shown = capsys.readouterr().err
    assert "\r" in shown and "read" in shown and "4/4" in shown and "tau=2.5" in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_a_lowered_total_is_shown(monkeypatch, capsys, terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    with Progress(total=100, unit="token", desc="answer") as progress:
        progress.update(10)
        progress.total -= 80
        progress.update(10)
    last = re.split(r"[\r\n]+", capsys.readouterr().err.strip())[-1]
    assert "20/20" in last and progress.total == 20
