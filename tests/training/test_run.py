"""Real DeepSpeed runs of a tiny drafter: the three variants, a kill and resume, ranks, ZeRO."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from carryover import features, target
from carryover.artifacts import read_manifest
from carryover.config import Config, load_config
from carryover.paths import Paths
from carryover.training import result
from tests.test_features import put_responses
from tests.tiny_target import tiny_config, write_tiny_target
from tests.training.stages import Stages
from tests.training.tiny import CARRIES

LENGTHS = [
    (5, 30),
    (3, 20),
    (11, 25),
    (8, 30),
    (2, 22),
    (30, 40),
    (4, 33),
    (6, 28),
    (9, 21),
    (7, 36),
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config, a tiny fp32 target and its features on random responses."""
    folder = tmp_path_factory.mktemp("training")
    write_tiny_target(folder / "source")
    config = tiny_config(
        folder,
        drafters={
            "DFlash": {
                "kind": "dflash", "layers": 1, "proposals": 4, "vocabulary": "observed",
                "initialize": "target_last_layers", "qk_norm": False,
            }
        },
        training={
            "precision": "float32", "anchors": 8, "responses_per_step": 4, "micro_batch": 1,
            "held_out": 2, "log_every": 1, "evaluate_every": 100, "checkpoint_every": 4,
            "baseline": {"steps": 12, "learning_rate": 0.01},
            "further": {"steps": 4, "learning_rate": 0.005},
        },
    )  # fmt: skip
    target.run(config, target="tiny")
    put_responses(config, LENGTHS)
    features.run(config, target="tiny")
    return folder


def variation(folder: Path, name: str, **training) -> tuple[Path, Config]:
    """The same features, other training settings."""
    content = yaml.safe_load((folder / "config.yaml").read_text())
    content["training"].update(training)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path, load_config(path)


def command(config: Path, stage: str, variant: str) -> list[str]:
    return [sys.executable, "-m", "carryover", stage, "--config", str(config), "--variant", variant]


def execute(stages: Stages, config: Path, stage: str, variant: str, ranks: int = 1) -> str:
    return stages.run(stage, "--config", str(config), "--variant", variant, cores=ranks)


def metrics(config: Config, variant: str = "baseline", drafter: str = "DFlash") -> list[dict]:
    path = Paths(config).training("tiny", drafter, variant) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(config: Config, variant: str = "baseline", drafter: str = "DFlash") -> list[float]:
    rows = metrics(config, variant, drafter)
    steps = [row["step"] for row in rows if "loss" in row]
    assert steps == list(range(1, len(steps) + 1))
    return [row["loss"] for row in rows if "loss" in row]


def test_all_variants_train_and_export(stages: Stages, recorded: Path) -> None:
    path, config = variation(recorded, "variants")
    for variant in ("baseline", "control", "carryover"):
        execute(stages, path, "train", variant)
        execute(stages, path, "export", variant)
    curve = losses(config)
    assert sum(curve[-3:]) < sum(curve[:3])
    folders = {v: Paths(config).drafter("tiny", "DFlash", v) for v in ("control", "carryover")}
    assert "carry_embedding" not in load_file(folders["control"] / "model.safetensors")
    tensors = load_file(folders["carryover"] / "model.safetensors")
    assert tensors["carry_embedding"].abs().sum() > 0
    assert json.loads((folders["carryover"] / "config.json").read_text())["carryover"]["enabled"]
    assert torch.equal(tensors["d2t"], load_file(folders["control"] / "model.safetensors")["d2t"])
    # Another code, target, features or baseline would not go on from here.
    newest = max(Paths(config).training("tiny", "DFlash", "carryover").glob("step-*"))
    made_with = result.checkpoint_config(config, "tiny", "DFlash", "carryover")
    read_manifest(newest, stage="train", config=made_with)


def markov_variation(folder: Path, name: str, drafter: dict, **training) -> tuple[Path, Config]:
    """The same features, with one Markov drafter in place of the DFlash one."""
    path, _ = variation(folder, name, **training)
    content = yaml.safe_load(path.read_text())
    content["drafters"] = {"Markov": content["drafters"]["DFlash"] | {"kind": "markov"} | drafter}
    path.write_text(yaml.safe_dump(content))
    return path, load_config(path)


