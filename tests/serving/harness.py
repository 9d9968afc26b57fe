"""Runs vLLM in a process of its own, once for all tests that only look at what it did."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from carryover.serving.plugin import WORKER
from tests.serving import checkpoints
from tests.serving.reference import DenseDrafter, DenseTarget

HERE = Path(__file__).parent
# One thread: the models are tiny, and OpenMP threads that wait for each other cost far more.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
# The V2 model runner on CPU, its Triton kernels run by Triton's interpreter.
V2 = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
    "PYTHONPATH": os.pathsep.join(
        [str(HERE / "interpreter"), *filter(None, [os.environ.get("PYTHONPATH")])]
    ),
}
PROMPT_LENGTHS = (5, 70, 23, 3, 41, 11)  # 70 is prefilled in two chunks (48 tokens a step)
GENERATED = 48
MARKOV_RANK = 16
ACCEPTED = [3, 7, 0, 5, 1, 6, 2, 4]  # right proposals by round: R runs over 0 .. B


def run_script(
    script: str, arguments: list[str], results: Path, *, v2: bool = False, plugins: bool = True
) -> Any:
    """Run a script of this folder that writes `results` with torch.save, and read that."""
    command = [sys.executable, str(HERE / script), *arguments, str(results)]
    environment = ENVIRONMENT | (V2 if v2 else {}) | ({} if plugins else {"VLLM_PLUGINS": ""})
    finished = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return torch.load(results)


def run_jobs(folder: Path, jobs: list[dict[str, Any]], *, v2: bool = False) -> list[dict[str, Any]]:
    """Run jobs of run_engine.py."""
    (folder / "jobs.json").write_text(json.dumps(jobs, default=str))
    return run_script("run_engine.py", [str(folder / "jobs.json")], folder / "results.pt", v2=v2)


def engine_arguments(target: Path, drafter: Path, **changes: Any) -> dict[str, Any]:
    """Of an engine that is started at most; `changes` has whole arguments, and single keys of
    speculative_config."""
    arguments = {
        "model": str(target),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 128,
        "kv_cache_memory_bytes": 16 << 20,
        "worker_cls": WORKER,
    }
    speculative = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": 7}
    speculative |= changes.pop("speculative_config", {})
    return arguments | changes | {"speculative_config": speculative}


def random_prompts(seed: int, vocabulary: int, lengths: tuple[int, ...]) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(1, vocabulary - 1) for _ in range(n)] for n in lengths]


class Served:
    """What vLLM did with one target and several drafters, and the dense models to compare with."""

    def __init__(self, folder: Path) -> None:
        self.prompts = random_prompts(0, checkpoints.VOCABULARY, PROMPT_LENGTHS)
        target = checkpoints.write_target(folder / "target", seed=0)
        drafters = {
            "carryover": {},
            "carryover, no q/k norm, draft vocabulary": {
                "qk_norm": False,
                "draft_vocabulary": 100,
            },
            "baseline": {"enabled": False},
            "baseline, no q/k norm": {"enabled": False, "qk_norm": False},
            "carryover, Markov": {"markov_rank": MARKOV_RANK},
            "baseline, Markov, draft vocabulary": {
                "enabled": False,
                "markov_rank": MARKOV_RANK,
                "draft_vocabulary": 100,
            },
        }
        folders = {
            name: checkpoints.write_drafter(folder / f"drafter-{index}", seed=1, **settings)
            for index, (name, settings) in enumerate(drafters.items())
        }
        base = {"target": target, "prompts": self.prompts, "sampling": {"max_tokens": GENERATED}}
        edited = base | {"continue_from": 0, "accepted": ACCEPTED}
        long = {"max_tokens": 2 * GENERATED + 32}
        jobs: dict[str, dict[str, Any]] = {"autoregressive": base | {"sampling": long}}
        for name, drafter in folders.items():
            # A baseline needs no worker of ours, unless it has a Markov head.
            worker = "carryover" in name or "Markov" in name
            jobs[name] = edited | {"drafter": drafter, "worker": worker}
            if name in ("carryover", "baseline"):  # the same weights
                jobs[name] |= {"watch_kv": True, "llm": {"kv_cache_memory_bytes": 8 << 20}}
        carryover = folders["carryover"]
        folders |= dict.fromkeys(("preempted", "prefix caching", "own proposals"), carryover)
        jobs["preempted"] = edited | {
            "drafter": carryover,
            "sampling": {"max_tokens": 2 * GENERATED},
            "llm": {"num_gpu_blocks_override": 10},
        }
        # The last two prompts come again after the first four, and find their prefix cached.
        jobs["prefix caching"] = edited | {
            "drafter": carryover,
            "prompts": [*self.prompts[:4], [*self.prompts[1], 9, 8, 7], self.prompts[1][:66]],
            "llm": {"enable_prefix_caching": True},
            "continue_from": None,
            "record": True,
        }
        jobs["own proposals"] = base | {"drafter": carryover, "record": True}
        jobs["length limit"] = base | {
            "drafter": carryover,
            "llm": {"max_model_len": 96},
            "record": True,
        }
        self.jobs = jobs
        results = run_jobs(folder, list(jobs.values()))
        self.results = dict(zip(jobs, results, strict=True))
        for name, result in self.results.items():
            assert "error" not in result, (name, result)
        self.target = DenseTarget.load(target, checkpoints.FEATURE_LAYERS)
        self.drafters = {name: DenseDrafter.load(path) for name, path in folders.items()}
