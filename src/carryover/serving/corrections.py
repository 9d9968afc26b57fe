"""Two faults of vLLM 0.32 that only its CPU build has, corrected for the served drafter.

Both are silent: one lowers the acceptance, the other changes what is sampled.
"""

from __future__ import annotations

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.triton_utils.dispatcher import register_kernels

_EXPAND_KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


def one_norm_weight_for_all_layers() -> bool:
    """Whether `ops.rms_norm` takes row 0 of a stacked [layers, head_dim] weight for every layer.

    The CUDA kernel picks the row by the outermost index; the CPU kernel reads head_dim numbers.
    """
    return current_platform.is_cpu()


def normalize_by_layer(keys: torch.Tensor, weights: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMS-normalise context keys, each drafter layer with its own weight.

    Args:
        keys: [layers, rows, kv_heads, head_dim].
        weights: [layers, head_dim].
        epsilon: added to the mean square.
    """
    normalized = torch.empty_like(keys)
    for layer in range(keys.shape[0]):
        ops.rms_norm(normalized[layer], keys[layer], weights[layer], epsilon)
    return normalized


def expand(
    output_ptr: torch.Tensor,
    input_ptr: torch.Tensor,
    cu_num_tokens_ptr: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int,
) -> None:
    """Write each request's sampling parameter to all its proposals, in place.

    vLLM's own fallback writes into an int64 copy of `output_ptr` and drops it, so that the
    temperature, top-p and top-k of the proposals stay uninitialised memory. Names and order of the
    arguments are the kernel's.

    Args:
        output_ptr: [tokens], any dtype; written.
        input_ptr: [requests], same dtype.
        cu_num_tokens_ptr: [requests] int, cumulative number of tokens.
        replace_from: value to replace ...
        replace_to: ... by this one.
        MAX_NUM_TOKENS: a compile-time bound of the kernel, not needed here.
    """
    del MAX_NUM_TOKENS
    counts = torch.diff(cu_num_tokens_ptr.long(), prepend=cu_num_tokens_ptr.new_zeros(1).long())
    values = torch.where(input_ptr == replace_from, replace_to, input_ptr).to(output_ptr.dtype)
    output_ptr[: int(counts.sum())] = values.repeat_interleave(counts)


def correct_sampling_parameters() -> None:
    """Replace vLLM's CPU fallback of `expand_kernel`. To be called after the platform registered.

    Only where that fallback is in use: on CPU without a CPU Triton.
    """
    if current_platform.is_cpu() and not HAS_TRITON:
        register_kernels({_EXPAND_KERNEL: expand})
