"""Peak memory of a training step, against the size of the vocabulary and the number of anchors.

Each case runs in a process of its own, on CPU, on one response: peak resident memory during a step,
less what was resident before it (weights and batch; an earlier step has loaded the libraries'
kernels, and its freed memory was handed back). Beside it stands what the logits of all labelled
positions would take, once, in fp32.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Report, arguments
from benchmarks.shapes import SMOLLM2_135M, TINY, Shape
from benchmarks.steps import Steps
from carryover.config.precision import resolve

STEPS = ("baseline_step", "dvd_step")


def measure(shape: Shape, step: str, dtype: torch.dtype, seed: int) -> dict[str, float]:
    """MiB resident before one step of `Steps`, and what the step needs above that."""
    run = getattr(Steps(shape, dtype, "cpu", seed, None, right=0.35), step)
    run()
    ctypes.CDLL(None).malloc_trim(0)
    before = _resident_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    run()
    return {"before_mib": before, "step_mib": round(_resident_mib("VmHWM") - before, 1)}


def _resident_mib(field: str) -> float:
    """VmRSS: resident now; VmHWM: its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return round(int(line.split()[1]) / 1024, 1)
    raise RuntimeError(f"no {field} in /proc/self/status")


def main() -> None:
    parser = arguments("training_memory", __doc__.splitlines()[0])
    parser.add_argument("--case", nargs=3, metavar=("STEP", "VOCABULARY", "ANCHORS"))
    parser.add_argument("--dtype", default=resolve("auto"), choices=("bfloat16", "float32"))
    chosen = parser.parse_args()
    vocabularies, numbers = (97, 300), (8, 16)
    base = replace(TINY, responses=1)
    if not chosen.tiny:
        vocabularies, numbers = (49152, 151936), (64, 512)
        base = replace(SMOLLM2_135M, responses=1, length=SMOLLM2_135M.prompt + 600)
    if chosen.case:
        step, vocabulary, anchors = chosen.case
        shape = replace(base, vocabulary=int(vocabulary), anchors=int(anchors))
        print(json.dumps(measure(shape, step, getattr(torch, chosen.dtype), chosen.seed)))
        return
    report = Report("training_memory", chosen.seed)
    cases: list[dict[str, Any]] = []
    for step in STEPS:
        for vocabulary in vocabularies:
            for anchors in numbers:
                command = [sys.executable, "-m", "benchmarks.training_memory"]
                command += ["--case", step, str(vocabulary), str(anchors)]
                command += ["--seed", str(chosen.seed), "--dtype", chosen.dtype]
                command += ["--tiny"] * chosen.tiny
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                logits = anchors * base.proposals * vocabulary * 4 / 2**20
                case = {
                    "step": step,
                    "vocabulary": vocabulary,
                    "anchors": anchors,
                    **json.loads(done.stdout.splitlines()[-1]),
                    "fp32_logits_mib": round(logits, 1),
                }
                cases.append(case)
                print(case, flush=True)
                # After each case: a run that is stopped keeps what it has.
                report.write(chosen.out, shape=vars(base), dtype=chosen.dtype, cases=cases)


if __name__ == "__main__":
    main()
