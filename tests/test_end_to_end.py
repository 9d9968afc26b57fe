"""The whole DAG on the real 135M target at the test scale, killed once on the way.

The run goes through Snakemake in a copy of the workflow, so that a run in this checkout is left
alone.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from carryover import target
from carryover.config import load_config
from carryover.prompts.render import render

REPOSITORY = Path(__file__).parents[1]
COMMAND = [
    sys.executable, "-m", "snakemake", "--cores", "all", "--configfile", "config/test.yaml",
]  # fmt: skip
COLUMNS = [
    "target", "drafter", "variant", "dataset", "temperature", "acceptance_length",
    "acceptance_length_low", "acceptance_length_high", "speedup", "speedup_low", "speedup_high",
    "rounds", "output_tokens", "prompts",
]  # fmt: skip
VARIANTS = ["autoregressive", "baseline", "control", "carryover"]
DATASETS = ["HumanEval", "math", "translation"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a run whose every process is killed while the baseline trains."""
    folder = tmp_path_factory.mktemp("run")
    for name in ("workflow", "config", "envs", "src", "profiles"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("*.pyc"))
    for name in ("Snakefile", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, folder)
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    results = folder / "results" / "test"
    with (folder / "first.log").open("wb") as log:
        first = subprocess.Popen(
            COMMAND, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        while first.poll() is None and not list(results.glob("training/*/*/baseline-*/step-*10")):
            time.sleep(0.05)
        assert first.poll() is None, (folder / "first.log").read_text()[-3000:]
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    unlock = [sys.executable, str(REPOSITORY / "scripts" / "unlock.py")]
    subprocess.run(unlock, cwd=folder, env=environment, check=True)
    second = subprocess.run(COMMAND, cwd=folder, env=environment, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr[-3000:]
    return results


def test_the_packaged_default_target_is_converted(finished: Path) -> None:
    """The real GGUF of the default config: shapes, dtype, tied head, template, and its sense."""
    folder = finished / "targets" / "SmolLM2-135M"
    weights = load_file(folder / "model.safetensors")
    dtype = load_config(REPOSITORY / "config" / "config.yaml").targets["SmolLM2-135M"].dtype
    assert {weight.dtype for weight in weights.values()} == {getattr(torch, dtype)}
    assert weights["model.embed_tokens.weight"].shape == (49152, 576)
    assert sum(weight.numel() for weight in weights.values()) == 134_515_008

    model, tokenizer = target.load_target(folder, dtype)
    ids = render(tokenizer, "What is the capital of France?", thinking=False)
    for _ in range(12):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert "Paris" in tokenizer.decode(ids[-12:])


def test_the_killed_training_went_on_from_its_checkpoint(finished: Path) -> None:
    log = next(finished.glob("logs/train/*/*/baseline.log")).read_text()
    assert "resuming at step" in log
    metrics = next(finished.glob("training/*/*/baseline-*/metrics.jsonl"))
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row["step"] for row in rows if "loss" in row]
    assert steps == list(range(2, 31, 2))
    held_out = [row["held_out_loss"] for row in rows if "held_out_loss" in row]
    assert held_out[-1] < held_out[0]


def test_the_table_has_every_row_and_the_columns_in_order(finished: Path) -> None:
    table = pd.read_csv(finished / "tables" / "speedup.csv")
    assert list(table.columns[: len(COLUMNS)]) == COLUMNS
    found = set(zip(table.variant, table.dataset, strict=True))
    assert found == {(v, d) for v in VARIANTS for d in [*DATASETS, "average"]}
    assert len(table) == len(found)
    plain = table[table.variant == "autoregressive"]
    assert (plain.speedup == 1).all() and (plain.acceptance_length == 1).all()
    drafted = table[table.variant != "autoregressive"]
    # After 30 steps a drafter may have nothing accepted on a single set, but not on all of them.
    assert (drafted.acceptance_length >= 1).all() and (drafted.acceptance_length <= 8).all()
    assert (drafted[drafted.dataset == "average"].acceptance_length > 1).all()
    low, high = table.acceptance_length_low, table.acceptance_length_high
    assert ((low <= table.acceptance_length) & (table.acceptance_length <= high)).all()
    assert (table[table.dataset == "average"].prompts == 42).all()


def test_greedy_output_equals_plain_decoding_token_for_token_in_fp32(finished: Path) -> None:
    path = next(finished.glob("benchmark/*/*/temperature-0.jsonl"))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    outputs = {
        (row["variant"], row["dataset"], row["prompt_id"]): row["output_ids"] for row in rows
    }
    prompts = {key[1:] for key in outputs}
    assert len(prompts) >= 40
    for variant in VARIANTS[1:]:
        different = [p for p in prompts if outputs[variant, *p] != outputs["autoregressive", *p]]
        assert not different, (variant, different)
    # The carryover drafter did carry: some rounds rejected proposals.
    carried = [row for row in rows if row["variant"] == "carryover"]
    assert sum(row["rounds"] * 7 - row["accepted"] for row in carried) > 0


def test_the_report_and_figures_are_there_and_a_rerun_has_nothing_to_do(finished: Path) -> None:
    page = (finished / "report.html").read_text()
    assert "carryover" in page and "</html>" in page
    assert (finished / "figures" / "acceptance_length.png").read_bytes()[:4] == b"\x89PNG"
    again = subprocess.run(
        COMMAND, cwd=finished.parents[1], capture_output=True, text=True, check=True
    )
    assert "Nothing to be done" in again.stdout + again.stderr
