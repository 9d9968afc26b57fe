"""`vllm serve` end to end: a client that streams, /metrics, `vllm bench serve`, a soak, a trace.

The target is tiny and random, and so is the drafter: this is about the server, not about speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from openai import APIError, AsyncOpenAI, OpenAI
from transformers import LlamaForCausalLM

from carryover.serving.plugin import WORKER
from carryover.serving.trace import read_trace
from tests.serving.checkpoints import write_drafter
from tests.tiny_target import VOCABULARY, write_tiny_target

pytestmark = pytest.mark.long

B = 7
LENGTH = 256
CONCURRENCY = 16
REQUESTS = 500
CANCELLED = 0.1
SLACK_MIB = 16  # what the server may grow by from its first hundred requests to its last
VLLM = (sys.executable, "-m", "carryover", "vllm")
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # oneDNN keeps a compiled product for each number of rows that it has met, up to 1024: 230 MiB
    # in 2,800 requests, with a plain drafter too. With 8 of them a leak can be told from that.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8",
}


class Server:
    """A running `vllm serve`, in a process group of its own."""

    def __init__(self, target: Path, drafter: Path, log: Path, *more: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.target, self.log = target, log
        speculative = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": B}
        command = [
            *VLLM, "serve", str(target),
            "--speculative-config", json.dumps(speculative),
            "--worker-cls", WORKER,
            "--served-model-name", "tiny",
            "--host", "127.0.0.1", "--port", str(self.port),
            "--dtype", "float32",
            "--max-model-len", str(LENGTH),
            "--max-num-seqs", str(CONCURRENCY),
            "--kv-cache-memory-bytes", str(64 << 20),
            "--generation-config", "vllm",
            *more,
        ]  # fmt: skip
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                command, env=ENVIRONMENT, stdout=sink, stderr=sink, start_new_session=True
            )

    def wait(self, seconds: float = 900) -> None:
        end = time.monotonic() + seconds
        while not self.healthy():
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(self.log.read_text()[-4000:])
            time.sleep(1)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return answer.read().decode()

    def healthy(self) -> bool:
        try:
            self.get("/health")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
        return True

    def metrics(self) -> dict[str, float]:
        """The sum of each metric over its labels."""
        found: dict[str, float] = {}
        for line in self.get("/metrics").splitlines():
            match = re.match(r"(vllm:[a-z_]+)(?:{[^}]*})? (\S+)$", line)
            if match:
                found[match[1]] = found.get(match[1], 0.0) + float(match[2])
        return found

    def resident_mib(self) -> float:
        """Of the server and its engine process."""
        main = psutil.Process(self.process.pid)
        return sum(p.memory_info().rss for p in [main, *main.children(recursive=True)]) / 2**20

    def idle(self, seconds: float = 60) -> None:
        """Wait until no request is running or waiting."""
        end = time.monotonic() + seconds
        while True:
            metrics = self.metrics()
            left = metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]
            if not left:
                return
            assert time.monotonic() < end, f"{left} requests are left"
            time.sleep(0.5)

    def stop(self) -> None:
        """As a user stops it; whatever of its group is left after a minute is killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = write_tiny_target(folder / "target")
    return target, write_drafter(folder / "drafter", seed=1, vocabulary=VOCABULARY)


@pytest.fixture(scope="module")
def server(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Compiled, as `vllm serve` is by default."""
    running = Server(*models, tmp_path_factory.mktemp("server") / "server.log")
    try:
        running.wait()
        yield running
    finally:
        running.stop()


def greedy(target: Path, ids: list[int], tokens: int) -> list[int]:
    """The target's own continuation, by transformers."""
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    output = model.generate(
        torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, eos_token_id=None
    )
    return output[0, len(ids) :].tolist()


def random_ids(numbers: random.Random, length: int) -> list[int]:
    return [numbers.randrange(4, 260) for _ in range(length)]


def test_the_log_says_that_rejected_states_are_carried(server: Server) -> None:
    said = "carryover: rejected states are carried into the next draft"
    assert said in server.log.read_text()


def test_a_client_streams_what_the_target_says(server: Server) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "What is carried over?"}],
        "temperature": 0,
        "max_tokens": 40,
    }
    whole = client.chat.completions.create(**asked).choices[0].message.content
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices
    ]
    assert len(pieces) > 5 and "".join(pieces) == whole

    ids = random_ids(random.Random(0), 50)
    streamed: list[int] = []
    for chunk in client.completions.create(
        model="tiny",
        prompt=ids,
        temperature=0,
        max_tokens=60,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    ):
        for choice in chunk.choices:
            streamed += (choice.model_extra or {}).get("token_ids") or []
    assert streamed == greedy(server.target, ids, 60)


