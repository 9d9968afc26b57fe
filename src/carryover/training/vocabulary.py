"""The tokens a drafter predicts over: all of the target's, or those that the training data use."""

from collections.abc import Iterable

import torch
from torch import Tensor

from carryover.training.losses import predict


class Vocabulary:
    """Head rows [V_d, H] and the two-way map between target ids and draft ids."""

    def __init__(self, target_head: Tensor, observed: Tensor | None) -> None:
        """target_head: [V, H]; observed: [V_d] ascending target ids, None for all of them."""
        device = target_head.device
        self.observed = None if observed is None else observed.to(device)
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

    def propose(self, hidden: Tensor) -> Tensor:
        """Greedy proposals as target ids: [R, N, B, H] -> [R, N, B] int64."""
        best = predict(hidden.flatten(0, -2), self.head)
        return self.target_ids(best).view(hidden.shape[:-1])


def observed_tokens(sequences: Iterable[Tensor]) -> Tensor:
    """The distinct token ids of all sequences, ascending, [V_d] int64."""
    return torch.cat([sequence.unique() for sequence in sequences]).unique()
