"""Starts vLLM without our code: `python stock.py CASES.json RESULTS.pt`.

A case: arguments of vllm.LLM. The result of each is what it stopped with, or None. The plugin is
left out by the environment (VLLM_PLUGINS), and nothing of the package is imported here.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import torch
from vllm import LLM


def stopped_with(arguments: dict[str, Any]) -> str | None:
    try:
        LLM(**arguments)
    except Exception as error:  # whatever it is, it is the result
        return f"{type(error).__name__}: {error}"
    finally:
        assert "carryover" not in sys.modules
    return None


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    gc.freeze()  # see run_engine.py
    torch.save([stopped_with(case) for case in cases], sys.argv[2])
