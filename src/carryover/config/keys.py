"""Walks the schema: every key with its meaning, and the nearest key to a misspelt one."""

import difflib
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from carryover.config.schema import Config

ANY_NAME = "NAME"


class Key(NamedTuple):
    path: tuple[str, ...]
    """Its place; NAME stands for a target's or drafter's name."""
    description: str
    default: Any
    """None with `required` where there is no default."""
    required: bool
    section: bool
    """Whether it holds other keys."""


def all_keys(model: type[BaseModel] = Config, at: tuple[str, ...] = ()) -> Iterator[Key]:
    """Every key of the schema, top to bottom, sections before what they hold."""
    for name, field in model.model_fields.items():
        path = (*at, name)
        required = field.is_required()
        default = field.get_default(call_default_factory=True)
        if default is PydanticUndefined:
            default = None
        inner = _inner_model(field.annotation)
        yield Key(path, field.description or "", default, required, inner is not None)
        if inner is not None:
            below, placeholder = inner
            yield from all_keys(below, (*path, *placeholder))


def _inner_model(annotation: Any) -> tuple[type[BaseModel], tuple[str, ...]] | None:
    """The model that a field holds, and the placeholder between the field and its keys."""
    if get_origin(annotation) is dict:
        return get_args(annotation)[1], (ANY_NAME,)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, ()
    return None


def nearest_key(path: Sequence[str | int]) -> str | None:
    """The dotted valid key that an unknown one was probably meant to be, if any is near.

    A key of the same section comes first, then one of the same (or a near) name elsewhere.
    """
    wanted = str(path[-1])
    parent = tuple(path[:-1])
    places = [key.path for key in all_keys()]
    siblings = {
        place[-1]: place for place in places if len(place) == len(path) and _fits(place, parent)
    }
    near = difflib.get_close_matches(wanted, siblings, n=1, cutoff=0.6)
    if near:
        return dotted((*parent, near[0]))
    elsewhere: dict[str, tuple[str, ...]] = {}
    for place in places:
        elsewhere.setdefault(place[-1], place)
    near = difflib.get_close_matches(wanted, elsewhere, n=1, cutoff=0.8)
    if near:
        # The more of its place is shared with the unknown key, the likelier the key.
        same_name = [place for place in places if place[-1] == near[0]]
        best = max(same_name, key=lambda place: _shared(place, parent))
        return dotted(best)
    return None


def _fits(place: Sequence[str], parent: Sequence[str | int]) -> bool:
    return all(ours in (ANY_NAME, str(theirs)) for ours, theirs in zip(place, parent, strict=False))


def _shared(place: Sequence[str], parent: Sequence[str | int]) -> int:
    shared = 0
    for ours, theirs in zip(place, parent, strict=False):
        if ours not in (ANY_NAME, str(theirs)):
            break
        shared += 1
    return shared


def dotted(path: Sequence[str | int]) -> str:
    """`training.baseline.steps`, `targets.X.feature_layers[2]`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def explain() -> str:
    """All keys with default and meaning, laid out as in a config file."""
    lines = []
    for key in all_keys():
        indent = "  " * (len(key.path) - 1)
        value = "" if key.section else " (required)" if key.required else f" {_plain(key.default)}"
        lines.append(f"{f'{indent}{key.path[-1]}:{value}':<44}  # {key.description}")
        if key.section and key.required:
            lines.append(f"{indent}  {ANY_NAME}:")
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value).replace('"', "")
