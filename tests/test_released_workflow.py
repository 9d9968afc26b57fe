"""The workflow with a released drafter: what is planned, and what another one runs again."""

import json
import re
from pathlib import Path

import pytest

from tests.test_workflow import DEFAULT_JOBS, copy, planned, run  # noqa: F401  (copy: a fixture)

OVERLAY = """
drafters: {DFlash: {initialize: "path:drafter", vocabulary: full, qk_norm: true}}
training: {baseline: {steps: 0}}
"""
ARGUMENTS = ("--configfile", "warm.yaml")


@pytest.fixture(scope="module")
def warm(copy: Path) -> Path:  # noqa: F811
    """A clone with an overlay that starts from the drafter in `drafter/`."""
    folder = copy.parent / "warm"
    run(["cp", "-r", str(copy), str(folder)], copy)
    (folder / "warm.yaml").write_text(OVERLAY)
    (folder / "drafter").mkdir()
    (folder / "drafter" / "config.json").write_text(json.dumps({"made": 1}))
    (folder / "drafter" / "model.safetensors").write_bytes(b"weights")
    return folder


def test_the_drafter_is_one_more_job_and_zero_steps_the_same_dag(warm: Path) -> None:
    assert planned(warm, *ARGUMENTS) == DEFAULT_JOBS | {"released": 1}


def test_another_drafter_at_the_same_path_runs_again_what_comes_of_it(warm: Path) -> None:
    summary = run(["snakemake", "--summary", *ARGUMENTS], warm).stdout
    for name in re.findall(r"^(results/\S+)", summary, re.MULTILINE):
        (warm / name).parent.mkdir(parents=True, exist_ok=True)
        (warm / name).write_text("made by the test\n")
    touched = run(["snakemake", "--touch", "--cores", "1", *ARGUMENTS], warm)
    assert touched.returncode == 0, touched.stdout
    assert planned(warm, *ARGUMENTS) == {}

    (warm / "drafter" / "model.safetensors").write_bytes(b"other weights")
    again = planned(warm, *ARGUMENTS)
    assert set(again) == {
        "released", "train_baseline", "train_further", "export", "benchmark", "report", "all",
    }  # fmt: skip
    (warm / "drafter" / "model.safetensors").write_bytes(b"weights")
    assert planned(warm, *ARGUMENTS) == {}
