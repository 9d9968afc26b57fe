"""What carrying rejected rows costs in drafting time: `python benchmarks/serving_latency.py`.

One engine, one drafter, and from round to round with and without carried rows, so that both meet
the same caches, batch and context. Timed is the drafter's part of a round in vLLM's V1 runner:
counting the rejected rows (`prepare_inputs_padded`) and making the draft (`propose`).

The weights are random, of SmolLM2-135M's shapes and the default drafter's, and nothing is accepted:
R = B in every round, the most that there is to carry.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SEED = 42
BATCHES = (1, 8)
PROPOSALS, DRAFT_VOCABULARY = 7, 4608
PROMPT, WARM_UP = 256, 8
BOOTSTRAP = 2000
TARGET_RATIO = 1.05


def write_models(folder: Path) -> tuple[Path, Path]:
    """Target and drafter with random weights in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from carryover.drafter.checkpoint import save_drafter
    from carryover.drafter.config import DrafterConfig
    from carryover.drafter.model import Drafter

    torch.manual_seed(SEED)
    shared: dict[str, Any] = {
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "vocab_size": 49152,
    }
    llama = LlamaConfig(
        **shared,
        num_hidden_layers=30,
        rope_theta=100000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(llama).to(torch.bfloat16).save_pretrained(folder / "target")
    config = DrafterConfig(
        **shared,
        num_hidden_layers=2,
        rope_theta=100000.0,
        target_hidden_size=576,
        target_layer_ids=(1, 7, 13, 19, 25),
        target_blocks=30,
        mask_token_id=3,
        proposals=PROPOSALS,
        qk_norm=False,
        draft_vocab_size=DRAFT_VOCABULARY,
        carry=True,
    )
    drafter = Drafter(config).to(torch.bfloat16)
    head = torch.randn(DRAFT_VOCABULARY, 576).to(torch.bfloat16)
    observed = torch.arange(1, 1 + DRAFT_VOCABULARY) * 10
    save_drafter(folder / "drafter", drafter, observed, head)
    return folder / "target", folder / "drafter"


class Watch:
    """Times the drafter's part of each round, and lets it carry in every other one."""

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter
        self.shift = drafter.model.carry_shift
        self.rounds: list[dict[str, Any]] = []
        self.counted = 0.0
        self._propose, self._prepare = drafter.propose, drafter.prepare_inputs_padded
        drafter.propose, drafter.prepare_inputs_padded = self.propose, self.prepare

    def prepare(self, *args: Any) -> Any:
        carries = len(self.rounds) % 2 == 0
        self.drafter.model.carry_shift = self.shift if carries else None
        start = time.perf_counter()
        result = self._prepare(*args)
        self.counted = time.perf_counter() - start
        return result

    def propose(self, **arguments: Any) -> Any:
        counts = self.drafter._carried
        carried = 0 if counts is None else int(counts.sum())
        start = time.perf_counter()
        result = self._propose(**arguments)
        seconds = time.perf_counter() - start
        requests = result.shape[0]
        if arguments["target_token_ids"].shape[0] == requests * (1 + PROPOSALS):
            self.rounds.append(
                {
                    "carries": self.drafter.model.carry_shift is not None,
                    "requests": requests,
                    "carried": carried / requests,
                    "seconds": self.counted + seconds,
                }
            )
        return result


def compare(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratio of the times with and without, by pairs of neighbouring rounds.

    The median of the pairs' ratios: what stops the process for a while (another one's turn) hits
    single rounds. The interval is a percentile bootstrap over pairs.
    """
    import numpy as np

    on = np.array([r["seconds"] for r in rounds if r["carries"]])
    off = np.array([r["seconds"] for r in rounds if not r["carries"]])
    pairs = min(len(on), len(off))
    ratios = on[:pairs] / off[:pairs]
    generator = np.random.default_rng(SEED)
    draws = np.median(generator.choice(ratios, size=(BOOTSTRAP, pairs)), axis=1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return {
        "ratio": round(float(np.median(ratios)), 4),
        "low": round(float(low), 4),
        "high": round(float(high), 4),
        "pairs": pairs,
        "with_carry_ms": round(float(np.median(on)) * 1e3, 3),
        "without_ms": round(float(np.median(off)) * 1e3, 3),
        "carried_rows_a_request": round(
            float(np.mean([r["carried"] for r in rounds if r["carries"]])), 2
        ),
    }


def measure(rounds: int) -> dict[str, Any]:
    """The comparison at each batch size, `rounds` rounds each."""
    import random

    from vllm import LLM, SamplingParams

    from carryover.serving.plugin import WORKER

    numbers = random.Random(SEED)
    with tempfile.TemporaryDirectory() as folder:
        target, drafter = write_models(Path(folder))
        llm = LLM(
            model=str(target),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=2048,
            max_num_seqs=max(BATCHES),
            kv_cache_memory_bytes=1 << 30,
            enable_prefix_caching=False,
            generation_config="vllm",
            seed=SEED,
            worker_cls=WORKER,
            speculative_config={
                "method": "dflash",
                "model": str(drafter),
                "num_speculative_tokens": PROPOSALS,
            },
        )
        core: Any = llm.llm_engine.engine_core
        watch = Watch(core.engine_core.model_executor.driver_worker.worker.model_runner.drafter)
        found = {}
        for requests in BATCHES:
            watch.rounds = []
            prompts = [
                {"prompt_token_ids": [numbers.randrange(10, 49000) for _ in range(PROMPT)]}
                for _ in range(requests)
            ]
            sampling = SamplingParams(
                temperature=0, max_tokens=rounds + WARM_UP, ignore_eos=True, detokenize=False
            )
            llm.generate(prompts, sampling, use_tqdm=False)
            whole = [r for r in watch.rounds if r["requests"] == requests]
            found[str(requests)] = compare(whole[WARM_UP:])
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400, help="rounds at each batch size")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "serving_latency.json")
    options = parser.parse_args()

    from carryover.serving_env import vllm_environment

    environment = vllm_environment()
    if any(os.environ.get(name) != value for name, value in environment.items()):
        # OpenMP and LD_PRELOAD are read when a process starts.
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | environment)

    from carryover.artifacts import git_state, hardware, package_versions, write_json

    started, load = datetime.now(UTC), os.getloadavg()
    batches = measure(options.rounds)
    write_json(
        options.out,
        {
            "benchmark": "serving_latency",
            "batches": batches,
            "target_ratio": TARGET_RATIO,
            "met": all(found["ratio"] <= TARGET_RATIO for found in batches.values()),
            "provenance": {
                "git": git_state(),
                "packages": package_versions(),
                "hardware": hardware(),
                "threads": environment.get("OMP_NUM_THREADS"),
                "load_average": {"before": load, "after": os.getloadavg()},
                "seed": SEED,
                "started": started.isoformat(timespec="seconds"),
                "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        },
    )
    for requests, found in batches.items():
        print(
            f"batch {requests}: {found['with_carry_ms']} ms with carry, {found['without_ms']} ms "
            f"without, ratio {found['ratio']} [{found['low']}, {found['high']}]"
        )


if __name__ == "__main__":
    main()
