"""Reads config files and turns every mistake in them into one readable line."""

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from carryover.config.keys import dotted, nearest_key
from carryover.config.schema import Config, Drafter, KeyProblems, Target
from carryover.errors import CarryoverError

SET = "--set"
Layer = tuple[str, dict[str, Any]]
"""A config file's name (or `--set`) and its content."""

# YAML 1.2's floats. PyYAML knows those of 1.1, where 2e-3 (no dot) is a string.
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+|[-+]?([0-9]+\.[0-9]*|\.[0-9]+)"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_MISREAD_FLOAT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
# Sections of named entries; an overlay takes one away by setting it to null.
_NAMED = ("targets", "drafters")


class ConfigError(CarryoverError):
    """All problems of a config, a line each: `FILE: KEY: what is wrong`."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(problems))

    def __str__(self) -> str:
        return "\n".join(self.problems)


def load_config(paths: str | Path | Iterable[str | Path], overrides: Sequence[str] = ()) -> Config:
    """Reads one config file, or several of which later ones overlay earlier ones.

    Mappings merge key by key, anything else replaces; null takes a target or drafter away.

    Args:
        paths: YAML file or files.
        overrides: `dotted.key=value` with a YAML value, applied last (`--set`).

    Raises ConfigError with all problems.
    """
    files = [paths] if isinstance(paths, str | Path) else list(paths)
    layers: list[Layer] = [(str(path), read_yaml(Path(path))) for path in files]
    layers += [(SET, parse_override(text)) for text in overrides]
    return _validate(layers)


def config_from_dict(
    data: Mapping[str, Any], origin: str, overrides: Mapping[str, Any] | None = None
) -> Config:
    """Checks a config that something else read and merged, such as Snakemake's `config`.

    Snakemake reads files with PyYAML's rules, under which `2e-3` is a string; it is taken as the
    number it was meant to be.

    Args:
        data: the merged config; it is not changed.
        origin: what to call it in error messages.
        overrides: what Snakemake's --config set, which wins. Snakemake leaves numbers below its
            first level as text, which is read here as YAML.
    """
    layers = [(origin, _repair_floats(_plain(data)))]
    if overrides:
        layers.append(("--config", _read_texts(_plain(overrides))))
    return _validate(layers)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping.

    Raises ConfigError when it is missing, unreadable or no mapping, or repeats a key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file; see config/config.yaml for a start"]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"{path}: not UTF-8 text"]) from None
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
    content = _parse(text, str(path))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError([f"{path}: expected `key: value` lines, found {_kind(content)}"])
    return content


def parse_override(text: str) -> dict[str, Any]:
    """`training.baseline.steps=20` -> {"training": {"baseline": {"steps": 20}}}."""
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError([f"--set: expected KEY=VALUE, e.g. seed=1, found {text!r}"])
    content = _parse(value, f"--set {key}")
    if parts[0] in _NAMED and len(parts) > 2:
        # A name may hold dots itself: targets.Qwen3-0.6B.dtype, or targets.Qwen3-0.6B=null.
        known = parts[-1] in {**Target.model_fields, **Drafter.model_fields}
        whole = not known and (content is None or isinstance(content, dict))
        name, rest = (parts[1:], []) if whole else (parts[1:-1], parts[-1:])
        parts = [parts[0], ".".join(name), *rest]
    for part in reversed(parts):
        content = {part: content}
    return content


def merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """`overlay` over `base`: mappings merge key by key, anything else replaces."""
    merged = dict(base)
    for key, value in overlay.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(below, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


class _Loader(yaml.SafeLoader):
    """Safe YAML with 1.2's floats; a repeated key is an error instead of a silent override."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here, and not where mappings are built: there, `<<` has been resolved, and a key that
        # replaces a merged one looks like a repeated key.
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != "tag:yaml.org,2002:str":
                shown = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                problem = f"key {shown} is not text; put it in quotes"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            if key.value in seen:
                problem = f"key {key.value} is given twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(rf"^(?:{_FLOAT.pattern})$"), list("-+0123456789.")
)


