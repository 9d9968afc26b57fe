"""The tokens a drafter predicts over: all of the target's, or those that the training data use."""

from collections.abc import Iterable

import torch
from torch import Tensor

from carryover.drafter.markov import MarkovHead
from carryover.training.losses import CHUNK, TargetStates, best, log_totals, predict, soft_cap


class Vocabulary:
    """Head rows [V or V_d, H] and the two-way map between target ids and draft ids."""

    def __init__(
        self, target_head: Tensor, observed: Tensor | None, cap: float | None = None
    ) -> None:
        """target_head: [V, H]; observed: [V_d] ascending target ids, None for all of them; cap: the
        target's on its logits (`losses.soft_cap`), which holds for the drafter's too."""
        device = target_head.device
        self.cap = cap
        self.observed = None if observed is None else observed.to(device)
        self._target_head = target_head
        self.head = target_head if observed is None else target_head[self.observed].contiguous()
        self._draft_ids: Tensor | None = None
        if observed is not None:
            ids = torch.full((len(target_head),), -1, dtype=torch.int64, device=device)
            ids[self.observed] = torch.arange(len(observed), device=device)
            self._draft_ids = ids

    def draft_ids(self, target_ids: Tensor) -> Tensor:
        """Target ids -> draft ids of the same shape, -1 where a token is not in the vocabulary."""
        return target_ids if self._draft_ids is None else self._draft_ids[target_ids]

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft ids -> target ids of the same shape."""
        return draft_ids if self.observed is None else self.observed[draft_ids]

    def propose(
        self, hidden: Tensor, anchor_tokens: Tensor, markov: MarkovHead | None = None
    ) -> Tensor:
        """Greedy proposals as target ids: [R, N, B, H] -> [R, N, B] int64.

        anchor_tokens: [R, N] int64. With a Markov head from left to right, each token corrected by
        the one drafted before it; all anchors at once.
        """
        if markov is None:
            greedy = predict(hidden.flatten(0, -2), self.head)
            return self.target_ids(greedy).view(hidden.shape[:-1])
        proposals = []
        blocks, anchors = hidden.flatten(0, 1).split(CHUNK), anchor_tokens.flatten().split(CHUNK)
        for block, previous in zip(blocks, anchors, strict=True):
            drafted = []
            for slot in block.unbind(1):
                logits = soft_cap((slot @ self.head.t()).float(), self.cap)
                logits += soft_cap(markov(previous).float(), self.cap)
                previous = self.target_ids(best(logits))
                drafted.append(previous)
            proposals.append(torch.stack(drafted, 1))
        return torch.cat(proposals).view(hidden.shape[:-1])

    @torch.no_grad()
    def target_states(self, recorded: Tensor, positions: Tensor) -> TargetStates:
        """Where the target's distributions at recorded positions come from.

        recorded: [R, T, H], the target's last hidden states, normed; positions: [R, N, B] int64, of
        the token before each label. A reduced vocabulary lacks part of the normalisation, which is
        therefore computed here, once for each position that is asked for: blocks overlap.
        """
        responses, length = recorded.shape[:2]
        first = length * torch.arange(responses, device=positions.device)[:, None, None]
        used, rows = (positions + first).unique(return_inverse=True)
        hidden = recorded.flatten(0, 1)[used]
        reduced = self.observed is not None
        totals = log_totals(hidden, self._target_head, self.cap) if reduced else None
        return TargetStates(hidden, rows, totals)


def observed_tokens(sequences: Iterable[Tensor]) -> Tensor:
    """The distinct token ids of all sequences, ascending, [V_d] int64."""
    return torch.cat([sequence.unique() for sequence in sequences]).unique()
