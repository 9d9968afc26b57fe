"""Position-weighted cross-entropy over a frozen head, without keeping the logits."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Rows of logits held at once; bounds memory to CHUNK x vocabulary whatever the number of anchors.
CHUNK = 512


def position_weights(valid: Tensor, gamma: float) -> Tensor:
    """Loss weights exp(-(k-1)/gamma) of position k = 1..B where a label exists.

    valid: [..., B] bool -> [..., B] float32. Source: DSpark's decay (its `loss_decay_gamma`);
    the paper says "exponential decay" and leaves gamma open.
    """
    k = torch.arange(valid.shape[-1], device=valid.device, dtype=torch.float32)
    return torch.exp(-k / gamma) * valid


class _FrozenHeadCrossEntropy(torch.autograd.Function):
    """sum_i w_i CE(h_i W^T, y_i), with the gradient for h taken while the logits are at hand.

    W is frozen, so that forward needs two matrix products a chunk and backward none.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        losses = hidden.new_empty(len(hidden), dtype=torch.float32)
        predicted = torch.empty_like(labels)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            logits = (hidden[part] @ head.t()).float()
            predicted[part] = logits.argmax(-1)
            log_total = logits.logsumexp(-1, keepdim=True)
            index = labels[part, None]
            losses[part] = (log_total - logits.gather(-1, index)).squeeze(-1)
            if gradient is not None:
                probability = logits.sub_(log_total).exp_()
                probability.scatter_add_(-1, index, -torch.ones_like(index, dtype=torch.float32))
                probability.mul_(weights[part, None])
                gradient[part] = probability.to(head.dtype) @ head
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(losses, predicted)
        return (losses * weights).sum(), losses, predicted

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None


@dataclass
class HeadLoss:
    """total: [] float32, the weighted sum; losses: [M] float32 unweighted; predicted: [M] int64."""

    total: Tensor
    losses: Tensor
    predicted: Tensor


def frozen_head_cross_entropy(
    hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor
) -> HeadLoss:
    """Weighted sum of cross-entropies of hidden [M, H] against labels [M] under head [V, H].

    weights: [M] float32; rows of weight 0 cost work but count nothing, their labels need only be
    valid indices. The gradient reaches `hidden` alone.
    """
    return HeadLoss(*_FrozenHeadCrossEntropy.apply(hidden, head, labels, weights))


def predict(hidden: Tensor, head: Tensor) -> Tensor:
    """Greedy head indices: hidden [M, H], head [V, H] -> [M] int64, logits kept in chunks."""
    return torch.cat([(part @ head.t()).argmax(-1) for part in hidden.split(CHUNK)])
