"""Speed of training steps on CPU: against `speculators`, against the machine, against its parts.

1. Baseline step against the DFlash training step of `speculators`, if that is installed: anchors
   a second, whole optimizer steps on the same shapes and weights, in turn.
2. Share of the machine's own matrix rate that the baseline step and verification reach.
3. DVD step against its parts measured alone.

Target, drafter and responses are random, of SmolLM2-135M's shapes, in the dtype that the default
config would choose here (bfloat16 where the CPU multiplies it, else float32).
"""

from __future__ import annotations

import importlib.util
import os
import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.measure import Report, arguments, in_turn, positive, ratio, summary
from benchmarks.shapes import SMOLLM2_135M, TINY, Shape, random_batch, random_drafter, random_target
from benchmarks.steps import Steps, forward_backward, measure
from carryover.config.precision import resolve
from carryover.drafter.model import Drafter
from carryover.training import keep_freed_memory
from carryover.training.batch import Batch
from carryover.training.dvd import Blocks
from carryover.training.vocabulary import Vocabulary

# Draft tokens of the default run's reduced vocabulary, about.
REDUCED = 5000
# First proposals that are right: with none of the later ones, acceptance length 1.35, which the
# default run's drafters reach (README.md of the repository).
RIGHT = 0.35


class OptimizerStep:
    """Our whole step: forward, loss, backward, clipping, AdamW.

    Weights that are not fp32 are updated through fp32 copies, as DeepSpeed keeps them.
    """

    def __init__(self, drafter: Drafter, vocabulary: Vocabulary, batch: Batch) -> None:
        self.drafter, self.vocabulary, self.batch = drafter, vocabulary, batch
        self.parameters = list(drafter.parameters())
        self.masters = [p.detach().float().clone() for p in self.parameters]
        if self.parameters[0].dtype == torch.float32:
            self.masters = self.parameters  # type: ignore[assignment]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-4)

    def __call__(self) -> None:
        blocks = Blocks(self.batch.anchors, self.batch.valid)
        forward_backward(self.drafter, self.vocabulary, self.batch, blocks)
        pairs = list(zip(self.masters, self.parameters, strict=True))
        for master, parameter in pairs:
            if master is not parameter:
                master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in pairs:
                if master is not parameter:
                    parameter.copy_(master)
        self.optimizer.zero_grad()


def against_speculators(
    shape: Shape,
    draft_vocabulary: int | None,
    attention: str,
    dtype: torch.dtype,
    rounds: int,
    seed: int,
) -> dict[str, Any]:
    """Part 1 with one head: full (None) or of `draft_vocabulary` rows. attention: theirs."""
    from benchmarks.speculators_step import SpeculatorsStep, check_equal

    target = random_target(shape, seed, torch.float32)
    drafter, vocabulary = random_drafter(shape, target, seed, draft_vocabulary, carry=False)
    batch = random_batch(shape, seed, torch.float32, "cpu", vocabulary)
    difference = check_equal(shape, drafter, vocabulary, batch, attention, seed)
    theirs = SpeculatorsStep(shape, drafter, vocabulary, batch, attention, dtype)
    vocabulary.head = vocabulary.head.to(dtype)
    batch = batch.to(torch.device("cpu"), dtype)
    ours = OptimizerStep(drafter.to(dtype), vocabulary, batch)
    seconds = in_turn({"ours": ours, "speculators": theirs}, rounds)
    anchors = shape.responses * shape.anchors
    return {
        "head_rows": len(vocabulary.head),
        "anchors_per_s": {n: round(anchors * rounds / sum(s), 1) for n, s in seconds.items()},
        "speedup": ratio(seconds["speculators"], seconds["ours"], seed),
        "speculators_targets_s": round(theirs.seconds_for_targets(), 4),
        "fp32_difference_of_loss_and_gradients": difference,
        "times": {name: summary(s) for name, s in seconds.items()},
    }


def attentions(
    shape: Shape, draft_vocabulary: int, dtype: torch.dtype, seed: int
) -> dict[str, float | str]:
    """Seconds of a step with each of its implementations, after one step; or its error."""
    from benchmarks.speculators_step import SpeculatorsStep

    target = random_target(shape, seed, torch.float32)
    drafter, vocabulary = random_drafter(shape, target, seed, draft_vocabulary, carry=False)
    batch = random_batch(shape, seed, torch.float32, "cpu", vocabulary)
    tried: dict[str, float | str] = {}
    for name in ("sdpa", "eager", "simple_flex_attention"):
        try:
            step = SpeculatorsStep(shape, drafter, vocabulary, batch, name, dtype)
            step()
            start = time.perf_counter()
            step()
            tried[name] = round(time.perf_counter() - start, 4)
        except NotImplementedError as error:
            tried[name] = str(error).splitlines()[0]
    return tried


def main() -> None:
    parser = arguments("training_step", __doc__.splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=6)
    parser.add_argument("--dtype", default=resolve("auto"), choices=("bfloat16", "float32"))
    chosen = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    keep_freed_memory()
    report = Report("training_step", chosen.seed)
    shape, square = (TINY, 64) if chosen.tiny else (SMOLLM2_135M, 2048)
    dtype, reduced = getattr(torch, chosen.dtype), min(REDUCED, shape.vocabulary // 2)
    compared: dict[str, Any] | str = "speculators is not installed"
    if importlib.util.find_spec("speculators"):
        normed = replace(shape, qk_norm=True)  # its model always normalises queries and keys
        tried = attentions(normed, reduced, dtype, chosen.seed)
        fastest = min((s, name) for name, s in tried.items() if isinstance(s, float))[1]
        compared = {"attention": {"chosen": fastest, "tried_s": tried}}
        for name, rows in (("full", None), ("reduced", reduced)):
            compared[name] = against_speculators(
                normed, rows, fastest, dtype, chosen.rounds, chosen.seed
            )
    steps = Steps(shape, dtype, "cpu", chosen.seed, reduced, RIGHT)
    report.write(
        chosen.out,
        shape=vars(shape),
        against_speculators=compared,
        steps=measure(steps, chosen.rounds, chosen.seed, square),
    )


if __name__ == "__main__":
    main()
