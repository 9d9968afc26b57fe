"""Settings that the schema knows and this version cannot train yet.

Read by the workflow before its first job, so this module imports neither torch nor DeepSpeed.
"""

from collections.abc import Iterable

from carryover.config import Config
from carryover.errors import CarryoverError


def refuse_planned(config: Config, drafters: Iterable[str] | None = None) -> None:
    """Raise CarryoverError for the first setting that cannot be trained.

    drafters: names in the config (None: all of it).
    """
    for name in config.drafters if drafters is None else drafters:
        drafter = config.drafters[name]
        if drafter.initialize.startswith("path:"):
            key = f"drafters.{name}.initialize"
            raise _planned(key, drafter.initialize, "random or target_last_layers")


def _planned(key: str, value: str, trained: str) -> CarryoverError:
    return CarryoverError(
        f"{key}: {value} is planned, and this version cannot train it", f"Set {key} to {trained}."
    )
