"""vLLM's own CPU code and its corrections on the same inputs: `python faults.py RESULTS.pt`."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

from carryover.serving import corrections

EPSILON = 1e-5


def expanded(values: torch.Tensor) -> torch.Tensor:
    """A parameter of three requests, spread over their 2, 0 and 3 proposals; zero becomes 9.

    Into memory that holds -7, where the sampler hands over uninitialised memory.
    """
    output = torch.full((5,), -7, dtype=values.dtype)
    rejection_sampler._expand(output, values, torch.tensor([2, 2, 5], dtype=torch.int32), 0, 9)
    return output


def main(results: str) -> None:
    torch.manual_seed(0)
    keys, weights = torch.randn(3, 6, 2, 32), torch.rand(3, 32) + 0.5
    stock = SimpleNamespace(_k_norm_weights=weights, _rms_norm_eps=EPSILON)
    found: dict[str, torch.Tensor] = {
        "keys": keys,
        "weights": weights,
        "keys, stock": DFlashQwen3Model._normalize_context_k(stock, keys),
        "keys, corrected": corrections.normalize_by_layer(keys, weights, EPSILON),
    }
    parameters = {
        "temperature": torch.tensor([0.5, 1.0, 0.0]),
        "top_k": torch.tensor([3, 4, 0], dtype=torch.int32),
    }
    current_platform.register_triton_kernel_overrides()
    for name, values in parameters.items():
        found[f"{name}, stock"] = expanded(values)
    corrections.correct_sampling_parameters()
    for name, values in parameters.items():
        found[f"{name}, corrected"] = expanded(values)
    torch.save(found, results)


if __name__ == "__main__":
    main(sys.argv[1])
