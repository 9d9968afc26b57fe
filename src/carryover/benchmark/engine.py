"""What each variant's engine is built with. Apart from the drafter they are all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from carryover.config import Config
from carryover.paths import Paths
from carryover.serving.plugin import WORKER


def engine_arguments(
    config: Config, target: str, drafter: str, drafter_folder: Path | None
) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`; without a `drafter_folder` it decodes token by token.

    `drafter` is a key of the config's drafters, `drafter_folder` an exported checkpoint.
    """
    settings = config.benchmark
    arguments: dict[str, Any] = {
        "model": str(Paths(config).target(target)),
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": 1,
        "kv_cache_memory_bytes": int(settings.kv_cache_gib * 2**30),
        "enforce_eager": settings.enforce_eager,
        # A prompt that comes again (the warm-up's) must cost as much as the first time, and the
        # drafter's context is not written for tokens that a cache hit skips.
        "enable_prefix_caching": False,
        # vLLM's neutral sampling defaults, not those that the model's authors ship.
        "generation_config": "vllm",
        "disable_log_stats": False,  # the counts of rounds and accepted tokens are read from them
        "seed": config.seed,
    }
    if drafter_folder is not None:
        arguments["worker_cls"] = WORKER
        arguments["speculative_config"] = {
            "method": "dflash",
            "model": str(drafter_folder),
            "num_speculative_tokens": config.drafters[drafter].proposals,
        }
    return arguments
