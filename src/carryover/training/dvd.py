"""Parallel draft-verify-draft: where the second draft starts and what it carries.

Paper, Algorithm 2. All anchors of a batch go through the three stages at once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from carryover.drafter.model import Carry, Drafter, Hints
from carryover.training.batch import Batch
from carryover.training.carry import NEXT_TOKENS, carry_of
from carryover.training.verify import Reading, Verifier
from carryover.training.vocabulary import Vocabulary


@dataclass
class Blocks:
    """Drafts that get a loss: anchors [R, N] int64, valid [R, N] bool, and what they carry.

    accepted: [R, N] int64, m of the first draft (None in baseline training).
    """

    anchors: Tensor
    valid: Tensor
    carry: Carry | Hints | None = None
    accepted: Tensor | None = None


@torch.no_grad()
def draft_and_verify(
    drafter: Drafter,
    vocabulary: Vocabulary,
    verifier: Verifier,
    batch: Batch,
    reading: Reading | None = None,
) -> Blocks:
    """Stages 1 and 2, without gradient: draft at a_i, verify, shift to a'_i = a_i + m_i + 1.

    Full acceptance keeps the anchor, with an empty carry. A shift that leaves no recorded token
    to predict makes the block invalid. The second draft reads the recorded prefix, also where
    verification accepted a token that differs from a sampled response (Algorithm 2 as printed).
    reading: of `batch.token_ids`, where there is one already.
    """
    anchors = batch.anchors
    tokens = batch.token_ids.gather(1, anchors)
    hidden = drafter(tokens, anchors, batch.features)  # y[<= a_i]
    proposals = vocabulary.propose(hidden, tokens, drafter.markov_head)  # d_i
    wanted = NEXT_TOKENS.get(drafter.config.carry_rows, 0)
    # H_i, and how far d_i are the target's greedy tokens
    verified = verifier(reading or verifier.read(batch.token_ids), anchors, proposals, wanted)
    size = proposals.shape[-1]
    accepted = verified.accepted  # m_i
    shifted = torch.where(accepted == size, anchors, anchors + accepted + 1)  # a'_i
    valid = batch.valid & (shifted < batch.lengths[:, None] - 1)
    return Blocks(
        anchors=torch.where(valid, shifted, 0),
        valid=valid,
        carry=carry_of(drafter.config, batch, proposals, verified, accepted, valid),
        accepted=accepted,
    )
