"""vLLM's worker with a carryover proposer: the class that `--worker-cls` names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from carryover.serving.drafter_config import DrafterSettings
from carryover.serving.plugin import ARCHITECTURE, DSPARK_ARCHITECTURE
from carryover.serving.versions import require_known

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker


class CarryoverWorker(PlatformWorker):
    """The platform's worker. With a drafter of ours its model runner drafts with carried rows and
    with the Markov head, where the drafter has them.

    Otherwise (no drafter, another method, neither of these) it is the platform's.
    """

    def init_device(self) -> None:
        """As stock, then put the drafter's own proposer or speculator in the stock one's place."""
        super().init_device()
        settings = self._drafter_settings()
        if settings is None or settings.needs_worker is None:
            return
        require_known()
        runner: Any = self.model_runner
        # Imported late: under an unknown vLLM they may not even import.
        if self.use_v2_model_runner:
            from carryover.serving.speculator import speculator_for

            runner.speculator = speculator_for(settings)(self.vllm_config, runner.device)
        else:
            from carryover.serving.proposer import CarryoverProposer

            runner.drafter = CarryoverProposer(self.vllm_config, runner.device, runner)

    def _drafter_settings(self) -> DrafterSettings | None:
        """Of a drafter of ours; None with any other, and without one."""
        speculative = self.vllm_config.speculative_config
        if speculative is None or speculative.method not in ("dflash", "dspark"):
            return None
        drafter = speculative.draft_model_config.hf_config
        if {ARCHITECTURE, DSPARK_ARCHITECTURE}.isdisjoint(drafter.architectures or []):
            return None
        return DrafterSettings.of(drafter)
