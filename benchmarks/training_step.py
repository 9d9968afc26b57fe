"""Speed of training steps on CPU: against `speculators`, against the machine, against its parts.

1. Baseline step against the DFlash training step of `speculators`, if that is installed: anchors
   a second, whole optimizer steps on the same shapes and weights, in turn.
2. Share of the machine's bf16 matrix rate that the baseline step and verification reach.
3. DVD step against its parts measured alone.

Target, drafter and responses are random, of SmolLM2-135M's shapes.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import flops
from benchmarks.measure import Report, arguments, in_turn, matrix_products, ratio, summary
from benchmarks.shapes import (
    SMOLLM2_135M,
    TINY,
    Shape,
    partly_right,
    random_batch,
    random_drafter,
    random_target,
)
from carryover.drafter.model import Drafter
from carryover.training import keep_freed_memory
from carryover.training.batch import Batch
from carryover.training.dvd import Blocks, draft_and_verify
from carryover.training.objective import draft_loss, label
from carryover.training.verify import Verifier
from carryover.training.vocabulary import Vocabulary

GAMMA = 4.0
# Draft tokens of the default run's reduced vocabulary, about.
REDUCED = 5000
# First proposals that are right: with none of the later ones, acceptance length 1.35, which the
# default run's drafters reach (README.md of the repository).
RIGHT = 0.35


class BaselineStep:
    """Our step: forward and loss in the drafter's dtype, and its optimizer if asked for.

    The optimizer is AdamW on fp32 copies of bf16 weights, as DeepSpeed keeps them.
    """

    def __init__(
        self, drafter: Drafter, vocabulary: Vocabulary, batch: Batch, *, optimizer: bool
    ) -> None:
        self.drafter, self.vocabulary, self.batch = drafter, vocabulary, batch
        self.optimizer = None
        if optimizer:
            self.parameters = list(drafter.parameters())
            self.masters = [p.detach().float() for p in self.parameters]
            self.optimizer = torch.optim.AdamW(self.masters, lr=1e-4)

    def __call__(self) -> None:
        self.backward(Blocks(self.batch.anchors, self.batch.valid))
        if self.optimizer is not None:
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                master.grad = parameter.grad.float()
            torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
            self.optimizer.step()
            with torch.no_grad():
                for master, parameter in zip(self.masters, self.parameters, strict=True):
                    parameter.copy_(master)
        self.drafter.zero_grad()

    def backward(self, blocks: Blocks) -> None:
        proposals = self.drafter.config.proposals
        labels = label(self.batch, blocks, self.vocabulary, proposals, GAMMA)
        totals = draft_loss(self.drafter, self.vocabulary, self.batch, blocks, labels)
        (totals.loss / labels.weights.sum()).backward()


def against_speculators(
    shape: Shape, draft_vocabulary: int | None, rounds: int, seed: int
) -> dict[str, Any]:
    """Part 1 with one head: full (None) or of `draft_vocabulary` rows."""
    from benchmarks.speculators_step import SpeculatorsStep, check_equal

    target = random_target(shape, seed, torch.float32)
    # Its model always normalises queries and keys.
    drafter, vocabulary = random_drafter(shape, target, seed, draft_vocabulary, carry=False)
    batch = random_batch(shape, seed, torch.float32, "cpu", vocabulary)
    attention, tried = _fastest_attention(shape, drafter, batch)
    difference = check_equal(shape, drafter, vocabulary, batch, attention, seed)
    theirs = SpeculatorsStep(shape, drafter, batch, attention, torch.bfloat16)
    drafter.to(torch.bfloat16)
    vocabulary.head = drafter.head
    ours = BaselineStep(
        drafter,
        vocabulary,
        batch.to(torch.device("cpu"), torch.bfloat16),
        optimizer=True,
    )
    seconds = in_turn({"ours": ours, "speculators": theirs}, rounds)
    anchors = shape.responses * shape.anchors
    return {
        "head_rows": len(vocabulary.head),
        "anchors_per_s": {n: round(anchors * len(s) / sum(s), 1) for n, s in seconds.items()},
        "speedup": ratio(seconds["speculators"], seconds["ours"], seed),
        "speculators_attention": {"chosen": attention, "tried_s": tried},
        "speculators_targets_s": round(theirs.seconds_for_targets(), 4),
        "fp32_difference_of_loss_and_gradients": difference,
        "times": {name: summary(s) for name, s in seconds.items()},
    }


def _fastest_attention(
    shape: Shape, drafter: Drafter, batch: Batch
) -> tuple[str, dict[str, float | str]]:
    """Its implementation that is fastest here: seconds of the second of two steps, or an error."""
    from benchmarks.speculators_step import SpeculatorsStep

    tried: dict[str, float | str] = {}
    for name in ("sdpa", "eager", "simple_flex_attention"):
        try:
            step = SpeculatorsStep(shape, drafter, batch, name, torch.bfloat16)
            step()
            start = time.perf_counter()
            step()
            tried[name] = round(time.perf_counter() - start, 4)
        except Exception as error:  # whatever it cannot do here
            tried[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    ran = {name: value for name, value in tried.items() if isinstance(value, float)}
    return min(ran, key=ran.__getitem__), tried


def shares_and_parts(shape: Shape, rounds: int, seed: int, size: int) -> dict[str, Any]:
    """Parts 2 and 3, at the default run's reduced vocabulary."""
    target = random_target(shape, seed, torch.bfloat16)
    rows = min(REDUCED, shape.vocabulary // 2)
    drafter, plain = random_drafter(shape, target, seed, rows, carry=True)
    batch = random_batch(shape, seed, torch.bfloat16, "cpu", plain)
    vocabulary = partly_right(plain, target, batch, RIGHT, seed)
    verifier = Verifier(target, list(shape.feature_layers))
    baseline = BaselineStep(drafter, vocabulary, batch, optimizer=False)

    def first_draft() -> torch.Tensor:
        with torch.no_grad():
            anchor_tokens = batch.token_ids.gather(1, batch.anchors)
            hidden = drafter(anchor_tokens, batch.anchors, batch.features)
            return vocabulary.propose(hidden, anchor_tokens)

    proposals = first_draft()

    def dvd() -> None:
        baseline.backward(draft_and_verify(drafter, vocabulary, verifier, batch))
        drafter.zero_grad()

    products = matrix_products(torch.bfloat16, "cpu", size)
    steps: dict[str, Callable[[], Any]] = {
        "dvd_step": dvd,
        "baseline_step": baseline,
        "first_draft": first_draft,
        "target_prefill": lambda: verifier.read(batch.token_ids),
        "verification": lambda: verifier(verifier.read(batch.token_ids), batch.anchors, proposals),
        **{name: product for name, (product, _) in products.items()},
    }
    seconds = in_turn(steps, rounds)
    parts = ("baseline_step", "first_draft", "verification")
    together = [sum(times) for times in zip(*(seconds[p] for p in parts), strict=True)]
    blocks = draft_and_verify(drafter, vocabulary, verifier, batch)
    assert blocks.accepted is not None
    accepted = blocks.accepted.float().mean().item()

    anchors = shape.responses * shape.anchors
    rates = {name: flops_ / _median(seconds[name]) for name, (_, flops_) in products.items()}
    counted = {
        "baseline_step": flops.draft(shape, rows, carried=False, backward=True),
        "first_draft": flops.draft(shape, rows, carried=False, backward=False),
        "target_prefill": flops.prefill(shape),
        "verification": flops.prefill(shape)
        + flops.branches(shape, min(1 + accepted, shape.proposals) * anchors),
    }
    return {
        "head_rows": rows,
        "first_draft_accepted": round(accepted, 3),
        "anchors_per_s": {
            name: round(anchors * rounds / sum(seconds[name]), 1)
            for name in ("baseline_step", "dvd_step")
        },
        "dvd_step_over_its_parts": ratio(seconds["dvd_step"], together, seed),
        "matrix_gflops_per_s": {name: round(rate / 1e9, 1) for name, rate in rates.items()},
        "share_of_matrix_rate": {
            name: {
                "gflop": round(count / 1e9, 1),
                **{
                    f"of {product}": round(count / _median(seconds[name]) / rate, 3)
                    for product, rate in rates.items()
                },
            }
            for name, count in counted.items()
        },
        "times": {name: summary(s) for name, s in seconds.items()},
    }


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def main() -> None:
    parser = arguments("training_step", __doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    chosen = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    keep_freed_memory()
    report = Report("training_step", chosen.seed)
    shape = TINY if chosen.tiny else SMOLLM2_135M
    content: dict[str, Any] = {"shape": vars(shape)}
    if importlib.util.find_spec("speculators"):
        normed = type(shape)(**{**vars(shape), "qk_norm": True})
        content["against_speculators"] = {
            "full": against_speculators(normed, None, chosen.rounds, chosen.seed),
            "reduced": against_speculators(
                normed, min(REDUCED, shape.vocabulary // 2), chosen.rounds, chosen.seed
            ),
        }
    else:
        content["against_speculators"] = "speculators is not installed"
    content["steps"] = shares_and_parts(
        shape, chosen.rounds, chosen.seed, 256 if chosen.tiny else 2048
    )
    report.write(chosen.out, **content)


if __name__ == "__main__":
    main()
