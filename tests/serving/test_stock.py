"""A vLLM without our plugin stops at a drafter that it would serve wrongly, and serves the others.

It never sees `carryover` in config.json; what stops it is `architectures` as we export them.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from carryover.drafter.checkpoint import save_drafter
from carryover.drafter.config import DrafterConfig
from carryover.drafter.model import Drafter
from tests.serving import checkpoints
from tests.serving.harness import engine_arguments, run_script

pytestmark = pytest.mark.long

UNKNOWN = "Model architectures ['DFlashCarryoverDraftModel'] are not supported"
# K3's class reads its own keys of config.json first.
OTHER = "'Qwen3Config' object has no attribute 'target_hidden_size'"
OTHER_GEMMA = "'Gemma4TextConfig' object has no attribute 'target_hidden_size'"
ANCHOR_FIRST = {"slot_layout": "anchor_first"}
# name -> (keys of DrafterConfig, vLLM's method, what it stops with)
CASES: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "dflash, carry": ({"carry": True}, "dflash", UNKNOWN),
    "dflash, no q/k norm": ({"qk_norm": False}, "dflash", UNKNOWN),
    "dflash, Markov": ({"markov_rank": 8}, "dflash", UNKNOWN),
    "dflash": ({}, "dflash", None),
    "dspark, carry": (ANCHOR_FIRST | {"carry": True}, "dspark", OTHER),
    "dspark, Markov, carry": (
        ANCHOR_FIRST | {"carry": True, "markov_rank": 8, "confidence": True},
        "dspark",
        OTHER,
    ),
    "dspark, Markov, carry, no q/k norm": (
        ANCHOR_FIRST | {"carry": True, "markov_rank": 8, "qk_norm": False},
        "dspark",
        OTHER,
    ),
    "dspark, Markov, no q/k norm": (
        ANCHOR_FIRST | {"markov_rank": 8, "qk_norm": False},
        "dspark",
        OTHER,
    ),
    "dspark, Markov, capped": (
        ANCHOR_FIRST | {"markov_rank": 8, "final_logit_softcapping": 30.0},
        "dspark",
        OTHER,
    ),
    "dspark, Markov, Gemma's blocks, carry": (
        ANCHOR_FIRST | {"markov_rank": 8, "blocks": "gemma4", "carry": True},
        "dspark",
        OTHER_GEMMA,
    ),
    "dspark, Markov": (ANCHOR_FIRST | {"markov_rank": 8}, "dspark", None),
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """By the V2 runner, which has both methods."""
    folder = tmp_path_factory.mktemp("stock")
    target = checkpoints.write_target(folder / "target", seed=0)
    cases = []
    for name, (settings, method, _) in CASES.items():
        torch.manual_seed(1)
        config = DrafterConfig(
            hidden_size=checkpoints.HIDDEN,
            num_hidden_layers=checkpoints.DRAFTER_BLOCKS,
            num_attention_heads=checkpoints.HEADS,
            num_key_value_heads=checkpoints.KV_HEADS,
            head_dim=checkpoints.HEAD_DIM,
            intermediate_size=checkpoints.INTERMEDIATE,
            rms_norm_eps=1e-5,
            rope_theta=checkpoints.ROPE_THETA,
            max_position_embeddings=512,
            vocab_size=checkpoints.VOCABULARY,
            target_hidden_size=checkpoints.HIDDEN,
            target_layer_ids=tuple(checkpoints.FEATURE_LAYERS),
            target_blocks=checkpoints.TARGET_BLOCKS,
            mask_token_id=checkpoints.MASK,
            proposals=checkpoints.PROPOSALS,
            **settings,
        )
        save_drafter(folder / name, Drafter(config), None, None)
        cases.append(
            engine_arguments(
                target, folder / name, worker_cls="auto", speculative_config={"method": method}
            )
        )
    (folder / "cases.json").write_text(json.dumps(cases))
    arguments = [str(folder / "cases.json")]
    results = run_script("stock.py", arguments, folder / "results.pt", v2=True, plugins=False)
    return dict(zip(CASES, results, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_without_the_plugin(stopped: dict[str, str | None], name: str) -> None:
    expected, error = CASES[name][2], stopped[name]
    if expected is None:
        assert error is None
    else:
        assert error is not None and expected in error
