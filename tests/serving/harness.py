"""Runs vLLM in processes of its own, once for all tests that only look at what it did."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel

from carryover.serving.plugin import WORKER
from tests.ahead import running
from tests.serving import checkpoints
from tests.serving.reference import DenseDrafter, DenseTarget
from tests.tiny_target import SPECIALS, write_tokenizer

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
CAP = 1.5  # of the drafters with capped scores, most of which are larger without it
# Of some requests of a batch. An output ends where its grammar does, within a block.
REGEXES = ["([a-m][0-9]){40}", None, "[b-k]{20}", "(x|yz){20}", None, "[0-9]{3}(-[0-9]{3}){5}"]
ACCEPTED = [3, 7, 0, 5, 1, 6, 2, 4]  # right proposals by round: R runs over 0 .. B


def run_script(
    script: str, arguments: list[str], results: Path, *, v2: bool = False, plugins: bool = True
) -> Any:
    """Run a script of this folder that writes `results` with torch.save, and read that."""
    command = [sys.executable, str(HERE / script), *arguments, str(results)]
    environment = ENVIRONMENT | (V2 if v2 else {}) | ({} if plugins else {"VLLM_PLUGINS": ""})
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with running(command, env=environment, **streams) as process:
        # Hours: against a hang only, on a machine that may be busy with other things.
        _, errors = process.communicate(timeout=4 * 3600)
    assert process.returncode == 0, errors[-4000:]
    return torch.load(results)


def run_jobs(folder: Path, jobs: list[dict[str, Any]], *, v2: bool = False) -> list[dict[str, Any]]:
    """Run jobs of run_engine.py."""
    (folder / "jobs.json").write_text(json.dumps(jobs, default=str))
    return run_script("run_engine.py", [str(folder / "jobs.json")], folder / "results.pt", v2=v2)


def engine_arguments(target: Path, drafter: Path, **changes: Any) -> dict[str, Any]:
    """Of an engine that is started at most; `changes` has whole arguments, and single keys of
    speculative_config (None: without a drafter)."""
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
    further = changes.pop("speculative_config", {})
    if further is None:
        return arguments | changes
    return arguments | changes | {"speculative_config": speculative | further}


def run_refusals(
    folder: Path, cases: dict[str, tuple[dict[str, Any], dict[str, Any]]], *, v2: bool = False
) -> dict[str, str | None]:
    """The line that each case is refused with, or None.

    cases: name -> (arguments of write_drafter, changes of engine_arguments; with them `start` and
    `pretend_known` of refusals.py).
    """
    target = checkpoints.write_target(folder / "target", seed=0)
    written = []
    for index, (drafter, changes) in enumerate(cases.values()):
        path = checkpoints.write_drafter(folder / f"drafter-{index}", seed=1, **drafter)
        engine = engine_arguments(target, path, **changes)
        case: dict[str, Any] = {"start": engine.pop("start", False), "engine": engine}
        if "pretend_known" in engine:
            case["pretend_known"] = engine.pop("pretend_known")
        written.append(case)
    (folder / "cases.json").write_text(json.dumps(written))
    arguments = [str(folder / "cases.json")]
    results = run_script("refusals.py", arguments, folder / "results.pt", v2=v2)
    return dict(zip(cases, results, strict=True))


def check_refused(line: str | None, parts: list[str]) -> None:
    """One line that has all of `parts`."""
    assert line is not None
    assert "\n" not in line
    for part in parts:
        assert part in line


def check_best_tokens(
    target: DenseTarget, prompts: list[list[int]], outputs: list[list[int]]
) -> None:
    """Every token is the dense target's best, but for ties within 1e-3."""
    for prompt, output in zip(prompts, outputs, strict=True):
        _, logits = target(prompt + output)
        best = logits[len(prompt) - 1 : -1]
        gap = best.max(dim=1).values - best.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        assert gap.max() < 1e-3


def check_lossless(job: dict[str, Any], result: dict[str, Any], reference: dict[str, Any]) -> None:
    """The job's output is that of `reference`, which generated longer, up to the job's limits.

    reference: what the target generated by itself: a list of ids by prompt (a tuple).
    """
    tokens = job["sampling"]["max_tokens"]
    limit = job.get("llm", {}).get("max_model_len", 1 << 30)
    for prompt, output in zip(job["prompts"], result["outputs"], strict=True):
        assert output == reference[tuple(prompt)][: min(tokens, limit - len(prompt))]


def check_grammars(free: list[list[int]], outputs: list[list[int]]) -> None:
    """Outputs of REGEXES' requests match them, and were others without; the rest is as without."""
    symbols = SPECIALS + sorted(ByteLevel.alphabet())
    for regex, output, without in zip(REGEXES, outputs, free[: len(REGEXES)], strict=True):
        if regex is None:
            assert output == without[: len(output)]
        else:
            assert output != without[: len(output)]
            text = "".join(symbols[token] for token in output)
            assert re.fullmatch(regex, text.removesuffix(SPECIALS[0]))


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
        write_tokenizer(target)  # read where there is a grammar
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
        grammar = {"grammars": REGEXES, "llm": {"skip_tokenizer_init": False}}
        source = len(jobs)
        jobs["autoregressive, grammar"] = jobs["autoregressive"] | grammar
        jobs["grammar"] = jobs["carryover"] | {"watch_kv": False, "continue_from": source} | grammar
        carryover = folders["carryover"]
        again = ("grammar", "preempted", "prefix caching", "own proposals")
        folders |= dict.fromkeys(again, carryover)
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
        # The target is a Llama without a cap: what counts is the drafter's config.json.
        for name, drafted in (("capped", None), ("capped, draft vocabulary", 100)):
            capped = checkpoints.write_drafter(
                folder / name,
                seed=1,
                markov_rank=MARKOV_RANK,
                draft_vocabulary=drafted,
                config={"final_logit_softcapping": CAP},
            )
            jobs[name] = base | {"drafter": capped, "record": True}
        self.jobs = jobs
        results = run_jobs(folder, list(jobs.values()))
        self.results = dict(zip(jobs, results, strict=True))
        for name, result in self.results.items():
            assert "error" not in result, (name, result)
        self.target = DenseTarget.load(target, checkpoints.FEATURE_LAYERS)
        self.drafters = {name: DenseDrafter.load(path) for name, path in folders.items()}