def test_metrics_count_drafts(server: Server) -> None:
    before = server.metrics()
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    answer = client.completions.create(
        model="tiny",
        prompt=[5, 6, 7],
        temperature=0,
        max_tokens=50,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage is not None and answer.usage.completion_tokens == 50
    server.idle()  # the last round is counted
    grown = {name: value - before.get(name, 0) for name, value in server.metrics().items()}
    drafts = grown["vllm:spec_decode_num_drafts_total"]
    accepted = grown["vllm:spec_decode_num_accepted_tokens_total"]
    assert grown["vllm:spec_decode_num_draft_tokens_total"] == drafts * B
    # 50 tokens: one from prefill, then 1 + accepted a round; the last may run over.
    assert 49 <= drafts + accepted < 49 + 1 + B
    assert grown["vllm:generation_tokens_total"] == 50


def test_vllm_bench_serve_runs_against_it(server: Server, tmp_path: Path) -> None:
    command = [
        *VLLM, "bench", "serve",
        "--backend", "vllm", "--base-url", server.url, "--endpoint", "/v1/completions",
        "--model", str(server.target), "--served-model-name", "tiny",
        "--dataset-name", "random", "--random-input-len", "30", "--random-output-len", "20",
        "--num-prompts", "20", "--max-concurrency", "4", "--ignore-eos", "--seed", "0",
        "--save-result", "--result-dir", str(tmp_path), "--result-filename", "bench.json",
    ]  # fmt: skip
    finished = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr[-4000:]
    result = json.loads((tmp_path / "bench.json").read_text())
    assert result["completed"] == 20 and result["failed"] == 0
    assert result["total_output_tokens"] == 20 * 20
    assert "Acceptance" in finished.stdout


# Opens streams and says so; the test kills it while they run.
CLIENT = """
import asyncio, sys
from openai import AsyncOpenAI

async def stream(client, number):
    answer = await client.completions.create(
        model="tiny", prompt=[5 + number] * 20, max_tokens=230, stream=True,
        extra_body={"ignore_eos": True})
    async for _ in answer:
        print("token", flush=True)

async def main():
    client = AsyncOpenAI(base_url=sys.argv[1] + "/v1", api_key="none")
    await asyncio.gather(*(stream(client, number) for number in range(4)))

asyncio.run(main())
"""


async def one_request(client: AsyncOpenAI, numbers: random.Random) -> str:
    """A request of random lengths; some are given up in the middle. Returns what came of it."""
    prompt = random_ids(numbers, numbers.randint(1, 150))
    tokens = numbers.randint(1, 60)
    give_up = numbers.random() < CANCELLED
    settings: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": numbers.choice([0.0, 1.0]),
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }
    received, usage = 0, None
    answer = await client.completions.create(**settings)
    async for chunk in answer:
        for choice in chunk.choices:
            received += len((choice.model_extra or {}).get("token_ids") or [])
        usage = chunk.usage or usage
        if give_up:
            await answer.close()
            return "cancelled"
    if usage is not None and received == usage.completion_tokens == tokens:
        return "complete"
    return f"{received} of {tokens} tokens, usage {usage}"


async def soak(url: str, requests: int, seed: int) -> list[str]:
    numbers = random.Random(seed)
    turns = asyncio.Semaphore(CONCURRENCY)
    # Retries would hide a lost request.
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)

    async def in_turn(own: random.Random) -> str:
        async with turns:
            try:
                return await one_request(client, own)
            except APIError as error:
                return f"{type(error).__name__}: {error}"

    async with client:
        return await asyncio.gather(
            *(in_turn(random.Random(numbers.random())) for _ in range(requests))
        )


def test_soak_with_cancellations_and_a_killed_client(server: Server) -> None:
    outcomes = asyncio.run(soak(server.url, REQUESTS // 5, seed=1))
    server.idle()
    early = server.resident_mib()

    victim = subprocess.Popen(
        [sys.executable, "-c", CLIENT, server.url], stdout=subprocess.PIPE, text=True
    )
    assert victim.stdout is not None and victim.stdout.readline() == "token\n"
    assert server.metrics()["vllm:num_requests_running"] > 0
    victim.kill()
    victim.wait()

    outcomes += asyncio.run(soak(server.url, REQUESTS - len(outcomes), seed=2))
    server.idle()
    assert len(outcomes) == REQUESTS
    assert set(outcomes) == {"complete", "cancelled"}
    cancelled = outcomes.count("cancelled")
    assert 0.5 * CANCELLED < cancelled / REQUESTS < 2 * CANCELLED
    assert server.healthy()
    metrics = server.metrics()
    # All blocks of the cache are free again, those of the given-up requests too.
    assert metrics["vllm:kv_cache_usage_perc"] == 0
    growth = server.resident_mib() - early
    assert growth < SLACK_MIB, f"{growth:.0f} MiB more after {REQUESTS} requests than after 100"


def test_a_trace_is_written_by_the_engine_process(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "trace"
    setting = json.dumps({"carryover_trace": {"folder": str(folder)}})
    running = Server(
        *models, tmp_path / "server.log", "--enforce-eager", "--additional-config", setting
    )
    outputs: dict[str, list[int]] = {}
    try:
        running.wait()
        client = OpenAI(base_url=f"{running.url}/v1", api_key="none")
        for number in range(3):
            answer = client.completions.create(
                model="tiny",
                prompt=random_ids(random.Random(number), 20),
                temperature=0,
                max_tokens=30,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            outputs[answer.id] = (answer.choices[0].model_extra or {})["token_ids"]
        running.idle()
    finally:
        running.stop()
    traced: dict[str, list[int]] = {}
    for row in read_trace(folder).to_pylist():
        (request,) = [name for name in outputs if name in row["request"]]
        tokens = [*row["proposals"][: row["accepted"]], row["next_token"]]
        traced.setdefault(request, []).extend(tokens)
    assert {name: ids[:30] for name, ids in traced.items()} == outputs
