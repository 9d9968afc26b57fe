"""Reading hidden states out of a target's decoder."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm


def fuse_norms(stack: Any) -> Any:
    """Exchange a stack's norms for torch's own, which is faster than transformers' six passes.

    The same in float32; in bfloat16 it rounds once, and transformers twice.
    """
    for parent in list(stack.modules()):
        for name, norm in list(parent.named_children()):
            if isinstance(norm, LlamaRMSNorm | Qwen3RMSNorm):
                fused = nn.RMSNorm(norm.weight.shape[0], norm.variance_epsilon)
                fused.weight = norm.weight
                setattr(parent, name, fused)
    return stack


@contextmanager
def captured(stack: Any, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collect the outputs of blocks `layers` (0-based), [R, Q, H_t] each, by block index."""
    outputs: dict[int, Tensor] = {}

    def keep(index: int) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            outputs[index] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [stack.layers[i].register_forward_hook(keep(i)) for i in layers]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
