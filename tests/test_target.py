import importlib.metadata
import shutil
from pathlib import Path

import pytest
import torch

from carryover import target
from carryover.artifacts import read_manifest
from carryover.errors import CarryoverError
from carryover.paths import Paths
from tests.tiny_target import LAYERS, VOCABULARY, tiny_config, write_tiny_target


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def place(source: Path, tmp_path: Path) -> Path:
    """`tmp_path` with a checkpoint in `source/` that a test may change."""
    shutil.copytree(source, tmp_path / "source")
    return tmp_path


def test_a_folder_becomes_a_target_that_loads_and_computes_the_same(place: Path) -> None:
    config = tiny_config(place)
    target.run(config, target="tiny")
    folder = Paths(config).target("tiny")
    read_manifest(folder, stage="target", config=config.stage("target", target="tiny"), verify=True)

    ids = torch.arange(10, 30)[None]
    ours, tokenizer = target.load_target(folder, "float32")
    original, _ = target.load_target(place / "source", "float32")
    assert torch.equal(ours(ids).logits, original(ids).logits)
    assert not any(parameter.requires_grad for parameter in ours.parameters())
    assert tokenizer.chat_template
    # The weights are not stored twice.
    assert (folder / "model.safetensors").samefile(place / "source" / "model.safetensors")


def test_a_second_run_replaces_the_folder(place: Path) -> None:
    config = tiny_config(place)
    target.run(config, target="tiny")
    folder = Paths(config).target("tiny")
    (folder / "stale.safetensors").write_bytes(b"old")
    # What a killed run leaves: of this target, and of one with a longer name at work.
    (folder.parent / ".tiny.ab_12cde" / "new").mkdir(parents=True)
    (folder.parent / ".tiny.v2.ab_12cde").mkdir()
    target.run(config, target="tiny")
    assert not (folder / "stale.safetensors").exists()
    assert sorted(path.name for path in folder.parent.iterdir()) == [".tiny.v2.ab_12cde", "tiny"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"feature_layers": [0, LAYERS]}, f"feature_layers names block {LAYERS}"),
        ({"mask_token_id": VOCABULARY}, f"mask_token_id is {VOCABULARY}"),
        ({"mask_token_id": 2}, "<|assistant|>"),
        ({"mask_token_id": 0}, "<|end|>"),
        ({"source": "path:does/not/exist"}, "does/not/exist does not exist"),
        ({"source": "package:carryover-none==1.0"}, "carryover-none is not installed"),
        ({"source": "package:pyyaml==0.0.1"}, "is installed"),
    ],
)
def test_what_does_not_fit_is_named_and_leaves_nothing(
    place: Path, settings: dict[str, object], message: str
) -> None:
    config = tiny_config(place, target=settings)
    with pytest.raises(CarryoverError, match=message.replace("|", r"\|")) as caught:
        target.run(config, target="tiny")
    assert "\n" not in str(caught.value)
    assert caught.value.fix
    assert list(Paths(config).target("tiny").parent.rglob("*")) == []


def test_a_target_without_a_chat_template_is_refused(place: Path) -> None:
    (place / "source" / "chat_template.jinja").unlink()
    with pytest.raises(CarryoverError, match="no chat template"):
        target.run(tiny_config(place), target="tiny")


def test_a_package_without_a_gguf_is_refused(place: Path) -> None:
    version = importlib.metadata.version("pyyaml")
    config = tiny_config(place, target={"source": f"package:pyyaml=={version}"})
    with pytest.raises(CarryoverError, match="lists 0 GGUF files"):
        target.run(config, target="tiny")


def test_an_unreachable_hub_is_one_line(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = tiny_config(place, target={"source": "hub:carryover-test/no-such-model@main"})
    with pytest.raises(CarryoverError, match="carryover-test/no-such-model at main") as caught:
        target.run(config, target="tiny")
    assert "\n" not in str(caught.value)
    assert "path:DIR" in caught.value.fix
