"""What makes a result the same: code and inputs, not the time at which they were made."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from carryover import identity
from carryover.artifacts import write_json, write_manifest
from carryover.cli import STAGES
from carryover.errors import CarryoverError
from carryover.identity import input_identity, made_from, result_key, source_hash, stage_code

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("report/a.py", "report/page.html.j2", "report/paper/t.csv", "other.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(identity, "_PACKAGE", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["a.py", "page.html.j2", "paper/t.csv", "new.yaml"])
def test_every_kind_of_source_file_counts(package: Path, name: str) -> None:
    before = source_hash("report", "other.py")
    (package / "report" / name).write_text("2")
    assert source_hash("report", "other.py") != before


def test_compiled_code_and_other_folders_do_not_count(package: Path) -> None:
    before = source_hash("report")
    (package / "report" / "__pycache__").mkdir()
    (package / "report" / "__pycache__" / "a.cpython-311.pyc").write_text("x")
    (package / "other.py").write_text("2")
    assert source_hash("report") == before


def test_every_stage_names_sources_that_exist() -> None:
    assert len({stage_code(stage) for stage in STAGES}) == len(STAGES)


def put(folder: Path, content: str, *, stage: str = "responses", later: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "shard-00000.jsonl").write_text(content)
    started = NOW + timedelta(hours=later)
    write_manifest(folder, stage=stage, config={"seed": 1}, started=started, seed=1)
    return folder


def test_a_folder_made_again_is_the_same_input_and_another_content_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    first = input_identity(put(folder, "a"))
    manifest = (folder / "manifest.json").read_bytes()
    assert input_identity(put(folder, "a", later=1)) == first
    assert (folder / "manifest.json").read_bytes() != manifest
    # The ledger changes with the code that made the shards.
    write_json(folder / "shards.json", {"key": "new", "shards": {}})
    assert input_identity(put(folder, "a")) == first
    assert input_identity(put(folder, "b")) != first
    assert input_identity(put(folder, "a", stage="features")) != first


def test_a_file_is_its_content(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("a")
    first = input_identity(path)
    write_manifest(path, stage="prompts", config={}, started=NOW, seed=1)
    assert input_identity(path) == first
    path.write_text("b")
    assert input_identity(path) != first


def test_a_missing_or_unfinished_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(CarryoverError, match="none is missing"):
        input_identity(tmp_path / "none")
    with pytest.raises(CarryoverError, match="has no manifest"):
        input_identity(tmp_path)


def test_a_result_depends_on_config_inputs_and_code(tmp_path: Path) -> None:
    inputs = {"responses": put(tmp_path / "a", "1")}
    other = {"responses": put(tmp_path / "b", "2")}
    keys = {
        result_key({"seed": 1}, inputs, "code"),
        result_key({"seed": 2}, inputs, "code"),
        result_key({"seed": 1}, other, "code"),
        result_key({"seed": 1}, inputs, "new"),
    }
    assert len(keys) == 4
    assert set(made_from(inputs, "code")) == {"code", "responses"}
