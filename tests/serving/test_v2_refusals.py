"""What is refused, in one line, when the V2 model runner is to serve the drafter."""

from __future__ import annotations

from typing import Any

import pytest

from carryover.serving.plugin import WORKER
from tests.serving.harness import check_refused, run_refusals

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
    # With carry vLLM itself refuses it, as it does for all that does not list its Qwen3DSparkModel.
    "top-k of the Markov head": (
        ANCHOR_FIRST | {"markov_rank": 8, "enabled": False},
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
    everything = CASES | {name: (*arguments, []) for name, arguments in ALLOWED.items()}
    cases = {
        name: (drafter, {"worker_cls": worker, "speculative_config": speculative})
        for name, (drafter, speculative, worker, _) in everything.items()
    }
    return run_refusals(tmp_path_factory.mktemp("v2-refusals"), cases, v2=True)


@pytest.mark.parametrize("name", CASES)
def test_refused(refused: dict[str, str | None], name: str) -> None:
    check_refused(refused[name], CASES[name][3])


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(refused: dict[str, str | None], name: str) -> None:
    assert refused[name] is None
