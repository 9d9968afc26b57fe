"""Stage `benchmark`: speed and acceptance of every variant in vLLM, one prompt at a time."""

from carryover.benchmark.engine import engine_arguments
from carryover.benchmark.run import run
from carryover.config import VARIANTS

__all__ = ["VARIANTS", "engine_arguments", "run"]
