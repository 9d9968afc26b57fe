"""The workflow without its stages: what is planned, what a change runs again, what users read."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
STAGE = REPOSITORY / "workflow" / "scripts" / "stage.py"
UNLOCK = REPOSITORY / "scripts" / "unlock.py"
# What the workflow consists of: enough for a copy that tests may change.
PARTS = ("Snakefile", "config", "envs", "profiles", "src", "workflow")

DEFAULT_JOBS = {
    "target": 1,
    "train_prompts": 1,
    "evaluation_prompts": 1,
    "responses": 1,
    "features": 1,
    "train_baseline": 1,
    "train_further": 2,
    "export": 3,
    "benchmark": 1,
    "report": 1,
    "all": 1,
}


def run(command: list[str], where: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run with this interpreter's environment on PATH; stdout and stderr together."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command,
        cwd=where,
        env={**os.environ, "PATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )


def planned(where: Path, *arguments: str) -> dict[str, int]:
    """The job counts of a dry run; empty when there is nothing to do."""
    done = run(["snakemake", "-n", *arguments], where)
    assert done.returncode == 0, done.stdout
    table = re.search(r"^job +count\n[- ]+\n((?:\w+ +\d+\n)+)", done.stdout, re.MULTILINE)
    if table is None:
        assert "Nothing to be done" in done.stdout, done.stdout
        return {}
    counts = {name: int(count) for name, count in map(str.split, table[1].splitlines())}
    assert counts.pop("total") == sum(counts.values())
    return counts


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workflow in a folder of its own, without results: a bare clone."""
    folder = tmp_path_factory.mktemp("clone")
    for name in PARTS:
        source = REPOSITORY / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder / name)
    return folder


