"""Settings that the schema knows and this version cannot train yet.

Read by the workflow before its first job, so this module imports neither torch nor DeepSpeed.
"""

from collections.abc import Iterable

from carryover.config import TRAINED_VARIANTS, Config
from carryover.errors import CarryoverError


def refuse_planned(
    config: Config,
    drafters: Iterable[str] | None = None,
    variants: Iterable[str] = TRAINED_VARIANTS,
) -> None:
    """Raise CarryoverError for the first setting that cannot be trained.

    drafters: names in the config (None: all of it); variants: what is to be trained of them. The
    section `carry` decides on `carryover` alone.
    """
    for name in config.drafters if drafters is None else drafters:
        drafter = config.drafters[name]
        if drafter.kind != "dflash":
            raise _planned(f"drafters.{name}.kind", drafter.kind, "dflash")
    if "carryover" in variants:
        if config.carry.rows != "hidden_states":
            raise _planned("carry.rows", config.carry.rows, "hidden_states")
        if config.carry.distinction != "embedding":
            raise _planned("carry.distinction", config.carry.distinction, "embedding")


def _planned(key: str, value: str, trained: str) -> CarryoverError:
    return CarryoverError(
        f"{key}: {value} is planned, and this version cannot train it", f"Set {key} to {trained}."
    )
