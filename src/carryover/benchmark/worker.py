"""Worker of the `benchmark` stage: one variant's vLLM engine, one prompt at a time.

    python -m carryover.benchmark.worker

In, one JSON object a line: `{"engine": {LLM arguments}}`, then for each prompt
`{"prompt_ids", "sampling": {SamplingParams arguments}}`.
Out: `{"startup_seconds"}`, then for each prompt `{"output_ids", "finish_reason", "seconds",
"rounds", "accepted", "accepted_per_position", "peak_rss_mib"}`.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from carryover.engine_process import Channel, run_worker

if TYPE_CHECKING:
    from vllm import LLM

_DRAFTS = "vllm:spec_decode_num_drafts"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
_ACCEPTED_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


@dataclass(frozen=True)
class Acceptance:
    """An engine's counts since its start; all zero without a drafter."""

    rounds: int
    accepted: int
    per_position: list[int]

    def since(self, earlier: Acceptance) -> Acceptance:
        """Return the difference to an earlier reading."""
        before = earlier.per_position or [0] * len(self.per_position)
        return Acceptance(
            rounds=self.rounds - earlier.rounds,
            accepted=self.accepted - earlier.accepted,
            per_position=[a - b for a, b in zip(self.per_position, before, strict=True)],
        )


def read_acceptance(llm: LLM) -> Acceptance:
    """Read vLLM's counters. They count before a stop or the token limit cuts the output."""
    from vllm.v1.metrics.reader import Counter, Vector

    counts = {_DRAFTS: 0, _ACCEPTED: 0}
    per_position: list[int] = []
    for metric in llm.get_metrics():
        if isinstance(metric, Counter) and metric.name in counts:
            counts[metric.name] += metric.value
        elif isinstance(metric, Vector) and metric.name == _ACCEPTED_PER_POSITION:
            per_position = list(metric.values)
    return Acceptance(counts[_DRAFTS], counts[_ACCEPTED], per_position)


def serve(channel: Channel) -> None:
    """Answer prompts until the driver closes the pipe."""
    started = time.perf_counter()
    from vllm import LLM, SamplingParams, TokensPrompt

    setup = channel.receive()
    if setup is None:
        return
    llm = LLM(**setup["engine"])
    channel.send({"startup_seconds": time.perf_counter() - started})
    while (request := channel.receive()) is not None:
        params = SamplingParams(**request["sampling"], detokenize=False)
        prompt = TokensPrompt(prompt_token_ids=request["prompt_ids"])
        before = read_acceptance(llm)
        began = time.perf_counter()
        completion = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
        seconds = time.perf_counter() - began
        acceptance = read_acceptance(llm).since(before)
        channel.send(
            {
                "output_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "seconds": seconds,
                "rounds": acceptance.rounds,
                "accepted": acceptance.accepted,
                "accepted_per_position": acceptance.per_position,
                "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            }
        )


if __name__ == "__main__":
    run_worker(serve)
