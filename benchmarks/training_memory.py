"""Peak memory of a training step, against the size of the vocabulary and the number of anchors.

Each case runs in a process of its own, on CPU: peak resident memory during one step, less what was
resident before it (weights, batch, and a first step with 8 anchors, which loads the libraries'
kernels). Beside it stands what the logits of all labelled positions would take in fp32.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Report, arguments
from benchmarks.shapes import SMOLLM2_135M, TINY, Shape, random_batch, random_drafter, random_target
from benchmarks.training_step import BaselineStep
from carryover.training.dvd import draft_and_verify
from carryover.training.verify import Verifier

STEPS = ("baseline", "dvd")
FEW = 8  # anchors of the first step


def case_shape(base: Shape, vocabulary: int, anchors: int) -> Shape:
    """One response, long enough for the anchors."""
    length = base.prompt + 2 * max(anchors, 128)
    return replace(base, vocabulary=vocabulary, anchors=anchors, responses=1, length=length)


def measure(shape: Shape, step: str, seed: int) -> dict[str, float]:
    """MiB that one step needs above what is resident, in this process."""
    target = random_target(shape, seed, torch.bfloat16)
    drafter, vocabulary = random_drafter(shape, target, seed, None, carry=step == "dvd")
    verifier = Verifier(target, list(shape.feature_layers)) if step == "dvd" else None

    def run(shape: Shape) -> None:
        batch = random_batch(shape, seed, torch.bfloat16, "cpu", vocabulary)
        baseline = BaselineStep(drafter, vocabulary, batch, optimizer=False)
        before.append(_resident("VmRSS"))
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        if verifier is None:
            baseline()
        else:
            baseline.backward(draft_and_verify(drafter, vocabulary, verifier, batch))
            drafter.zero_grad()

    before: list[float] = []
    run(replace(shape, anchors=FEW))
    run(shape)
    return {"before_mib": before[-1], "step_mib": round(_resident("VmHWM") - before[-1], 1)}


def _resident(field: str) -> float:
    """MiB: VmRSS, resident now; VmHWM, its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return round(int(line.split()[1]) / 1024, 1)
    raise RuntimeError(f"no {field} in /proc/self/status")


def main() -> None:
    parser = arguments("training_memory", __doc__.splitlines()[0])
    parser.add_argument("--case", nargs=3, metavar=("STEP", "VOCABULARY", "ANCHORS"))
    chosen = parser.parse_args()
    base = TINY if chosen.tiny else SMOLLM2_135M
    if chosen.case:
        step, vocabulary, anchors = chosen.case
        shape = case_shape(base, int(vocabulary), int(anchors))
        print(json.dumps(measure(shape, step, chosen.seed)))
        return
    report = Report("training_memory", chosen.seed)
    cases: list[dict[str, Any]] = []
    for step in STEPS:
        for vocabulary in (97, 300) if chosen.tiny else (49152, 151936):
            for anchors in (8, 32) if chosen.tiny else (64, 512):
                command = [sys.executable, "-m", "benchmarks.training_memory"]
                command += ["--case", step, str(vocabulary), str(anchors)]
                command += ["--seed", str(chosen.seed)] + ["--tiny"] * chosen.tiny
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                logits = anchors * base.proposals * vocabulary * 4 / 2**20
                cases.append(
                    {
                        "step": step,
                        "vocabulary": vocabulary,
                        "anchors": anchors,
                        **json.loads(done.stdout.splitlines()[-1]),
                        "fp32_logits_mib": round(logits, 1),
                    }
                )
                print(cases[-1], flush=True)
    report.write(chosen.out, shape=vars(base), cases=cases)


if __name__ == "__main__":
    main()
