"""The entry point that vLLM calls in each of its processes (group `vllm.general_plugins`)."""

from __future__ import annotations

from carryover.serving.versions import is_known

ARCHITECTURE = "DFlashCarryoverDraftModel"
WORKER = "carryover.serving.worker.CarryoverWorker"


def register() -> None:
    """Tell vLLM which class serves a carryover drafter. Nothing else changes until one is served.

    The class is named, not imported, so that other uses of vLLM pay nothing; calling this again
    registers the same name again. Under an unknown vLLM the name leads to a model that refuses.
    """
    from vllm import ModelRegistry

    served_by = "model:CarryoverDFlashForCausalLM" if is_known() else "refusal:UnknownVersion"
    ModelRegistry.register_model(ARCHITECTURE, f"carryover.serving.{served_by}")
