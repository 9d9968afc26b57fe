"""Worker of the `responses` stage: one vLLM engine that answers every prompt it is sent.

    python -m carryover.generation

In, one JSON object a line: `{"engine": {LLM arguments}, "sampling": {SamplingParams arguments}}`;
then, at any time, `{"id", "prompt_ids", "seed", "max_tokens"}`; after the last `{"end": true}`.
Out: `{"ready": true}`; every second `{"tokens": generated since the last}`; for a finished prompt
`{"id", "response_ids", "finish_reason"}`; when all are finished `{"end": true}`.
"""

from __future__ import annotations

import queue
import threading
import time

from carryover.engine_process import Channel, Message, run_worker

REPORT_SECONDS = 1.0


def generate(channel: Channel) -> None:
    """Decode in one continuous batch, so that no slot waits for a slow neighbour."""
    from vllm import LLM, RequestOutput, SamplingParams

    setup = channel.receive()
    if setup is None:
        return
    engine = LLM(**setup["engine"]).llm_engine
    incoming: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    threading.Thread(target=_forward, args=(channel, incoming), daemon=True).start()
    channel.send({"ready": True})

    lengths: dict[str, int] = {}
    unreported, reported_at = 0, time.monotonic()
    ended = False
    while True:
        while not ended and (not engine.has_unfinished_requests() or not incoming.empty()):
            message = incoming.get()
            if message is None:
                return
            if "end" in message:
                ended = True
                break
            params = SamplingParams(
                **setup["sampling"],
                seed=message["seed"],
                max_tokens=message["max_tokens"],
                detokenize=False,
            )
            engine.add_request(message["id"], {"prompt_token_ids": message["prompt_ids"]}, params)
        if not engine.has_unfinished_requests():
            break
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            completion = output.outputs[0]
            unreported += len(completion.token_ids) - lengths.get(output.request_id, 0)
            lengths[output.request_id] = len(completion.token_ids)
            if output.finished:
                channel.send(
                    {
                        "id": output.request_id,
                        "response_ids": list(completion.token_ids),
                        "finish_reason": completion.finish_reason,
                    }
                )
        if time.monotonic() - reported_at >= REPORT_SECONDS:
            channel.send({"tokens": unreported})
            unreported, reported_at = 0, time.monotonic()
    channel.send({"tokens": unreported})
    channel.send({"end": True})


def _forward(channel: Channel, incoming: queue.SimpleQueue[Message | None]) -> None:
    while (message := channel.receive()) is not None:
        incoming.put(message)
    incoming.put(None)


if __name__ == "__main__":
    run_worker(generate)
