"""The entry point that vLLM calls in each of its processes (group `vllm.general_plugins`)."""

from __future__ import annotations

from carryover.serving.versions import is_known

# One architecture for each slot layout; the layout decides vLLM's method, dflash or dspark.
ARCHITECTURE = "DFlashCarryoverDraftModel"  # fill_in
DSPARK_ARCHITECTURE = "Qwen3CarryoverDSparkModel"  # anchor_first
# vLLM's name for that one under method dflash: registered too, so that our line refuses it.
_MISPLACED = f"DFlash{DSPARK_ARCHITECTURE}"
WORKER = "carryover.serving.worker.CarryoverWorker"


def register() -> None:
    """Tell vLLM which class serves carryover drafters. Nothing else changes until one is served.

    The class is named, not imported, so that other uses of vLLM pay nothing; calling this again
    registers the same name again. Under an unknown vLLM the name leads to a model that refuses.
    """
    from vllm import ModelRegistry

    served_by = "model:CarryoverDFlashForCausalLM" if is_known() else "refusal:UnknownVersion"
    for name in (ARCHITECTURE, DSPARK_ARCHITECTURE, _MISPLACED):
        ModelRegistry.register_model(name, f"carryover.serving.{served_by}")
