"""vLLM's worker with a carryover proposer: the class that `--worker-cls` names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

from carryover.errors import CarryoverError
from carryover.serving.drafter_config import DrafterSettings
from carryover.serving.plugin import ARCHITECTURES
from carryover.serving.trace_settings import SETTING, TraceSettings
from carryover.serving.versions import require_known

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from carryover.serving.trace import TraceWriter

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker


# vLLM shows what its own loggers say, and those below them.
logger = init_logger(f"vllm.{__name__}")


class CarryoverWorker(PlatformWorker):
    """The platform's worker. With a drafter of ours its model runner drafts with carried rows and
    with the Markov head, where the drafter has them, and writes a trace where one is asked for.

    Otherwise (no drafter, another method, neither of these) it is the platform's.
    """

    _trace: TraceWriter | None = None

    def init_device(self) -> None:
        """As stock, then put the drafter's own proposer or speculator in the stock one's place."""
        super().init_device()
        settings = self._drafter_settings()
        trace = TraceSettings.of(self.vllm_config.additional_config)
        if settings is None and trace is not None:
            raise CarryoverError(
                f"`{SETTING}` is set, and no carryover drafter is served",
                "Name one in --speculative-config, or leave the trace out of --additional-config.",
            )
        if settings is None or (settings.needs_worker is None and trace is None):
            return
        require_known()
        logger.info(
            "carryover: rejected states are %s into the next draft",
            "carried" if settings.enabled else "not carried",
        )
        runner: Any = self.model_runner
        # Imported late: under an unknown vLLM they may not even import.
        if self.use_v2_model_runner:
            from carryover.serving.speculator import speculator_for

            if settings.needs_worker is not None:
                runner.speculator = speculator_for(settings)(self.vllm_config, runner.device)
        else:
            runner.drafter = self._proposer(settings, trace)

    def _proposer(self, settings: DrafterSettings, trace: TraceSettings | None) -> Any:
        # Imported late, as above.
        from carryover.serving.markov import MarkovProposer
        from carryover.serving.proposer import CarryoverProposer

        proposer = MarkovProposer if settings.markov_rank else CarryoverProposer
        arguments = (self.vllm_config, self.model_runner.device, self.model_runner)
        if trace is None:
            return proposer(*arguments)
        from carryover.serving.trace import Recorder, TraceWriter
        from carryover.serving.tracing import traced

        self._trace = TraceWriter(trace, self._about(settings))
        drafter = traced(proposer)(*arguments)
        drafter.recorder = Recorder(self.model_runner, self._trace, features=trace.features)
        return drafter

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """As stock. The step in which vLLM only says that the last requests have finished also
        writes what the trace holds: a server that is stopped kills its workers at once."""
        if self._trace is not None and not scheduler_output.total_num_scheduled_tokens:
            self._trace.flush()
        return super().execute_model(scheduler_output)

    def _about(self, settings: DrafterSettings) -> dict[str, str]:
        speculative = self.vllm_config.speculative_config
        assert speculative is not None
        return {
            "target": self.vllm_config.model_config.model,
            "drafter": speculative.draft_model_config.model,
            "proposals": str(speculative.num_speculative_tokens),
            "carries": str(settings.enabled).lower(),
            "markov_rank": str(settings.markov_rank),
        }

    def _drafter_settings(self) -> DrafterSettings | None:
        """Of a drafter of ours; None with any other, and without one."""
        speculative = self.vllm_config.speculative_config
        if speculative is None or speculative.method not in ("dflash", "dspark"):
            return None
        drafter = speculative.draft_model_config.hf_config
        if set(ARCHITECTURES).isdisjoint(drafter.architectures or []):
            return None
        return DrafterSettings.of(drafter)
