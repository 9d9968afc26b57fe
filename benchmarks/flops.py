"""Floating-point operations of matrix products, counted from shapes (a multiply-add is two).

What is elementwise (norms, rotary embedding, softmax, SiLU) counts nothing, so a share of the
machine's matrix rate charges all of it to the step.
"""

from __future__ import annotations

from benchmarks.shapes import Shape


def _block(shape: Shape, rows: int) -> tuple[int, int, int]:
    """Per block: (query, output and feed-forward), (key and value), of one pass over `rows`."""
    queries = 2 * 2 * shape.hidden * shape.heads * shape.head_dim * rows
    keys_values = 2 * 2 * shape.hidden * shape.kv_heads * shape.head_dim * rows
    return queries, keys_values, 2 * 3 * shape.hidden * shape.inner * rows


def _scores(shape: Shape, queries: int, keys: int) -> int:
    """Scores and weighted values of `queries`, each over `keys`."""
    return 2 * 2 * shape.heads * shape.head_dim * queries * keys


def draft(shape: Shape, head_rows: int, *, carried: bool, backward: bool) -> int:
    """One drafter pass at every anchor of a batch, its head over `head_rows` tokens included.

    Backward costs each product twice more, for its weight and its input; F on recorded features
    needs no input gradient, and the frozen head no weight gradient.
    """
    anchors = shape.responses * shape.anchors
    slots, context = anchors * (shape.proposals + 1), shape.responses * shape.length
    carry = anchors * shape.proposals if carried else 0
    width = len(shape.feature_layers) * shape.hidden
    fc = 2 * width * shape.hidden
    queries, own, feed_forward = _block(shape, slots)
    _, context_keys, _ = _block(shape, context)
    _, carry_keys, _ = _block(shape, carry)
    keys = shape.length + shape.proposals + 1 + (shape.proposals if carried else 0)
    block = queries + own + feed_forward + context_keys + carry_keys
    block += _scores(shape, slots, keys)
    head = 2 * shape.hidden * head_rows * anchors * shape.proposals
    times = 3 if backward else 1
    return (
        times * shape.drafter_layers * block
        + fc * (context * min(times, 2) + carry * times)
        + head * min(times, 2)
    )


def prefill(shape: Shape) -> int:
    """The target over the recorded responses, without its head; causal scores are half."""
    rows = shape.responses * shape.length
    return shape.blocks * (sum(_block(shape, rows)) + _scores(shape, rows, shape.length) // 2)


def branches(shape: Shape, predicted_rows: int) -> int:
    """The target over all branches, and its head over `predicted_rows` of their rows."""
    rows = shape.responses * shape.anchors * shape.proposals
    scores = _scores(shape, rows, shape.length + shape.proposals)
    head = 2 * shape.hidden * shape.vocabulary * predicted_rows
    return shape.blocks * (sum(_block(shape, rows)) + scores) + head
