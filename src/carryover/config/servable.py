"""What the benchmark's engines can serve of what can be trained; read before a run's first job."""

from carryover.config.schema import Config
from carryover.errors import CarryoverError


def check_servable(config: Config, drafter: str) -> None:
    """Raise CarryoverError for the first setting with which vLLM could not be measured.

    The plugin would refuse such a drafter too (carryover.serving.drafter_config), hours later.
    """
    layout = config.drafters[drafter].slot_layout
    if layout != "fill_in":
        raise CarryoverError(
            f"drafters.{drafter}.slot_layout: {layout} is served by vLLM's V2 model runner, and "
            "the benchmark measures with V1",
            f"Set it to fill_in, or ask for results/training/TARGET/{drafter}/VARIANT.json alone.",
        )
    carry = config.carry
    for key, value, served in (
        ("rows", carry.rows, ("hidden_states",)),
        ("distinction", carry.distinction, ("embedding", "none")),
    ):
        if value not in served:
            raise CarryoverError(
                f"carry.{key}: {value} can be trained and not served, so not benchmarked",
                f"Set it to {' or '.join(served)}, or ask for "
                f"results/training/TARGET/{drafter}/carryover.json alone.",
            )
