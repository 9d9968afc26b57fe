"""DSpark's two heads on top of the backbone (arXiv 2607.05147; paper, Markov drafter).

Source: DeepSpec's `deepspec/modeling/dspark/markov_head.py: VanillaMarkov` and
`dspark/common.py: AcceptRatePredictor`, whose tensor names these are.
"""

import torch
from torch import Tensor, nn


class MarkovHead(nn.Module):
    """First-order correction of the logits: logits_k += W2 W1[x_{k-1}], x_0 the anchor token.

    W1 [V, r] is read with *target* ids, so that any anchor token has a row; the rows of W2
    [V or V_d, r] are *draft* ids. Training reads the recorded x_{k-1}, inference the token that
    was drafted before.
    """

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    def forward(self, previous: Tensor) -> Tensor:
        """The correction after tokens `previous` [...] int64 (target ids) -> [..., V or V_d]."""
        return self.markov_w2(self.markov_w1(previous))


class ConfidenceHead(nn.Module):
    """How probably a drafted token is accepted; trained, not used at inference (paper).

    It reads the slot's hidden state and W1[x_{k-1}] (DeepSpec's `confidence_head_with_markov`).
    """

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden_size + rank, 1)

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """hidden [M, H] and W1[x_{k-1}] [M, r] -> logits [M] of the acceptance."""
        return self.proj(torch.cat((hidden, previous), -1)).squeeze(-1)
