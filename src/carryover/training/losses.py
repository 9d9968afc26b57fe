"""Losses over a frozen head, without keeping the logits.

Per position, with the drafter's distribution q and the target's p (DeepSpec,
`deepspec/modeling/dspark/loss.py`):

* cross-entropy: -log q(y), y the recorded token;
* distribution matching: the L1 distance sum_v |q(v) - p(v)| over the target's whole vocabulary;
* confidence: binary cross-entropy of the confidence head against the probability
  sum_v min(p(v), q(v)) = 1 - L1 / 2 that a token sampled from q is accepted, held constant.

A reduced draft vocabulary has q = 0 outside of it. p keeps its own normalisation there: the mass
that it has outside can never be accepted, so it counts as distance and not as acceptance.

Where the target caps its logits, p and q are of capped ones, `soft_cap`. The drafter's head and the
Markov head are capped each by itself, before they are added, as vLLM serves them.
"""

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


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """cap tanh(logits / cap), in place; the logits themselves where there is no cap.

    Source: `final_logit_softcapping` of transformers' Gemma models, `LogitsProcessor` of vLLM.
    """
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _slope_of_cap(capped: Tensor, cap: float | None) -> Tensor | None:
    """d capped / d logits = 1 - (capped / cap)^2."""
    return None if cap is None else 1 - (capped / cap).square_()


@dataclass
class Correction:
    """The Markov head's part of the logits: latent [M, r] = W1[x_{k-1}], weight [V, r] = W2."""

    latent: Tensor
    weight: Tensor


@dataclass
class TargetStates:
    """Where the target's next-token distributions come from.

    hidden: [P, H] last hidden states, normed, of P distinct recorded positions; rows: [...] int64,
    which of them predicts each label; log_total: [P] float32, the logarithm of the summed
    exponentials over the whole vocabulary, or None where the head has all of it.
    """

    hidden: Tensor
    rows: Tensor
    log_total: Tensor | None


