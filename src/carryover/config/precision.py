"""What `auto` means for a dtype: the number format that this machine multiplies fastest."""

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# CPU instructions for bfloat16 products. Without them a product of bfloat16 matrices is emulated,
# on AVX2 some 200 times slower than in float32 (docs/performance.md).
_INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "bf16"}
_NVIDIA = Path("/dev/nvidiactl")
_CPU = Path("/proc/cpuinfo")


@cache
def fast_bfloat16() -> bool:
    """Whether this machine has an NVIDIA GPU that torch was built for, or a CPU with bfloat16
    instructions.

    Read from the system: torch takes seconds to import, and the config is read at every start.
    """
    if _NVIDIA.exists() and not _torch_for_cpu():
        return True
    if platform.system() == "Linux":
        return has_bfloat16(_CPU.read_text(encoding="utf-8"))
    return False


def _torch_for_cpu() -> bool:
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False


def has_bfloat16(cpuinfo: str) -> bool:
    """Whether the first processor of a /proc/cpuinfo (x86 or Arm) multiplies bfloat16 matrices."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return not _INSTRUCTIONS.isdisjoint(value.split())
    return False


def resolve(value: str) -> str:
    """`auto` -> bfloat16 or float32, for this machine; anything else as it is."""
    if value == "auto":
        return "bfloat16" if fast_bfloat16() else "float32"
    return value
