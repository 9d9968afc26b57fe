"""vLLM's worker with a carryover proposer: the class that `--worker-cls` names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms import current_platform

from carryover.serving.drafter_config import DrafterSettings
from carryover.serving.plugin import ARCHITECTURE
from carryover.serving.versions import require_known

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker


class CarryoverWorker(PlatformWorker):
    """The platform's worker. With a carryover drafter its model runner drafts with carried rows.

    Without one (no drafter, another method, `carryover.enabled: false`) it is the platform's.
    """

    def init_device(self) -> None:
        """As stock, then put the carryover proposer in the place of the stock DFlash one."""
        super().init_device()
        if not self._serves_carryover():
            return
        require_known()
        if self.use_v2_model_runner:
            return  # the draft model refuses, with the line that says why
        # Imported late: under an unknown vLLM it may not even import.
        from carryover.serving.proposer import CarryoverProposer

        self.model_runner.drafter = CarryoverProposer(
            self.vllm_config, self.model_runner.device, self.model_runner
        )

    def _serves_carryover(self) -> bool:
        speculative = self.vllm_config.speculative_config
        if speculative is None or speculative.method != "dflash":
            return False
        drafter = speculative.draft_model_config.hf_config
        if ARCHITECTURE not in (drafter.architectures or []):
            return False
        return DrafterSettings.of(drafter).enabled
