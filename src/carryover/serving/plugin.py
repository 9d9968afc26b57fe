"""The entry point that vLLM calls in each of its processes (group `vllm.general_plugins`)."""

from __future__ import annotations

from carryover.serving.versions import is_known

# One architecture for each slot layout, which decides vLLM's method, dflash or dspark, and blocks.
ARCHITECTURE = "DFlashCarryoverDraftModel"  # fill_in
DSPARK_ARCHITECTURE = "Qwen3CarryoverDSparkModel"  # anchor_first
GEMMA_ARCHITECTURE = "Gemma4CarryoverDSparkModel"  # anchor_first, Gemma's blocks
ARCHITECTURES = (ARCHITECTURE, DSPARK_ARCHITECTURE, GEMMA_ARCHITECTURE)
WORKER = "carryover.serving.worker.CarryoverWorker"


def register() -> None:
    """Tell vLLM which class serves carryover drafters. Nothing else changes until one is served.

    The class is named, not imported, so that other uses of vLLM pay nothing; calling this again
    registers the same name again. Under an unknown vLLM the name leads to a model that refuses.
    """
    from vllm import ModelRegistry

    for name in ARCHITECTURES:
        served_by = "model:CarryoverDFlashForCausalLM"
        if name == GEMMA_ARCHITECTURE:
            served_by = "gemma:CarryoverGemma4ForCausalLM"
        if not is_known():
            served_by = "refusal:UnknownVersion"
        ModelRegistry.register_model(name, f"carryover.serving.{served_by}")
        if name != ARCHITECTURE:
            # vLLM's name for it under method dflash: registered too, so that our line refuses it.
            ModelRegistry.register_model(f"DFlash{name}", f"carryover.serving.{served_by}")
