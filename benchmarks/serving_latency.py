"""What carrying rejected rows costs in drafting time, in vLLM.

One engine, one drafter, and from round to round with and without carried rows, so that both meet
the same caches, batch and context. Timed is the drafter's part of a round in vLLM's V1 runner:
counting the rejected rows (`prepare_inputs_padded`) and making the draft (`propose`).

The weights are random, of SmolLM2-135M's shapes and the default drafter's, and nothing is accepted:
R = B in every round, the most that there is to carry.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Report, arguments, median_ratio, positive, summary
from benchmarks.shapes import SMOLLM2_135M, TINY, Shape, random_drafter, random_target
from carryover.config.precision import resolve
from carryover.drafter.checkpoint import save_drafter
from carryover.serving_env import vllm_environment

BATCHES = (1, 8)
DRAFT_VOCABULARY = 4608
PROMPT, WARM_UP, MAX_MODEL_LEN = 256, 8, 2048
TARGET_RATIO = 1.05


def write_models(folder: Path, shape: Shape, dtype: str, seed: int) -> None:
    """`folder`/target and `folder`/drafter, with random weights."""
    reduced = min(DRAFT_VOCABULARY, shape.vocabulary // 2)
    target = random_target(shape, seed, getattr(torch, dtype))
    target.save_pretrained(folder / "target")
    drafter, vocabulary = random_drafter(shape, target, seed, reduced, carry=True)
    with torch.no_grad():  # of the size that the features have: a zero would be as fast
        drafter.carry_embedding.normal_()
    observed = vocabulary.target_ids(torch.arange(reduced))
    save_drafter(folder / "drafter", drafter, observed, vocabulary.head)


class Watch:
    """Times the drafter's part of each round, and lets it carry in every other one."""

    def __init__(self, drafter: Any, proposals: int) -> None:
        self.drafter, self.proposals = drafter, proposals
        self.shift = drafter.model.carry_shift
        self.rounds: list[dict[str, Any]] = []
        self._propose, self._prepare = drafter.propose, drafter.prepare_inputs_padded
        self._counting = 0.0
        drafter.propose, drafter.prepare_inputs_padded = self.propose, self.prepare

    def prepare(self, *args: Any) -> Any:
        carries = len(self.rounds) % 2 == 0
        self.drafter.model.carry_shift = self.shift if carries else None
        start = time.perf_counter()
        result = self._prepare(*args)
        self._counting = time.perf_counter() - start
        return result

    def propose(self, **arguments: Any) -> Any:
        counts = self.drafter._carried
        carried = 0 if counts is None else int(counts.sum())
        start = time.perf_counter()
        result = self._propose(**arguments)
        seconds = time.perf_counter() - start
        requests = result.shape[0]
        # A step that also prefills has other rows.
        if arguments["target_token_ids"].shape[0] == requests * (1 + self.proposals):
            carries = self.drafter.model.carry_shift is not None
            if carried != (requests * self.proposals if carries else 0):
                raise RuntimeError(f"{carried} rows carried for {requests} requests")
            self.rounds.append(
                {"carries": carries, "requests": requests, "seconds": self._counting + seconds}
            )
        return result


def measure(shape: Shape, dtype: str, rounds: int, seed: int) -> dict[str, Any]:
    """Ratio of drafting times with and without carry at each batch size, over `rounds` pairs."""
    from vllm import LLM, SamplingParams

    from carryover.serving.plugin import WORKER

    numbers = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder), shape, dtype, seed)
        llm = LLM(
            model=f"{folder}/target",
            skip_tokenizer_init=True,
            dtype=dtype,
            enforce_eager=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max(BATCHES),
            kv_cache_memory_bytes=1 << 30,
            enable_prefix_caching=False,
            generation_config="vllm",
            seed=seed,
            worker_cls=WORKER,
            speculative_config={
                "method": "dflash",
                "model": f"{folder}/drafter",
                "num_speculative_tokens": shape.proposals,
            },
        )
        core: Any = llm.llm_engine.engine_core
        runner = core.engine_core.model_executor.driver_worker.worker.model_runner
        watch = Watch(runner.drafter, shape.proposals)
        found = {}
        for requests in BATCHES:
            watch.rounds = []
            prompts = [
                {"prompt_token_ids": [numbers.randrange(shape.vocabulary) for _ in range(PROMPT)]}
                for _ in range(requests)
            ]
            sampling = SamplingParams(
                temperature=0,
                max_tokens=2 * rounds + WARM_UP + 2,
                ignore_eos=True,
                detokenize=False,
            )
            llm.generate(prompts, sampling, use_tqdm=False)
            whole = [r for r in watch.rounds if r["requests"] == requests][WARM_UP:]
            on = [r["seconds"] for r in whole if r["carries"]][:rounds]
            off = [r["seconds"] for r in whole if not r["carries"]][:rounds]
            found[str(requests)] = {
                "carry_over_without": median_ratio(on, off, seed),
                "carry": summary(on),
                "without": summary(off),
            }
        return found


def main() -> None:
    parser = arguments("serving_latency", __doc__.splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=400, help="pairs at each batch size")
    chosen = parser.parse_args()
    environment = vllm_environment()
    if any(os.environ.get(name) != value for name, value in environment.items()):
        # OpenMP and LD_PRELOAD are read when a process starts.
        command = [sys.executable, "-m", "benchmarks.serving_latency", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | environment)
    # vLLM's attention on CPU has no heads of 8.
    tiny = replace(TINY, hidden=64, heads=2, kv_heads=1, head_dim=32)
    shape = tiny if chosen.tiny else SMOLLM2_135M
    dtype = resolve("auto")
    report = Report("serving_latency", chosen.seed)
    batches = measure(shape, dtype, chosen.rounds, chosen.seed)
    for requests, found in batches.items():
        of = found["carry_over_without"]
        print(
            f"batch {requests}: {1e3 * found['carry']['median_s']:.2f} ms with carry, "
            f"{1e3 * found['without']['median_s']:.2f} ms without, "
            f"ratio {of['ratio']} [{of['low']}, {of['high']}]"
        )
    report.write(
        chosen.out,
        dtype=dtype,
        batches=batches,
        target_ratio=TARGET_RATIO,
        met=all(found["carry_over_without"]["ratio"] <= TARGET_RATIO for found in batches.values()),
    )


if __name__ == "__main__":
    main()