def test_gemmas_blocks_train_in_bfloat16(stages: Stages, recorded: Path) -> None:
    """From random weights; the scalar at a block's end, a buffer, follows the rest's type."""
    drafter = {
        "markov_rank": 8, "slot_layout": "anchor_first", "blocks": "gemma4", "qk_norm": True,
        "initialize": "random",
    }  # fmt: skip
    path, config = markov_variation(recorded, "gemma", drafter, precision="bfloat16")
    execute(stages, path, "train", "baseline")
    execute(stages, path, "export", "baseline")
    curve = losses(config, drafter="Markov")
    assert sum(curve[-3:]) < sum(curve[:3])
    folder = Paths(config).drafter("tiny", "Markov", "baseline")
    tensors = load_file(folder / "model.safetensors")
    del tensors["d2t"]
    assert tensors["layers.0.layer_scalar"].item() == 1
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


@pytest.mark.parametrize("slot_layout", ["fill_in", "anchor_first"])
def test_markov_variants_train_and_export(stages: Stages, recorded: Path, slot_layout: str) -> None:
    drafter = {"markov_rank": 8, "slot_layout": slot_layout}
    path, config = markov_variation(recorded, f"markov-{slot_layout}", drafter)
    for variant in ("baseline", "carryover"):
        execute(stages, path, "train", variant)
        execute(stages, path, "export", variant)
    curve = losses(config, drafter="Markov")
    assert sum(curve[-3:]) < sum(curve[:3])
    for variant in ("baseline", "carryover"):
        rows = metrics(config, variant, "Markov")
        for row in (row for row in rows if "loss" in row):
            terms = (row["cross_entropy"], row["distribution"], row["confidence"])
            want = 0.1 * terms[0] + 0.9 * terms[1] + 1.0 * terms[2]
            assert row["loss"] == pytest.approx(want) and 0 < row["distribution"] < 2
        assert rows[-1]["held_out_confidence"] > 0
    folders = {v: Paths(config).drafter("tiny", "Markov", v) for v in ("baseline", "carryover")}
    before, after = (load_file(folder / "model.safetensors") for folder in folders.values())
    assert set(after) - set(before) == {"carry_embedding"}
    assert after["carry_embedding"].abs().sum() > 0
    for name in ("markov_w1", "markov_w2"):
        name = f"markov_head.{name}.weight"
        assert before[name].shape[1] == 8 and not torch.equal(before[name], after[name])
    assert before["markov_head.markov_w1.weight"].shape[0] == 320
    assert before["markov_head.markov_w2.weight"].shape[0] == len(before["d2t"]) < 320


@pytest.mark.long
def test_zero_3_does_not_change_a_markov_curve(stages: Stages, recorded: Path) -> None:
    # 320 x 512 weights: DeepSpeed partitions no smaller ones.
    drafter = {"markov_rank": 512, "vocabulary": "full"}
    curves = []
    for zero_stage, ranks in ((0, 1), (3, 2)):
        path, config = markov_variation(
            recorded, f"markov-{zero_stage}", drafter, zero_stage=zero_stage, ranks=ranks
        )
        execute(stages, path, "train", "baseline", ranks)
        execute(stages, path, "train", "carryover", ranks)
        curves.append([losses(config, v, "Markov") for v in ("baseline", "carryover")])
    for got, want in zip(curves[1], curves[0], strict=True):
        assert got == pytest.approx(want, rel=1e-4)


