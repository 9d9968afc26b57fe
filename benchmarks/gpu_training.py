"""Training steps at the paper's shapes on one GPU: time, memory, and two ways of attention.

A random target of Qwen3-4B's size, one response of 4,096 tokens, 512 anchors, a drafter of 5 blocks
with 15 proposals, bfloat16. Needs torch and transformers alone, nothing is downloaded:

    PYTHONPATH=src python -m benchmarks.gpu_training
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Report, arguments, in_turn, positive, ratio, summary
from benchmarks.shapes import QWEN3_4B, TINY, Shape
from benchmarks.steps import Steps, measure, peak_gib
from carryover.drafter.attention import Kernel, Visible, block_attention
from carryover.drafter.layout import context_visible

# Drafts whose first token is right; the paper's drafters do better (its Table 1).
RIGHT = 0.8
KERNELS: tuple[Kernel, ...] = ("dense", "flex")


def attention(
    shape: Shape, device: str, dtype: torch.dtype, rounds: int, seed: int
) -> dict[str, Any]:
    """One drafter layer's attention, forward and backward, with the two kernels.

    The largest difference is relative to the largest entry of its tensor (output, gradients). On
    CPU torch's flex attention has no backward, so forward alone is compared there.
    """
    backward = device == "cuda"
    torch.manual_seed(seed)
    rows, blocks, size = shape.responses, shape.anchors, shape.proposals + 1
    anchors = torch.randint(1, shape.length, (rows, blocks), device=device).sort().values
    context, own = (rows, shape.length), (rows, blocks, size)
    inputs = [
        torch.randn(*where, heads, shape.head_dim, device=device).to(dtype).requires_grad_(backward)
        for where, heads in (
            (own, shape.heads),
            (context, shape.kv_heads),
            (context, shape.kv_heads),
            (own, shape.kv_heads),
            (own, shape.kv_heads),
        )
    ]
    upstream = torch.randn(*own, shape.heads, shape.head_dim, device=device).to(dtype)
    seen = context_visible(anchors, shape.length)[:, :, None]
    all_own = torch.ones(rows, blocks, 1, size, dtype=torch.bool, device=device)
    visible = {kernel: Visible(seen, all_own, kernel) for kernel in KERNELS}

    def run(kernel: Kernel) -> list[Tensor]:
        for tensor in inputs:
            tensor.grad = None
        out = block_attention(*inputs, visible[kernel])
        if backward:
            out.backward(upstream)
        return [out.detach(), *(t.grad for t in inputs if t.grad is not None)]

    def relative(dense: Tensor, flex: Tensor) -> float:
        return ((dense.float() - flex.float()).abs().max() / dense.float().abs().max()).item()

    difference = max(relative(*pair) for pair in zip(*map(run, KERNELS), strict=True))
    calls: dict[str, Callable[[], Any]] = {k: lambda k=k: run(k) for k in KERNELS}  # type: ignore[misc]
    memory = {k: peak_gib(call) for k, call in calls.items()} if backward else None
    seconds = in_turn(calls, rounds, device)
    # bfloat16 has 8 bits: two orders of summation differ by a few units in the last of them.
    allowed = 1e-4 if dtype == torch.float32 else 4e-2
    return {
        "largest_difference": difference,
        "equal": difference < allowed,
        "flex_speedup": ratio(seconds["dense"], seconds["flex"], seed),
        "peak_memory_gib": memory,
        "times": {name: summary(times) for name, times in seconds.items()},
    }


def main() -> None:
    parser = arguments("gpu_training", __doc__.splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=5)
    chosen = parser.parse_args()
    if not chosen.tiny and not torch.cuda.is_available():
        parser.error("no CUDA device: only --tiny runs here")
    device, shape, dtype, square = "cuda", QWEN3_4B, torch.bfloat16, 8192
    if chosen.tiny:
        device, shape, dtype, square = "cpu", TINY, torch.float32, 64
    report = Report("gpu_training", chosen.seed)
    compared = attention(shape, device, dtype, chosen.rounds, chosen.seed)
    print(compared, flush=True)
    steps = Steps(shape, dtype, device, chosen.seed, None, RIGHT)
    report.write(
        chosen.out,
        shape=vars(shape),
        attention=compared,
        steps=measure(steps, chosen.rounds, chosen.seed, square),
    )


if __name__ == "__main__":
    main()
