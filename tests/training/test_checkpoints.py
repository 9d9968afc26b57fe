"""What a training may go on from: a checkpoint of the same config, code, features and baseline."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from carryover.artifacts import write_manifest
from carryover.config import Config
from carryover.drafter import export
from carryover.errors import CarryoverError
from carryover.paths import Paths
from carryover.training import checkpoints, result
from carryover.training.result import checkpoint_config, trained_folder, write_trained
from tests.tiny_target import tiny_config

NOW = datetime(2026, 1, 2, tzinfo=UTC)
NAMES = ("tiny", "DFlash")


class Engine:
    """Saves and loads as DeepSpeed does, one file in the folder `tag`."""

    def __init__(self) -> None:
        self.loaded: str | None = None

    def save_checkpoint(self, folder: str, tag: str, client_state: Any, save_latest: bool) -> None:
        path = Path(folder) / tag
        path.mkdir(parents=True)
        (path / "weights.pt").write_text(str(client_state["step"]))

    def load_checkpoint(self, folder: str, tag: str) -> tuple[str, dict[str, int]]:
        self.loaded = tag
        return tag, {"step": int((Path(folder) / tag / "weights.pt").read_text())}


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def save(folder: Path, step: int, made_with: dict, keep: int = 2) -> None:
    checkpoints.save(Engine(), folder, step, config=made_with, seed=1, started=NOW, keep=keep)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


def test_foreign_checkpoints_are_skipped_with_the_reason_and_removed_by_new_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "training"
    old, new = ({"seed": 1, "made_from": {"code": code}} for code in ("aa", "bb"))
    save(folder, 8, old)
    save(folder, 12, old)
    engine = Engine()
    assert checkpoints.load_newest(engine, folder, config=new) == 0
    assert engine.loaded is None
    assert 'made_from.code: "aa", now "bb"' in caplog.text
    save(folder, 4, new)
    assert names(folder) == ["step-00000004"]
    save(folder, 8, new)
    save(folder, 12, new)
    assert names(folder) == ["step-00000008", "step-00000012"]
    assert checkpoints.load_newest(engine, folder, config=new) == 12


def test_a_damaged_checkpoint_ahead_takes_no_place_of_a_new_one(tmp_path: Path) -> None:
    folder, made_with = tmp_path / "training", {"seed": 1}
    save(folder, 8, made_with)
    save(folder, 12, made_with)
    (folder / "step-00000012" / "weights.pt").write_text("00")  # the right size
    (folder / "step-00000010.partial").mkdir()
    assert checkpoints.load_newest(Engine(), folder, config=made_with) == 8
    save(folder, 9, made_with, keep=1)
    assert names(folder) == ["step-00000009"]


def put(config: Config, folder: Path, stage: str, content: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data").write_text(content)
    subset = config.stage(stage, target="tiny")
    write_manifest(folder, stage=stage, config=subset, started=datetime.now(UTC), seed=1)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Stand-ins for a target, its features and a trained baseline."""
    config = tiny_config(tmp_path)
    paths = Paths(config)
    put(config, paths.target("tiny"), "target", "a")
    put(config, paths.features("tiny"), "features", "a")
    final = paths.training(*NAMES, "baseline") / "final"
    final.mkdir(parents=True)
    (final / "model.safetensors").write_text("a")
    write_trained(config, *NAMES, "baseline")
    return config


def test_checkpoints_are_tied_to_code_target_features_and_baseline(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = Paths(config)

    def changed(before: dict[str, Any], variant: str) -> set[str]:
        after = checkpoint_config(config, *NAMES, variant)["made_from"]
        return {name for name in after if after[name] != before[name]}

    baseline = checkpoint_config(config, *NAMES, "baseline")["made_from"]
    control = checkpoint_config(config, *NAMES, "control")["made_from"]
    assert set(control) - set(baseline) == {"baseline"}

    # Made again with the same content, at another time.
    put(config, paths.features("tiny"), "features", "a")
    assert not changed(control, "control")
    put(config, paths.features("tiny"), "features", "b")
    assert changed(baseline, "baseline") == changed(control, "control") == {"features"}
    put(config, paths.features("tiny"), "features", "a")

    weights = paths.training(*NAMES, "baseline") / "final" / "model.safetensors"
    weights.write_text("b")
    assert not changed(baseline, "baseline")
    assert changed(control, "control") == {"baseline"}
    weights.write_text("a")

    monkeypatch.setattr(result, "stage_code", lambda stage: f"new {stage}")
    assert changed(baseline, "baseline") == changed(control, "control") == {"code"}


def test_a_drafter_of_another_config_is_not_exported_nor_trained_further(
    config: Config, tmp_path: Path
) -> None:
    expected = Paths(config).training(*NAMES, "baseline") / "final"
    assert trained_folder(config, *NAMES, "baseline") == expected
    other = tiny_config(tmp_path, training={"weight_decay": 0.5})
    with pytest.raises(CarryoverError, match="trained with another config") as caught:
        export.run(other, target="tiny", drafter="DFlash", variant="baseline")
    assert "carryover train --variant baseline" in caught.value.fix
    with pytest.raises(CarryoverError, match="trained with another config"):
        checkpoint_config(other, *NAMES, "control")
    with pytest.raises(CarryoverError, match="control is not trained yet"):
        trained_folder(config, *NAMES, "control")
