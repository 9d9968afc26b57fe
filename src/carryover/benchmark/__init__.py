"""Stage `benchmark`: speed and acceptance of every variant in vLLM, one prompt at a time."""

from carryover.benchmark.engine import engine_arguments
from carryover.benchmark.run import VARIANTS, run

__all__ = ["VARIANTS", "engine_arguments", "run"]