class _FrozenHeadLoss(torch.autograd.Function):
    """sum_i w_i CE_i + u_i L1_i, with the gradients taken while the logits are at hand.

    The head is frozen, so that forward needs a few matrix products a chunk and backward none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        latent: Tensor | None,
        correction: Tensor | None,
        head: Tensor,
        labels: Tensor,
        label_weights: Tensor,
        target: TargetStates | None,
        target_weights: Tensor | None,
        cap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        losses = hidden.new_empty(len(hidden), dtype=torch.float32)
        acceptance = torch.zeros_like(losses)
        predicted = torch.empty_like(labels)
        gradients: list[Any] = [None, None, None]
        if any(ctx.needs_input_grad):
            gradients[0] = torch.empty_like(hidden)
            if latent is not None and correction is not None:
                gradients[1] = torch.empty_like(latent)
                # Summed over the chunks: in fp32, as one matrix product would.
                gradients[2] = torch.zeros_like(correction, dtype=torch.float32)

        def add(part: slice) -> None:
            # A function, so that a chunk's logits are gone before those of the next are made.
            logits = soft_cap((hidden[part] @ head.t()).float(), cap)
            bend = _slope_of_cap(logits, cap)
            if latent is not None and correction is not None:
                bias = soft_cap((latent[part] @ correction.t()).float(), cap)
                bias_bend = _slope_of_cap(bias, cap)
                logits += bias
                del bias
            index = labels[part, None]
            of_label = logits.gather(-1, index)
            top, at_top = logits.max(-1, keepdim=True)
            predicted[part] = at_top.squeeze(-1)
            # One pass of exponentials for the normalisation and for q.
            q = logits.sub_(top).exp_()
            summed = q.sum(-1, keepdim=True)
            losses[part] = (top - of_label + summed.log()).squeeze(-1)
            if gradients[0] is None and target is None:
                return
            q /= summed
            p = None if target is None else _target_probabilities(target, part, head, cap)
            if p is not None:
                acceptance[part] = torch.minimum(p, q).sum(-1)
            if gradients[0] is None:
                return
            weight = label_weights[part, None]
            if p is None or target_weights is None:
                slope = q.mul_(weight)
            else:
                # d L1 / d logits = q (sum(s q) - s), s = sign(p - q)
                sign = p.sub_(q).sign_()
                sign -= (sign * q).sum(-1, keepdim=True)
                slope = sign.mul_(-target_weights[part, None]).add_(weight).mul_(q)
            slope.scatter_add_(-1, index, -weight)
            if latent is not None and correction is not None:
                bias_slope = slope if bias_bend is None else bias_bend.mul_(slope)
                bias_slope = bias_slope.to(head.dtype)
                gradients[1][part] = bias_slope @ correction
                gradients[2] += bias_slope.t() @ latent[part]
            slope = slope if bend is None else slope.mul_(bend)
            gradients[0][part] = slope.to(head.dtype) @ head

        for start in range(0, len(hidden), CHUNK):
            add(slice(start, start + CHUNK))
        if correction is not None and gradients[2] is not None:
            gradients[2] = gradients[2].to(correction.dtype)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(losses, acceptance, predicted)
        total = (losses * label_weights).sum()
        if target is not None and target_weights is not None:
            total = total + (2 * (1 - acceptance) * target_weights).sum()
        return total, losses, acceptance, predicted

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [g if g is None else g * grads[0].to(g.dtype) for g in ctx.saved_tensors]
        return (*gradients, None, None, None, None, None, None)


def _target_probabilities(
    target: TargetStates, part: slice, head: Tensor, cap: float | None
) -> Tensor:
    """p of the labels `part`, [m, V] float32: normalised over the whole vocabulary."""
    rows = target.rows[part]
    logits = soft_cap((target.hidden[rows] @ head.t()).float(), cap)
    if target.log_total is None:
        return logits.softmax(-1)
    return logits.sub_(target.log_total[rows, None]).exp_()


@dataclass
class HeadLoss:
    """total: [] float32, the weighted sum; cross_entropy, acceptance: [M] float32, unweighted
    (acceptance 0 without a target); predicted: [M] int64."""

    total: Tensor
    cross_entropy: Tensor
    acceptance: Tensor
    predicted: Tensor


def frozen_head_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    label_weights: Tensor,
    correction: Correction | None = None,
    target: TargetStates | None = None,
    target_weights: Tensor | None = None,
    cap: float | None = None,
) -> HeadLoss:
    """Weighted sum of cross-entropies, and of L1 distances where a target is given.

    hidden: [M, H]; head: [V, H]; labels: [M] int64; label_weights (of the cross-entropy) and
    target_weights (of the L1 distance): [M] float32; target: its rows [M]. A row of weight 0 costs
    work but counts nothing, its label need only be a valid index. cap: of `soft_cap`. The gradient
    reaches `hidden` and the correction.
    """
    latent, weight = (None, None) if correction is None else (correction.latent, correction.weight)
    return HeadLoss(
        *_FrozenHeadLoss.apply(
            hidden, latent, weight, head, labels, label_weights, target, target_weights, cap
        )
    )


def best(logits: Tensor) -> Tensor:
    """The index of the largest of [..., V], the first of equal ones: [...] int64.

    argmax of the last dimension, by the kernel of torch.max: two to four times as fast on CPU.
    """
    return logits.max(-1).indices


def predict(hidden: Tensor, head: Tensor) -> Tensor:
    """Greedy head indices: hidden [M, H], head [V, H] -> [M] int64, logits kept in chunks.

    A cap keeps the order, so it is left out.
    """
    return torch.cat([best(part @ head.t()) for part in hidden.split(CHUNK)])


def log_totals(hidden: Tensor, head: Tensor, cap: float | None = None) -> Tensor:
    """Log of the summed exponentials of the logits: hidden [M, H], head [V, H] -> [M] float32."""
    parts = (soft_cap((part @ head.t()).float(), cap) for part in hidden.split(CHUNK))
    return torch.cat([logits.logsumexp(-1) for logits in parts])
