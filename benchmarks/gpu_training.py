"""Training steps at the paper's shapes on one GPU: time, memory, and two ways of attention.

A random target of Qwen3-4B's size, one response of 4,096 tokens, 512 anchors, a drafter of 5 blocks
with 15 proposals. Needs torch and transformers alone, and 40 GB of GPU memory or so:

    PYTHONPATH=src python -m benchmarks.gpu_training

Under 8 minutes. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import flops
from benchmarks.measure import Report, arguments, in_turn, matrix_products, ratio, summary
from benchmarks.shapes import (
    QWEN3_4B,
    TINY,
    Shape,
    partly_right,
    random_batch,
    random_drafter,
    random_target,
)
from benchmarks.training_step import BaselineStep
from carryover.drafter.attention import Kernel, Visible, block_attention
from carryover.drafter.layout import context_visible
from carryover.training.dvd import draft_and_verify
from carryover.training.verify import Verifier

# Drafts of which the first token is right; the paper's drafters do better (its Table 1).
RIGHT = 0.8
KERNELS: tuple[Kernel, Kernel] = ("dense", "flex")


def steps(shape: Shape, device: str, dtype: torch.dtype, rounds: int, seed: int) -> dict[str, Any]:
    """Baseline step, DVD step and its parts, each with its peak memory."""
    target = random_target(shape, seed, dtype, device)
    drafter, plain = random_drafter(shape, target, seed, None, carry=True)
    batch = random_batch(shape, seed, dtype, device, plain)
    vocabulary = partly_right(plain, target, batch, RIGHT, seed)
    verifier = Verifier(target, list(shape.feature_layers))
    baseline = BaselineStep(drafter, vocabulary, batch, optimizer=False)

    def first_draft() -> Tensor:
        with torch.no_grad():
            anchor_tokens = batch.token_ids.gather(1, batch.anchors)
            hidden = drafter(anchor_tokens, batch.anchors, batch.features)
            return vocabulary.propose(hidden, anchor_tokens)

    def dvd() -> None:
        baseline.backward(draft_and_verify(drafter, vocabulary, verifier, batch))
        drafter.zero_grad()

    proposals = first_draft()
    products = matrix_products(dtype, device, 8192 if device == "cuda" else 256)
    parts: dict[str, Callable[[], Any]] = {
        "dvd_step": dvd,
        "baseline_step": baseline,
        "first_draft": first_draft,
        "target_prefill": lambda: verifier.read(batch.token_ids),
        "verification": lambda: verifier(verifier.read(batch.token_ids), batch.anchors, proposals),
    }
    memory = {name: _peak_gib(part, device) for name, part in parts.items()}
    seconds = in_turn({**parts, **{n: p for n, (p, _) in products.items()}}, rounds, device)
    together = [
        sum(times)
        for times in zip(
            *(seconds[p] for p in ("baseline_step", "first_draft", "verification")), strict=True
        )
    ]
    anchors = shape.responses * shape.anchors
    rate = max(count * rounds / sum(seconds[name]) for name, (_, count) in products.items())
    counted = {
        "baseline_step": flops.draft(shape, shape.vocabulary, carried=False, backward=True),
        "verification": flops.prefill(shape) + flops.branches(shape, round(anchors * (1 + RIGHT))),
    }
    return {
        "anchors_per_s": {
            name: round(anchors * rounds / sum(seconds[name]), 1)
            for name in ("baseline_step", "dvd_step")
        },
        "dvd_step_over_its_parts": ratio(seconds["dvd_step"], together, seed),
        "matrix_tflops_per_s": round(rate / 1e12, 2),
        "share_of_matrix_rate": {
            name: round(count * rounds / sum(seconds[name]) / rate, 3)
            for name, count in counted.items()
        },
        "peak_memory_gib": memory,
        "times": {name: summary(s) for name, s in seconds.items()},
    }


def _peak_gib(step: Callable[[], Any], device: str) -> dict[str, float] | None:
    """Allocated before `step`, and its peak (None on CPU, where torch does not count)."""
    if device == "cpu":
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() / 2**30
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"before": round(before, 2), "peak": round(peak, 2)}


def attention(
    shape: Shape, device: str, dtype: torch.dtype, rounds: int, seed: int
) -> dict[str, Any]:
    """One drafter layer's attention, forward and backward: both kernels of `block_attention`.

    Differences are relative to the largest entry of each tensor. On CPU torch's flex attention has
    no backward, so forward alone is compared.
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
    # Each keeps its mask: a training step builds it once for all layers.
    masks = {kernel: Visible(seen, all_own, kernel) for kernel in KERNELS}

    def path(kernel: Kernel) -> Callable[[], Tensor]:
        return lambda: block_attention(*inputs, masks[kernel])

    def run(path: Callable[[], Tensor]) -> list[Tensor]:
        for tensor in inputs:
            tensor.grad = None
        out = path()
        if backward:
            out.backward(upstream)
        return [out.detach(), *(t.grad for t in inputs if t.grad is not None)]

    paths = {kernel: path(kernel) for kernel in KERNELS}
    pairs = list(zip(run(paths["dense"]), run(paths["flex"]), strict=True))
    difference = max(
        ((a.float() - b.float()).abs().max() / a.float().abs().max()).item() for a, b in pairs
    )
    calls = {name: lambda path=path: run(path) for name, path in paths.items()}
    memory = {name: _peak_gib(call, device) for name, call in calls.items()}
    seconds = in_turn(calls, rounds, device)
    # bf16 has 8 bits: two orders of summation differ by a few in the last of them.
    allowed = 1e-4 if dtype == torch.float32 else 4e-2
    return {
        "largest_difference": difference,
        "equal": difference < allowed,
        "flex_speedup": ratio(seconds["dense"], seconds["flex"], seed),
        "peak_memory_gib": memory,
        "times": {name: summary(s) for name, s in seconds.items()},
    }


def main() -> None:
    parser = arguments("gpu_training", __doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    if not chosen.tiny and not torch.cuda.is_available():
        parser.error("no CUDA device: only --tiny runs here")
    device, shape = ("cpu", TINY) if chosen.tiny else ("cuda", QWEN3_4B)
    dtype = torch.float32 if chosen.tiny else torch.bfloat16
    report = Report("gpu_training", chosen.seed)
    content: dict[str, Any] = {"shape": vars(shape), "dtype": str(dtype)}
    content["attention"] = attention(shape, device, dtype, chosen.rounds, chosen.seed)
    print(content["attention"], flush=True)
    content["steps"] = steps(shape, device, dtype, chosen.rounds, chosen.seed)
    print(content["steps"], flush=True)
    report.write(chosen.out, **content)


if __name__ == "__main__":
    main()
