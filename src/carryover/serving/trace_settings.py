"""The setting that turns the trace on. Apart from trace.py, which needs pyarrow and only then.

It is a key of vLLM's own config (additional_config), which reaches every engine process, and it
concerns one engine only, where an environment variable would concern all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carryover.errors import CarryoverError

SETTING = "carryover_trace"


@dataclass(frozen=True)
class TraceSettings:
    """The value of `carryover_trace` in vLLM's additional_config.

    folder: where the files go; made if it is not there.
    features: also write the features of every row.
    """

    folder: Path
    features: bool

    @classmethod
    def of(cls, additional_config: Any) -> TraceSettings | None:
        """Read it; None where tracing is off. Raises CarryoverError where it is unusable."""
        given = additional_config if isinstance(additional_config, dict) else {}
        unknown = [key for key in given if str(key).startswith("carryover") and key != SETTING]
        if unknown:
            raise CarryoverError(
                f"additional_config has `{unknown[0]}`, which carryover does not know",
                f"Its only key is `{SETTING}`.",
            )
        value = given.get(SETTING)
        if value is None:
            return None
        if (
            not isinstance(value, dict)
            or not isinstance(value.get("folder"), str)
            or not value["folder"]
            or not isinstance(value.get("features", False), bool)
            or set(value) - {"folder", "features"}
        ):
            raise CarryoverError(
                f"`{SETTING}` in additional_config is {value!r}",
                f'Write {{"{SETTING}": {{"folder": "DIR", "features": false}}}}.',
            )
        return cls(folder=Path(value["folder"]), features=value.get("features", False))
