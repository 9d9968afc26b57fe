"""What is refused, in one line, when the V2 model runner is to serve the drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from carryover.serving.plugin import WORKER
from tests.serving import checkpoints
from tests.serving.harness import run_script

pytestmark = pytest.mark.long

ANCHOR_FIRST = {"slot_layout": "anchor_first"}
DSPARK = {"method": "dspark"}

# name -> (arguments of write_drafter, keys of speculative_config, the worker, what the line says)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, list[str]]] = {
    "anchor-first slots with method dflash": (
        ANCHOR_FIRST,
        {},
        WORKER,
        ["anchor_first", "method dspark", "'dflash'"],
    ),
    "fill-in slots with method dspark": (
        {"config": {"architectures": ["DFlashCarryoverDraftModel", "Qwen3DSparkModel"]}},
        DSPARK,
        WORKER,
        ["fill_in", "method dflash", "'dspark'"],
    ),
    "the other layout's architecture": (
        ANCHOR_FIRST
        | {"config": {"architectures": ["DFlashCarryoverDraftModel", "K3DSparkModel"]}},
        DSPARK,
        WORKER,
        ["architectures", "DFlashCarryoverDraftModel", "anchor_first", "Qwen3CarryoverDSparkModel"],
    ),
    "more proposals than slots": (
        ANCHOR_FIRST,
        DSPARK | {"num_speculative_tokens": 8},
        WORKER,
        ["num_speculative_tokens", "8", "7"],
    ),
    "two mask tokens": (
        {"config": {"mask_token_id": 5}},
        {},
        WORKER,
        ["mask_token_id", "511", "5"],
    ),
    "no worker": (ANCHOR_FIRST, DSPARK, "auto", ["carries", f"--worker-cls {WORKER}"]),
    "no worker, nor a Markov head": (
        ANCHOR_FIRST | {"enabled": False},
        DSPARK,
        "auto",
        ["Markov head", f"--worker-cls {WORKER}"],
    ),
    "top-k of the Markov head": (
        ANCHOR_FIRST | {"markov_rank": 8},
        DSPARK | {"dspark_draft_topk": 4},
        WORKER,
        ["dspark_draft_topk"],
    ),
    "another acceptance rule": (
        {},
        {"rejection_sample_method": "block"},
        WORKER,
        ["rejection_sample_method", "block", "standard"],
    ),
}
ALLOWED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "dflash": ({}, {}, WORKER),
    "dflash, probabilistic": ({}, {"draft_sample_method": "probabilistic"}, WORKER),
    "dflash baseline without our worker": ({"enabled": False}, {}, "auto"),
    "dspark": (ANCHOR_FIRST, DSPARK, WORKER),
    "dspark baseline with a Markov head, without our worker": (
        ANCHOR_FIRST | {"markov_rank": 8, "enabled": False},
        DSPARK,
        "auto",
    ),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    folder: Path = tmp_path_factory.mktemp("v2-refusals")
    target = checkpoints.write_target(folder / "target", seed=0)
    cases = []
    everything = CASES | {name: (*arguments, []) for name, arguments in ALLOWED.items()}
    for index, (drafter, speculative, worker, _) in enumerate(everything.values()):
        path = checkpoints.write_drafter(folder / f"drafter-{index}", seed=1, **drafter)
        engine = {
            "model": str(target),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 128,
            "kv_cache_memory_bytes": 16 << 20,
            "worker_cls": worker,
            "speculative_config": {
                "method": "dflash",
                "model": str(path),
                "num_speculative_tokens": 7,
            }
            | speculative,
        }
        cases.append({"start": False, "engine": engine})
    (folder / "cases.json").write_text(json.dumps(cases))
    arguments = [str(folder / "cases.json")]
    results = run_script("refusals.py", arguments, folder / "results.pt", v2=True)
    return dict(zip(everything, results, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_refused(refused: dict[str, str | None], name: str) -> None:
    line = refused[name]
    assert line is not None
    assert "\n" not in line
    for part in CASES[name][3]:
        assert part in line


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(refused: dict[str, str | None], name: str) -> None:
    assert refused[name] is None