def _parse(text: str, origin: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise ConfigError([f"{origin}: {where}{error.problem or error.context}"]) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError([f"{origin}: not valid YAML: {first}"]) from None


def _plain(value: Any) -> Any:
    """Snakemake hands over ordered dicts and the like; strict types want plain ones."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _repair_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _repair_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_repair_floats(item) for item in value]
    if isinstance(value, str) and _MISREAD_FLOAT.fullmatch(value):
        return float(value)
    return value


def _read_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _read_texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_read_texts(item) for item in value]
    if not isinstance(value, str):
        return value
    try:
        read = _parse(value, "--config")
    except ConfigError:
        return value
    return value if isinstance(read, dict | list) else read


def _validate(layers: Sequence[Layer]) -> Config:
    merged: dict[str, Any] = {}
    for _, content in layers:
        merged = merge(merged, content)
    for section in _NAMED:
        entries = merged.get(section)
        if isinstance(entries, dict):
            merged[section] = {key: item for key, item in entries.items() if item is not None}
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        problems: list[str] = []
        for detail in error.errors(include_url=False):
            problems += _describe(detail, layers)
        raise ConfigError(list(dict.fromkeys(problems))) from None


def _describe(detail: ErrorDetails, layers: Sequence[Layer]) -> list[str]:
    # A bad name of a mapping's entry is located at (..., NAME, "[key]").
    path = [part for part in detail["loc"] if part != "[key]"]
    error = detail.get("ctx", {}).get("error")
    if isinstance(error, KeyProblems):
        found = [([*path, *key.split(".")], message) for key, message in error.problems]
    else:
        found = [(path, _message(detail, path, layers))]
    return [f"{_origin(at, layers)}: {dotted(at)}: {message}" for at, message in found]


def _origin(path: Sequence[str | int], layers: Sequence[Layer]) -> str:
    """The last file that sets the key at `path`, or else its nearest section."""
    for length in range(len(path), 0, -1):
        for origin, content in reversed(layers):
            if _has(content, path[:length]):
                return origin
    return " + ".join(_files(layers))


def _files(layers: Sequence[Layer]) -> list[str]:
    return [origin for origin, _ in layers if origin != SET]


def _has(content: Any, path: Sequence[str | int]) -> bool:
    for part in path:
        try:
            content = content[part]
        except (KeyError, IndexError, TypeError):
            return False
    return True


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a section of keys",
    "model_type": "a section of keys",
    "model_attributes_type": "a section of keys",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "string_too_short": "some text",
    "literal_error": "{expected}",
}


def _message(detail: ErrorDetails, path: Sequence[str | int], layers: Sequence[Layer]) -> str:
    kind, found = detail["type"], detail["input"]
    context = detail.get("ctx", {})
    if kind == "extra_forbidden":
        near = nearest_key(path)
        return f"unknown key; did you mean {near}?" if near else "unknown key"
    if kind == "missing":
        lone = len(_files(layers)) == 1
        return f"missing{'; an overlay goes after config/config.yaml' if lone else ''}"
    if kind == "value_error":
        return str(context["error"])
    if kind == "string_pattern_mismatch":
        return (
            f"{found!r} names a file, so it may hold letters, digits and . _ - only, "
            "and starts with a letter or digit"
        )
    if kind == "too_short":
        return "at least one entry is needed"
    if kind in _EXPECTED:
        limits = {k: f"{v:g}" if isinstance(v, float) else v for k, v in context.items()}
        expected = _EXPECTED[kind].format(**limits).replace("'", "")
        return f"expected {expected}, found {_kind(found)}"
    return f"{detail['msg']}, found {_kind(found)}"


def _kind(value: Any) -> str:
    """A value as one names it to its writer: `the text "3"`, `true`, `a list`."""
    if isinstance(value, str):
        return f"the text {json.dumps(value, ensure_ascii=False)}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "nothing (null)"
    if isinstance(value, dict):
        return "a section of keys"
    if isinstance(value, list):
        return "a list"
    return str(value)
