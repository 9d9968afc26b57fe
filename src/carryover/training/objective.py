"""From drafted blocks to the loss and the numbers that are logged."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from carryover.drafter.layout import proposal_positions
from carryover.drafter.model import Drafter
from carryover.training.batch import Batch
from carryover.training.dvd import Blocks
from carryover.training.losses import frozen_head_cross_entropy, position_weights
from carryover.training.vocabulary import Vocabulary


@dataclass
class Labels:
    """draft_ids: [R, N, B] int64 (0 where there is none); exists, known: [R, N, B] bool;
    weights: [R, N, B] float32.

    `exists`: the response has a token there; `known`: the draft vocabulary has it too. Unknown
    labels cannot be learnt (weight 0) but count as misses in accuracy.
    """

    draft_ids: Tensor
    exists: Tensor
    known: Tensor
    weights: Tensor


def label(
    batch: Batch, blocks: Blocks, vocabulary: Vocabulary, proposals: int, gamma: float
) -> Labels:
    """What each block has to predict: the recorded tokens a+1 .. a+B."""
    positions = proposal_positions(blocks.anchors, proposals)
    exists = (positions < batch.lengths[:, None, None]) & blocks.valid[..., None]
    clamped = positions.clamp(max=batch.token_ids.shape[1] - 1)
    tokens = batch.token_ids.gather(1, clamped.flatten(1)).view(positions.shape)
    draft_ids = vocabulary.draft_ids(tokens)
    known = exists & (draft_ids >= 0)
    return Labels(draft_ids.clamp(min=0), exists, known, position_weights(known, gamma))


@dataclass
class Totals:
    """Sums over drafts, so that ranks and micro-batches add up; per position tensors are [B]."""

    loss: Tensor  # weighted CE
    weight: Tensor
    correct: Tensor  # per position
    labels: Tensor  # per position
    committed: Tensor  # 1 + leading correct positions, summed over blocks with a full label
    blocks: Tensor
    accepted: Tensor  # m of first drafts (DVD)
    drafts: Tensor  # first drafts (DVD)

    def as_vector(self) -> Tensor:
        """All sums in one float64 vector, for one all-reduce."""
        return torch.cat([getattr(self, f.name).double().reshape(-1) for f in fields(self)])

    @staticmethod
    def report(vector: Tensor, proposals: int) -> dict[str, float | list[float]]:
        """Means from summed vectors."""
        loss, weight = vector[0], vector[1]
        correct, labels = vector[2 : 2 + proposals], vector[2 + proposals : 2 + 2 * proposals]
        committed, blocks, accepted, drafts = vector[2 + 2 * proposals :]
        result: dict[str, float | list[float]] = {
            "loss": (loss / weight.clamp(min=1e-9)).item(),
            "accuracy": (correct / labels.clamp(min=1)).tolist(),
            "expected_acceptance_length": (committed / blocks.clamp(min=1)).item(),
        }
        if drafts > 0:
            result["first_draft_accepted"] = (accepted / drafts).item()
        return result


def draft_loss(
    drafter: Drafter, vocabulary: Vocabulary, batch: Batch, blocks: Blocks, labels: Labels
) -> Totals:
    """Draft at every anchor of `blocks` and score against the recorded response."""
    hidden = drafter(
        batch.token_ids.gather(1, blocks.anchors), blocks.anchors, batch.features, blocks.carry
    )
    shape = hidden.shape[:-1]
    scored = frozen_head_cross_entropy(
        hidden.flatten(0, -2), vocabulary.head, labels.draft_ids.flatten(), labels.weights.flatten()
    )
    correct = (scored.predicted.view(shape) == labels.draft_ids) & labels.known
    whole = labels.exists.all(-1)
    leading = correct.cumprod(-1).sum(-1)
    first = blocks.accepted if blocks.accepted is not None else torch.zeros_like(blocks.anchors)
    drafted = batch.valid if blocks.accepted is not None else torch.zeros_like(batch.valid)
    return Totals(
        loss=scored.total,
        weight=labels.weights.sum(),
        correct=correct.sum((0, 1)),
        labels=labels.exists.sum((0, 1)),
        committed=((1 + leading) * whole).sum(),
        blocks=whole.sum(),
        accepted=(first * drafted).sum(),
        drafts=drafted.sum(),
    )
