"""A baseline step, a DVD step and its parts, timed in turn: on CPU and on a GPU alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import flops
from benchmarks.measure import in_turn, matrix_products, ratio, summary
from benchmarks.shapes import Shape, partly_right, random_batch, random_drafter, random_target
from carryover.drafter.model import Drafter
from carryover.training.batch import Batch
from carryover.training.dvd import Blocks, draft_and_verify
from carryover.training.objective import draft_loss, label
from carryover.training.verify import Verifier
from carryover.training.vocabulary import Vocabulary

GAMMA = 4.0
PARTS = ("baseline_step", "first_draft", "target_prefill", "partial_prefill")


def forward_backward(
    drafter: Drafter, vocabulary: Vocabulary, batch: Batch, blocks: Blocks
) -> None:
    """What the trainer does for one micro-batch, without its optimizer: gradients are added up."""
    labels = label(batch, blocks, vocabulary, drafter.config.proposals, GAMMA)
    scales = labels.summed_weights().reciprocal() * torch.tensor([1.0, 0.0, 0.0]).to(
        batch.features.device
    )
    draft_loss(drafter, vocabulary, batch, blocks, labels, scales).loss.backward()


class Steps:
    """The trainer's functions on a random target, drafter and batch. No optimizer."""

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: str,
        seed: int,
        draft_vocabulary: int | None,
        right: float,
    ) -> None:
        """draft_vocabulary: None for the whole head; right: share of drafts with a right start."""
        self.shape, self.head_rows = shape, draft_vocabulary or shape.vocabulary
        target = random_target(shape, seed, dtype, device)
        self.drafter, plain = random_drafter(shape, target, seed, draft_vocabulary, carry=True)
        self.batch = random_batch(shape, seed, dtype, device, plain)
        self.vocabulary = partly_right(plain, target, self.batch, right, seed)
        self.verifier = Verifier(target, list(shape.feature_layers))
        self.proposals = self.first_draft()
        self.reading = self.target_prefill()

    def baseline_step(self) -> None:
        self._train(Blocks(self.batch.anchors, self.batch.valid))

    def dvd_step(self) -> None:
        self._train(self._drafted())

    @torch.no_grad()
    def first_draft(self) -> Tensor:
        batch = self.batch
        tokens = batch.token_ids.gather(1, batch.anchors)
        hidden = self.drafter(tokens, batch.anchors, batch.features)
        return self.vocabulary.propose(hidden, tokens)

    def target_prefill(self) -> Any:
        return self.verifier.read(self.batch.token_ids)

    def partial_prefill(self) -> Any:
        return self.verifier(self.reading, self.batch.anchors, self.proposals)

    def accepted(self) -> float:
        """Mean number of accepted proposals."""
        accepted = self._drafted().accepted
        assert accepted is not None
        return accepted.float().mean().item()

    def _drafted(self) -> Blocks:
        return draft_and_verify(self.drafter, self.vocabulary, self.verifier, self.batch)

    def _train(self, blocks: Blocks) -> None:
        forward_backward(self.drafter, self.vocabulary, self.batch, blocks)
        self.drafter.zero_grad()


def measure(steps: Steps, rounds: int, seed: int, square: int) -> dict[str, Any]:
    """Anchors a second; DVD step over its parts; shares of the machine's matrix rate.

    square: size of the square product that, with one of a feed-forward layer's shape, gives the
    rate; the faster of the two counts. On CUDA also memory.
    """
    shape, device = steps.shape, steps.batch.features.device.type
    products = matrix_products(steps.batch.features.dtype, device, square, shape)
    calls: dict[str, Callable[[], Any]] = {
        name: getattr(steps, name) for name in ("dvd_step", *PARTS)
    }
    memory = {name: peak_gib(call) for name, call in calls.items()} if device == "cuda" else None
    seconds = in_turn({**calls, **{n: call for n, (call, _) in products.items()}}, rounds, device)
    together = [sum(times) for times in zip(*(seconds[part] for part in PARTS), strict=True)]
    verification = [
        sum(times)
        for times in zip(seconds["target_prefill"], seconds["partial_prefill"], strict=True)
    ]
    accepted = steps.accepted()
    anchors = shape.responses * shape.anchors
    rates = {n: count * rounds / sum(seconds[n]) for n, (_, count) in products.items()}
    predicted_rows = round(anchors * min(1 + accepted, shape.proposals))
    counted = {
        "baseline_step": flops.draft(shape, steps.head_rows, carried=False, backward=True),
        "first_draft": flops.draft(shape, steps.head_rows, carried=False, backward=False),
        "target_prefill": flops.prefill(shape),
        "partial_prefill": flops.branches(shape, predicted_rows),
    }
    counted["verification"] = counted["target_prefill"] + counted["partial_prefill"]
    taken = {**seconds, "verification": verification}
    return {
        "dtype": str(steps.batch.features.dtype).removeprefix("torch."),
        "head_rows": steps.head_rows,
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
                "share": round(count * rounds / sum(taken[name]) / max(rates.values()), 3),
            }
            for name, count in counted.items()
        },
        "peak_memory_gib": memory,
        "times": {name: summary(times) for name, times in taken.items()},
    }


def peak_gib(step: Callable[[], Any]) -> dict[str, float]:
    """CUDA memory that is allocated before `step`, and its peak."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() / 2**30
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"before": round(before, 2), "peak": round(peak, 2)}
