"""What the plugin would serve wrongly is refused at start-up, in one line that says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from carryover.serving.plugin import WORKER
from tests.serving import checkpoints
from tests.serving.harness import check_refused, run_refusals

FIELD = {"enabled": True, "slot_layout": "fill_in"}
DFLASH = {"mask_token_id": checkpoints.MASK, "target_layer_ids": checkpoints.FEATURE_LAYERS}

# name -> (arguments of write_drafter, arguments of the engine, what the line says)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "no carryover field": ({"config": {"carryover": None}}, {}, ["carryover.enabled"]),
    "anchor-first slots": (
        {"config": {"carryover": FIELD | {"slot_layout": "anchor_first"}}},
        {},
        ["anchor_first", "method dspark", "'dflash'"],
    ),
    "unknown slots": (
        {"config": {"carryover": FIELD | {"slot_layout": "diagonal"}}},
        {},
        ["carryover.slot_layout", "diagonal", "fill_in", "anchor_first"],
    ),
    "token hints": (
        {"config": {"carryover": FIELD | {"rows": "draft_tokens", "distinction": "none"}}},
        {},
        ["carryover.rows", "draft_tokens", "hidden_states", "carryover.enabled"],
    ),
    "a projector for carried rows": (
        {"config": {"carryover": FIELD | {"distinction": "projector"}}},
        {},
        ["carryover.distinction", "projector", "carryover.enabled"],
    ),
    "qk_norm not a truth value": (
        {"config": {"carryover": FIELD | {"qk_norm": "no"}}},
        {},
        ["carryover.qk_norm"],
    ),
    "no block size": ({"config": {"block_size": 0}}, {}, ["block_size"]),
    "more proposals than trained": ({"proposals": 5}, {}, ["num_speculative_tokens", "7", "5"]),
    "features of another width": (
        {"config": {"target_hidden_size": 96}},
        {},
        ["96", "64", "another target"],
    ),
    "another hidden size": (
        {"config": {"hidden_size": 96, "target_hidden_size": 64}},
        {},
        ["hidden_size", "96", "64"],
    ),
    "another vocabulary": ({"vocabulary": 600}, {}, ["vocab_size", "600", "512"]),
    "a block the target lacks": (
        {"config": {"dflash_config": DFLASH | {"target_layer_ids": [0, 2, 4]}}},
        {},
        ["target_layer_ids", "[0, 2, 4]", "0 to 3"],
    ),
    "layers out of order": (
        {"config": {"dflash_config": DFLASH | {"target_layer_ids": [2, 0, 3]}}},
        {},
        ["target_layer_ids", "increasing"],
    ),
    "mask token outside the vocabulary": (
        {"config": {"dflash_config": DFLASH | {"mask_token_id": 512}}},
        {},
        ["mask_token_id", "512"],
    ),
    "sliding-window layers": (
        {
            "config": {
                "use_sliding_window": True,
                "sliding_window": 32,
                "max_window_layers": 0,
                "layer_types": ["sliding_attention"] * checkpoints.DRAFTER_BLOCKS,
            }
        },
        {},
        ["sliding-window", "full_attention"],
    ),
    "dummy weights": ({}, {"load_format": "dummy"}, ["load_format dummy", "checkpoint"]),
    "two devices": ({}, {"tensor_parallel_size": 2}, ["tensor_parallel_size", "2"]),
    "no worker": ({}, {"worker_cls": "auto", "start": True}, [f"--worker-cls {WORKER}"]),
    "a Markov head and no worker": (
        {"enabled": False, "markov_rank": 16},
        {"worker_cls": "auto"},
        ["Markov head", f"--worker-cls {WORKER}"],
    ),
    "a trace and no worker": (
        {"enabled": False},
        {"worker_cls": "auto", "additional_config": {"carryover_trace": {"folder": "trace"}}},
        ["traced", f"--worker-cls {WORKER}"],
    ),
    "a trace of another form": (
        {},
        {"additional_config": {"carryover_trace": "trace"}},
        ["carryover_trace", '{"folder": "DIR"'],
    ),
    "a trace into no folder": (
        {},
        {"additional_config": {"carryover_trace": {"folder": ""}}},
        ["carryover_trace", '{"folder": "DIR"'],
    ),
    "a trace by another name": (
        {},
        {"additional_config": {"carryover_tracing": {"folder": "trace"}}},
        ["carryover_tracing", "`carryover_trace`"],
    ),
    "a trace into a file": (
        {},
        {"start": True, "additional_config": {"carryover_trace": {"folder": __file__}}},
        ["carryover_trace", "cannot be made", "Name one that can be written"],
    ),
    "a trace without a drafter": (
        {},
        {
            "start": True,
            "additional_config": {"carryover_trace": {"folder": "trace"}},
            "speculative_config": None,
        },
        ["carryover_trace", "no carryover drafter is served"],
    ),
    "markov_rank not a number": ({"config": {"markov_rank": "256"}}, {}, ["markov_rank", "'256'"]),
    "another kind of Markov head": (
        {"markov_rank": 16, "config": {"markov_head_type": "gated"}},
        {},
        ["markov_head_type", "gated", "vanilla"],
    ),
    "another Markov rank": (
        {"markov_rank": 16, "config": {"markov_rank": 8}},
        {"start": True},
        ["markov_head.markov_w1.weight", "[512, 16]", "[512, 8]"],
    ),
    "half a Markov head": (
        {"markov_rank": 16, "without": ("markov_head.markov_w2.weight",)},
        {"start": True},
        ["markov_head.markov_w2.weight"],
    ),
    "unknown vLLM": (
        {},
        {"start": True, "pretend_known": ["0.31.0"]},
        ["vLLM 0.31.0", "this is vLLM 0.32.0"],
    ),
    "no E_carry": (
        {"without": ("carry_embedding",)},
        {"start": True},
        ["carry_embedding", "carryover.enabled"],
    ),
    "no norm": ({"without": ("hidden_norm.weight",)}, {"start": True}, ["hidden_norm.weight"]),
    "more layers than its fc reads": (
        {"config": {"dflash_config": DFLASH | {"target_layer_ids": [0, 3]}}},
        {"start": True},
        ["fc.weight", "[64, 192]", "[64, 128]"],
    ),
    "a draft vocabulary that leaves the target's": (
        {
            "draft_vocabulary": 500,
            "vocabulary": 600,
            "config": {"vocab_size": 512, "dflash_config": DFLASH},
        },
        {"start": True},
        ["d2t", "vocabulary"],
    ),
}
ALLOWED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "carryover": ({}, {}),
    "baseline without our worker": ({"enabled": False}, {"worker_cls": "auto"}),
    "fewer proposals than trained": ({"proposals": 9}, {}),
    "carried rows that are not told apart": (
        {"config": {"carryover": FIELD | {"rows": "hidden_states", "distinction": "none"}}},
        {},
    ),
    "a projector switched off": (
        {
            "projector": True,
            "config": {"carryover": FIELD | {"enabled": False, "distinction": "projector"}},
        },
        {"start": True},
    ),
    "token hints switched off": (
        {"config": {"carryover": FIELD | {"enabled": False, "rows": "target_tokens"}}},
        {},
    ),
    "a Markov head": ({"markov_rank": 16}, {}),
}


def run_ahead(folder: Path) -> dict[str, str | None]:
    everything = {name: (drafter, engine) for name, (drafter, engine, _) in CASES.items()}
    return run_refusals(folder, everything | ALLOWED)


@pytest.fixture(scope="module")
def refused(ran_ahead: dict[str, str | None]) -> dict[str, str | None]:
    return ran_ahead


@pytest.mark.parametrize("name", CASES)
def test_refused(refused: dict[str, str | None], name: str) -> None:
    check_refused(refused[name], CASES[name][2])


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(refused: dict[str, str | None], name: str) -> None:
    assert refused[name] is None
