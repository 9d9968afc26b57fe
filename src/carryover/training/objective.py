"""From drafted blocks to the loss and the numbers that are logged."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from carryover.drafter.layout import proposal_positions
from carryover.drafter.model import Drafter
from carryover.training.batch import Batch
from carryover.training.dvd import Blocks
from carryover.training.losses import (
    Correction,
    TargetStates,
    frozen_head_loss,
    position_weights,
)
from carryover.training.vocabulary import Vocabulary

# The terms of the loss, in the order of every tensor [3] below.
TERMS = ("cross_entropy", "distribution", "confidence")


@dataclass
class Labels:
    """What the blocks [R, N] have to predict at their B positions.

    draft_ids, previous: [R, N, B] int64, the label as draft id (0 where there is none) and the
    token before it as target id; exists, known: [R, N, B] bool; weights, target_weights: [R, N, B]
    float32; target: which states give the target's distribution (None: not needed).

    `exists`: the response has a token there; `known`: the draft vocabulary has it too. Unknown
    labels cannot be learnt (`weights` 0) but count as misses in accuracy, and the target's
    distribution is there all the same (`target_weights`): leaving these positions out would show
    the confidence head only those where it is likelier to be right.
    """

    draft_ids: Tensor
    previous: Tensor
    exists: Tensor
    known: Tensor
    weights: Tensor
    target_weights: Tensor
    target: TargetStates | None = None

    def summed_weights(self) -> Tensor:
        """What each term's sum is divided by, [3] float32."""
        target = self.target_weights.sum()
        return torch.stack((self.weights.sum(), target, target))


def label(
    batch: Batch,
    blocks: Blocks,
    vocabulary: Vocabulary,
    proposals: int,
    gamma: float,
    recorded: Tensor | None = None,
) -> Labels:
    """What each block has to predict: the recorded tokens a+1 .. a+B.

    recorded: [R, T, H], the target's last hidden states, where the loss compares distributions.
    """
    positions = proposal_positions(blocks.anchors, proposals)
    exists = (positions < batch.lengths[:, None, None]) & blocks.valid[..., None]
    last = batch.token_ids.shape[1] - 1
    before = (positions - 1).clamp(max=last)
    tokens, previous = (
        batch.token_ids.gather(1, at.flatten(1)).view(positions.shape)
        for at in (positions.clamp(max=last), before)
    )
    draft_ids = vocabulary.draft_ids(tokens)
    known = exists & (draft_ids >= 0)
    return Labels(
        draft_ids=draft_ids.clamp(min=0),
        previous=previous,
        exists=exists,
        known=known,
        weights=position_weights(known, gamma),
        target_weights=position_weights(exists, gamma),
        target=None if recorded is None else vocabulary.target_states(recorded, before),
    )


@dataclass
class Totals:
    """Sums over drafts, so that ranks and micro-batches add up; per position tensors are [B]."""

    loss: Tensor  # the scaled sum of the terms, the one with a gradient; not logged
    terms: Tensor  # [3], weighted sums
    weights: Tensor  # [3]
    correct: Tensor  # per position
    labels: Tensor  # per position
    committed: Tensor  # 1 + leading correct positions, summed over blocks with a full label
    blocks: Tensor
    accepted: Tensor  # m of first drafts (DVD)
    drafts: Tensor  # first drafts (DVD)

    def as_vector(self) -> Tensor:
        """All sums in one float64 vector, for one all-reduce."""
        logged = fields(self)[1:]
        return torch.cat([getattr(self, f.name).detach().double().reshape(-1) for f in logged])

    @staticmethod
    def nothing(proposals: int) -> Tensor:
        """The vector of no draft at all."""
        return torch.zeros(2 * len(TERMS) + 2 * proposals + 4, dtype=torch.float64)

    @staticmethod
    def report(vector: Tensor, proposals: int, factors: Sequence[float]) -> dict[str, Any]:
        """Means from summed vectors; factors: what each term counts in the loss."""
        sizes = (len(TERMS), len(TERMS), proposals, proposals, 1, 1, 1, 1)
        terms, weights, correct, labels, *rest = vector.split(sizes)
        committed, blocks, accepted, drafts = torch.cat(rest)
        means = (terms / weights.clamp(min=1e-9)).tolist()
        result: dict[str, Any] = {
            "loss": sum(factor * mean for factor, mean in zip(factors, means, strict=True)),
            "accuracy": (correct / labels.clamp(min=1)).tolist(),
            "expected_acceptance_length": (committed / blocks.clamp(min=1)).item(),
        }
        if any(factors[1:]):
            result |= dict(zip(TERMS, means, strict=True))
        if drafts > 0:
            result["first_draft_accepted"] = (accepted / drafts).item()
        return result


def draft_loss(
    drafter: Drafter,
    vocabulary: Vocabulary,
    batch: Batch,
    blocks: Blocks,
    labels: Labels,
    scales: Sequence[float] | Tensor = (1.0, 0.0, 0.0),
) -> Totals:
    """Draft at every anchor of `blocks` and score against the recorded response.

    The Markov head is teacher-forced: it reads the recorded token before each label. scales: what
    the sum of each term counts in `Totals.loss`; the last two need `labels.target`.
    """
    hidden = drafter(
        batch.token_ids.gather(1, blocks.anchors), blocks.anchors, batch.features, blocks.carry
    )
    shape = hidden.shape[:-1]
    hidden = hidden.flatten(0, -2)
    correction = None
    if drafter.markov_head is not None:
        latent = drafter.markov_head.markov_w1(labels.previous.flatten())
        correction = Correction(latent, drafter.markov_head.markov_w2.weight)
    weights, target_weights = labels.weights.flatten(), labels.target_weights.flatten()
    target = labels.target
    if target is not None:
        target = replace(target, rows=target.rows.flatten())
    scored = frozen_head_loss(
        hidden,
        vocabulary.head,
        labels.draft_ids.flatten(),
        weights * scales[0],
        correction,
        target,
        target_weights * scales[1],
        vocabulary.cap,
    )
    loss, zero = scored.total, torch.zeros_like(scored.total)
    distance, confidence = zero, zero
    if target is not None:
        distance = (2 * (1 - scored.acceptance) * target_weights).sum()
    if target is not None and correction is not None and drafter.confidence_head is not None:
        logits = drafter.confidence_head(hidden, correction.latent).float()
        acceptance = scored.acceptance.clamp(0, 1)
        errors = F.binary_cross_entropy_with_logits(logits, acceptance, reduction="none")
        confidence = (errors * target_weights).sum()
        loss = loss + scales[2] * confidence
    correct = (scored.predicted.view(shape) == labels.draft_ids) & labels.known
    whole = labels.exists.all(-1)
    leading = correct.cumprod(-1).sum(-1)
    first = blocks.accepted if blocks.accepted is not None else torch.zeros_like(blocks.anchors)
    drafted = batch.valid if blocks.accepted is not None else torch.zeros_like(batch.valid)
    return Totals(
        loss=loss,
        terms=torch.stack(((scored.cross_entropy * weights).sum(), distance, confidence)),
        weights=labels.summed_weights(),
        correct=correct.sum((0, 1)),
        labels=labels.exists.sum((0, 1)),
        committed=((1 + leading) * whole).sum(),
        blocks=whole.sum(),
        accepted=(first * drafted).sum(),
        drafts=drafted.sum(),
    )