@pytest.fixture(scope="module")
def finished(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another copy in which every output exists and is recorded as made by this workflow."""
    folder = tmp_path_factory.mktemp("finished") / "clone"
    shutil.copytree(copy, folder)
    summary = run(["snakemake", "--summary"], folder).stdout
    outputs = re.findall(r"^(results/\S+)", summary, re.MULTILINE)
    assert len(outputs) > 20, summary
    for name in outputs:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("made by the test\n")
    touched = run(["snakemake", "--touch", "--cores", "1"], folder)
    assert touched.returncode == 0, touched.stdout
    return folder


def test_default_scale_is_planned_on_a_bare_clone(copy: Path) -> None:
    assert planned(copy) == DEFAULT_JOBS
    # A dry run writes no results, not even the config that the stages read.
    assert not (copy / "results").exists()


def test_test_scale_is_the_same_dag(copy: Path) -> None:
    assert planned(copy, "--configfile", "config/test.yaml") == DEFAULT_JOBS


def test_paper_scale_is_planned_on_slurm(copy: Path) -> None:
    counts = planned(
        copy, "--configfile", "config/paper.yaml", "--workflow-profile", "profiles/slurm"
    )
    # Two targets, two drafters each, two temperatures; SmolLM2 is taken out by the overlay.
    assert counts == {
        "target": 2,
        "train_prompts": 1,
        "evaluation_prompts": 1,
        "responses": 2,
        "train_baseline": 4,
        "train_further": 8,
        "export": 12,
        "benchmark": 8,
        "report": 1,
        "all": 1,
    }
    page = (REPOSITORY / "docs" / "paper-scale.md").read_text()
    rows = re.findall(r"^\| \**(\w+)\** \| \**(\d+)\** \|", page, re.MULTILINE)
    written = {name: int(count) for name, count in rows}
    assert written.pop("total") == sum(counts.values())
    assert written == counts


def test_a_mistake_in_the_config_is_one_readable_line(copy: Path) -> None:
    done = run(["snakemake", "-n", "--config", "training={anchor: 3}"], copy)
    assert done.returncode != 0
    assert "Traceback" not in done.stdout and "  File " not in done.stdout
    # Before it, Snakemake says which profile and which files it read.
    *_, error = done.stdout.splitlines()
    assert error.startswith("error: --config: ")
    assert "training.anchor:" in error and "training.anchors" in error


# /proc holds no folders of ours, whatever the user's rights; the other is a file.
@pytest.mark.parametrize("results", ["/proc/carryover", "Snakefile", "Snakefile/deep"])
def test_unwritable_results_are_one_readable_line(copy: Path, results: str) -> None:
    done = run(["snakemake", "--cores", "1", "--config", f"results_dir={results}"], copy)
    assert done.returncode != 0
    assert "Traceback" not in done.stdout and "  File " not in done.stdout
    assert re.search(rf"^error: .*{results}.*results_dir", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("carry: {rows: draft_tokens, distinction: none}", "carry.rows"),
        ("carry: {distinction: projector}", "carry.distinction"),
        (
            "drafters: {DFlash: {kind: markov, slot_layout: anchor_first}}",
            "drafters.DFlash.slot_layout",
        ),
    ],
)
def test_what_cannot_be_benchmarked_is_refused_before_the_first_job_and_can_be_trained(
    finished: Path, change: str, key: str
) -> None:
    (finished / "change.yaml").write_text(f"{change}\n")
    done = run(["snakemake", "-n", "--configfile", "change.yaml"], finished)
    assert done.returncode != 0
    assert re.search(rf"^error: {key}: .* Set it to ", done.stdout, re.MULTILINE)
    assert "Traceback" not in done.stdout and "rule train" not in done.stdout
    one = "results/training/SmolLM2-135M/DFlash/carryover.json"
    assert planned(finished, one, "--configfile", "change.yaml")["train_further"] == 1


def test_linters_are_clean() -> None:
    done = run(["snakemake", "--lint"], REPOSITORY)
    assert done.returncode == 0, done.stdout
    done = run(["snakefmt", "--check", "Snakefile", "workflow"], REPOSITORY)
    assert done.returncode == 0, done.stdout


def test_the_table_is_a_target_and_a_finished_tree_has_nothing_to_do(finished: Path) -> None:
    assert planned(finished) == {}
    (finished / "results/tables/speedup.csv").rename(finished / "kept")
    try:
        assert planned(finished, "results/tables/speedup.csv") == {"report": 1}
    finally:
        (finished / "kept").rename(finished / "results/tables/speedup.csv")


@pytest.mark.parametrize(
    ("change", "again"),
    [
        # How often is logged decides no result.
        ("training: {log_every: 7}", {}),
        ("report: {confidence: 0.9}", {"report": 1, "all": 1}),
        (
            "training: {further: {steps: 201}}",
            {"train_further": 2, "export": 2, "benchmark": 1, "report": 1, "all": 1},
        ),
    ],
)
def test_a_change_runs_again_what_depends_on_it(
    finished: Path, change: str, again: dict[str, int]
) -> None:
    (finished / "change.yaml").write_text(f"{change}\n")
    assert planned(finished, "--configfile", "change.yaml") == again


@pytest.mark.parametrize("name", ["__init__.py", "page.html.j2"])
def test_changed_code_runs_its_stage_again(finished: Path, name: str) -> None:
    module = finished / "src/carryover/report" / name
    before = module.read_text()
    module.write_text(before + "# a change\n")
    try:
        assert planned(finished) == {"report": 1, "all": 1}
    finally:
        module.write_text(before)


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A package that is called `carryover` and does what its first argument says, as Python."""
    package = tmp_path / "package" / "carryover"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys\nexec(sys.argv[1])\n")
    return package.parent


def test_stage_keeps_output_and_exit_code(tmp_path: Path, stand_in: Path) -> None:
    log = tmp_path / "logs" / "stage.log"
    code = "print('to stdout', flush=True); print('to stderr', file=sys.stderr); sys.exit(3)"
    done = run([sys.executable, str(STAGE), str(log), code], tmp_path, PYTHONPATH=str(stand_in))
    assert done.returncode == 3
    assert done.stdout == log.read_text() == "to stdout\nto stderr\n"


def test_stage_ends_what_a_killed_stage_leaves_behind(tmp_path: Path, stand_in: Path) -> None:
    # As torchrun does: a child in its own session that holds the pipe, then a kill -9.
    code = (
        "import os, subprocess\n"
        "child = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    log = tmp_path / "stage.log"
    start = time.monotonic()
    done = run([sys.executable, str(STAGE), str(log), code], tmp_path, PYTHONPATH=str(stand_in))
    assert done.returncode == 128 + signal.SIGKILL
    assert time.monotonic() - start < 60
    child = int(log.read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_stage_waits_for_the_copy_that_a_killed_run_left(tmp_path: Path, stand_in: Path) -> None:
    log = tmp_path / "stage.log"
    environment = {**os.environ, "PYTHONPATH": str(stand_in)}
    slow = "import time; open('begun', 'w'); time.sleep(3); open('done', 'w')"
    with subprocess.Popen(
        [sys.executable, str(STAGE), str(log), slow], cwd=tmp_path, env=environment
    ) as first:
        deadline = time.monotonic() + 60
        while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        # Only the supervisor dies, as when its Snakemake takes it along: the stage goes on.
        first.kill()
    check = "import os; print(os.path.exists('done'))"
    done = run([sys.executable, str(STAGE), str(log), check], tmp_path, PYTHONPATH=str(stand_in))
    assert done.returncode == 0
    assert "waiting for its end" in done.stdout
    assert log.read_text() == "True\n"


def test_unlock_removes_a_stale_lock_and_leaves_a_live_one(tmp_path: Path) -> None:
    locks = tmp_path / ".snakemake" / "locks"
    locks.mkdir(parents=True)
    (locks / "0.input.lock").write_text("a\n")
    programs = tmp_path / "bin"
    programs.mkdir()
    snakemake = programs / "snakemake"
    # Stands in for Snakemake: sleeps as a run, removes the lock when asked to.
    snakemake.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, sys, time\n"
        "if '--unlock' in sys.argv:\n"
        "    pathlib.Path('.snakemake/locks/0.input.lock').unlink()\n"
        "else:\n"
        "    print('running', flush=True)\n"
        "    time.sleep(60)\n"
    )
    snakemake.chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    with subprocess.Popen([str(snakemake)], cwd=tmp_path, stdout=subprocess.PIPE) as live:
        assert live.stdout is not None
        live.stdout.readline()
        refused = subprocess.run(
            [sys.executable, str(UNLOCK)],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        live.kill()
    assert refused.returncode == 2
    assert f"process {live.pid}" in refused.stderr
    assert (locks / "0.input.lock").exists()
    removed = subprocess.run(
        [sys.executable, str(UNLOCK)], cwd=tmp_path, env={**os.environ, "PATH": path}, check=False
    )
    assert removed.returncode == 0
    assert not (locks / "0.input.lock").exists()


def test_setup_says_which_python_is_missing(tmp_path: Path) -> None:
    script = str(REPOSITORY / "scripts" / "setup.sh")
    done = run([script, str(tmp_path / "venv"), "python3.11-absent"], REPOSITORY)
    assert done.returncode == 2
    assert done.stdout.startswith("error: there is no python3.11-absent here. Install Python 3.11")
    assert not (tmp_path / "venv").exists()


def test_the_two_locks_name_the_same_torch() -> None:
    torch, rest = (
        set(re.findall(r"^torch==.+$", (REPOSITORY / "envs" / name).read_text(), re.MULTILINE))
        for name in ("cpu-torch.lock", "cpu.lock")
    )
    assert torch == rest and len(torch) == 1
