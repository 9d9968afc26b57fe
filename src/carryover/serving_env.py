"""The environment in which a vLLM engine's process starts.

OpenMP reads its settings once, when its library is loaded, and LD_PRELOAD acts only on a new
process: so these variables are set by whoever starts the process, in this one place.
docs/performance.md has the measurements behind the choices.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch


def vllm_environment() -> dict[str, str]:
    """Return the variables to add for one engine process.

    It computes with a thread for every core this process may use. On a machine with CUDA nothing
    about threads is set.
    """
    environment = {
        # The engine runs in the process itself. On CPU a separate engine core would spend one of
        # the cores on waiting, and would outlive a worker that is killed.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # The runner that is also measured on CPU. Where Triton is (on GPUs), vLLM would take the
        # other one, V2; all variants are measured with the same.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        # Every checkpoint is a local folder.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if torch.cuda.is_available():
        return environment
    environment["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"  # of the package intel-openmp
    if openmp.is_file():
        environment["LD_PRELOAD"] = str(openmp)
        # Milliseconds a thread spins after a parallel region: long enough for the next layer's,
        # short enough that an idle engine leaves the cores to the others.
        environment["KMP_BLOCKTIME"] = "5"
    return environment