def test_every_carry_trains_and_exports(stages: Stages, recorded: Path) -> None:
    configs = {}
    for rows, distinction in CARRIES:
        path, _ = variation(recorded, f"{rows}-{distinction}", decay_gamma=6.0)
        content = yaml.safe_load(path.read_text())
        content["carry"].update(rows=rows, distinction=distinction)
        path.write_text(yaml.safe_dump(content))
        configs[rows, distinction] = path
    execute(stages, next(iter(configs.values())), "train", "baseline")
    for path in configs.values():
        execute(stages, path, "train", "carryover")
        execute(stages, path, "export", "carryover")
    before = {}
    for (rows, distinction), path in configs.items():
        folder = Paths(load_config(path)).training("tiny", "DFlash", "carryover")
        metrics = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
        first, last = metrics[0], metrics[-1]
        before[rows, distinction] = first["held_out_carry_on_loss"]
        assert first["held_out_carry_on_loss"] != first["held_out_carry_off_loss"]
        assert last["step"] == 4
        if rows == "hidden_states":
            assert 0 < last["held_out_carry_attention"] < 1
        else:
            assert "held_out_carry_attention" not in last
        field = json.loads((folder / "final" / "config.json").read_text())["carryover"]
        assert (field["rows"], field["distinction"]) == (rows, distinction)
        tensors = load_file(folder / "final" / "model.safetensors")
        assert ("carry_projector.weight" in tensors) == (distinction == "projector")
        assert ("carry_embedding" in tensors) == (
            rows == "hidden_states" and distinction != "projector"
        )
        if "carry_embedding" in tensors:
            assert tensors["carry_embedding"].any() == (distinction == "embedding")
        if distinction == "projector":
            assert not torch.equal(tensors["carry_projector.weight"], tensors["fc.weight"])
    # Nothing tells rows apart before the first step.
    unmarked = before["hidden_states", "none"]
    assert before["hidden_states", "embedding"] == unmarked
    assert before["hidden_states", "projector"] == unmarked


def test_online_features_give_the_same_curves(stages: Stages, recorded: Path) -> None:
    """Without `features/` on disk: the target's forward pass in every step gives them."""
    paths = {}
    for name in ("cached", "online"):
        path, config = variation(recorded, f"features-{name}", features=name, micro_batch=2)
        paths[name] = config
        for variant in ("baseline", "carryover"):
            execute(stages, path, "train", variant)
    for variant in ("baseline", "carryover"):
        want, got = (losses(config, variant) for config in paths.values())
        assert got == pytest.approx(want, rel=1e-4)
    cached, online = (
        result.checkpoint_config(config, "tiny", "DFlash", "baseline") for config in paths.values()
    )
    assert "features" in cached["made_from"] and "features" not in online["made_from"]
    assert "responses" in online["made_from"]


def test_a_killed_run_resumes_with_the_same_curve(stages: Stages, recorded: Path) -> None:
    whole_path, whole = variation(recorded, "whole", decay_gamma=3.0)
    execute(stages, whole_path, "train", "baseline")
    content = yaml.safe_load(whole_path.read_text())
    content["seed"] = whole.seed
    cut_path, cut = variation(recorded, "cut", decay_gamma=3.0, keep_checkpoints=1)
    folder = Paths(cut).training("tiny", "DFlash", "baseline")
    want = losses(whole)
    for leftover in folder.glob("step-*"):
        os.rename(leftover, leftover.with_name("gone-" + leftover.name))
    (folder / "metrics.jsonl").unlink()
    process = subprocess.Popen(command(cut_path, "train", "baseline"), stderr=subprocess.DEVNULL)
    while not list(folder.glob("step-00000004")) and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    execute(stages, cut_path, "train", "baseline")
    assert losses(cut) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_ranks_zero_stage_and_micro_batch_do_not_change_the_curve(
    stages: Stages, recorded: Path, zero_stage
) -> None:
    one_path, one = variation(recorded, "one", zero_stage=0, ranks=1, micro_batch=4)
    if not (recorded / "one.json").exists():
        execute(stages, one_path, "train", "baseline")
        want = losses(one)
        (recorded / "one.json").write_text(json.dumps(want))
    want = json.loads((recorded / "one.json").read_text())
    two_path, two = variation(recorded, "two", zero_stage=zero_stage, ranks=2, micro_batch=1)
    execute(stages, two_path, "train", "baseline", ranks=2)
    assert losses(two) == pytest.approx(want, rel=1e-4)


def test_a_damaged_newest_checkpoint_is_skipped(stages: Stages, recorded: Path) -> None:
    path, config = variation(recorded, "damaged", decay_gamma=5.0, keep_checkpoints=2)
    execute(stages, path, "train", "baseline")
    want = losses(config)
    folder = Paths(config).training("tiny", "DFlash", "baseline")
    newest = sorted(folder.glob("step-*"))[-1]
    victim = max(newest.rglob("*.pt"), key=lambda p: p.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-100])
    shown = execute(stages, path, "train", "baseline")
    assert f"skipping checkpoint {newest.name}" in shown
    assert "resuming at step 8" in shown
    assert losses(config) == pytest.approx(want, rel=1e-6)
