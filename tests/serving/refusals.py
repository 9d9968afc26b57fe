"""Starts vLLM with what it must refuse: `python refusals.py CASES.json RESULTS.pt`.

A case: `engine` (arguments of vLLM's EngineArgs), and how far to go: `start` true builds the whole
engine, false only checks its configuration as the draft model does. `pretend_known` replaces the
list of known versions. The result of each is the error's text, or None.
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
from vllm.engine.arg_utils import EngineArgs

from carryover.errors import CarryoverError
from carryover.serving import plugin, versions
from carryover.serving.drafter_config import check


def refusal(case: dict[str, Any]) -> str | None:
    known = versions.KNOWN_VLLM
    versions.KNOWN_VLLM = tuple(case.get("pretend_known", known))
    plugin.register()
    try:
        if case["start"]:
            LLM(**case["engine"])
        else:
            check(EngineArgs(**case["engine"]).create_engine_config())
    except CarryoverError as error:
        return str(error)
    finally:
        versions.KNOWN_VLLM = known
        plugin.register()
    return None


if __name__ == "__main__":
    gc.freeze()  # see run_engine.py
    torch.save([refusal(case) for case in json.loads(Path(sys.argv[1]).read_text())], sys.argv[2])
