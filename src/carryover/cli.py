"""The command line: `carryover STAGE --config FILE ...`.

Each stage imports its own code when it runs, so that `carryover report` needs no torch and
`carryover train` no vLLM. Whatever a user can mend ends in one line on stderr:
exit 2 for a known error, 130 after Ctrl-C.
"""

import argparse
import importlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from carryover.artifacts import failed_write
from carryover.config import TRAINED_VARIANTS, Config, load_config
from carryover.config.stages import pick
from carryover.errors import CarryoverError

DEFAULT_CONFIG = "config/config.yaml"


@dataclass(frozen=True)
class Stage:
    module: str
    """Has `run(config, ...)`, called with what the options in `needs` say."""
    help: str
    needs: tuple[str, ...] = ()


STAGES = {
    "target": Stage("carryover.target", "fetch or convert a target model", ("target",)),
    "prompts": Stage("carryover.prompts", "write training and evaluation prompts", ("only",)),
    "released": Stage(
        "carryover.drafter.released",
        "fetch and check the released drafter that a baseline starts from",
        ("target", "drafter"),
    ),
    "responses": Stage("carryover.responses", "let a target answer the prompts", ("target",)),
    "features": Stage("carryover.features", "record a target's hidden states", ("target",)),
    "train": Stage("carryover.training", "train a drafter", ("target", "drafter", "variant")),
    "export": Stage(
        "carryover.drafter.export",
        "write a trained drafter as a checkpoint that vLLM loads",
        ("target", "drafter", "variant"),
    ),
    "benchmark": Stage(
        "carryover.benchmark",
        "measure speed and acceptance in vLLM",
        ("target", "drafter", "temperature"),
    ),
    "report": Stage("carryover.report", "write tables, figures and the report"),
}


def parser() -> argparse.ArgumentParser:
    """The command line's parser, without importing any stage."""
    top = argparse.ArgumentParser(
        prog="carryover",
        description="Carryover Drafting: train, serve and measure block drafters that reuse the "
        "hidden states of rejected tokens.",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    only = "may be left out where the config has just one"
    for name, stage in STAGES.items():
        command = commands.add_parser(name, help=stage.help, description=stage.help)
        _add_config_options(command)
        if "target" in stage.needs:
            command.add_argument("--target", help=f"its name in the config; {only}")
        if "drafter" in stage.needs:
            command.add_argument("--drafter", help=f"its name in the config; {only}")
        if "variant" in stage.needs:
            command.add_argument("--variant", required=True, choices=TRAINED_VARIANTS)
        if "only" in stage.needs:
            command.add_argument(
                "--only", choices=("train", "evaluation"), help="one of the two (default: both)"
            )
        if "temperature" in stage.needs:
            command.add_argument("--temperature", type=_temperature, help=only)
    command = commands.add_parser(
        "config",
        help="check the config and print it",
        description="Check the config and print it, defaults and overlays resolved, as YAML.",
    )
    _add_config_options(command)
    show = command.add_mutually_exclusive_group()
    show.add_argument("--explain", action="store_true", help="all keys, defaults and meanings")
    show.add_argument("--schema", action="store_true", help="the JSON schema of config files")
    about = "vLLM's own command line, e.g. carryover vllm serve TARGET ... (docs/serving.md)"
    commands.add_parser("vllm", help=about, add_help=False)
    return top


def _add_config_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--config",
        nargs="+",
        action="extend",
        metavar="FILE",
        help=f"config file, and overlays after it (default: {DEFAULT_CONFIG})",
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set one key, e.g. training.baseline.steps=100; may be repeated",
    )


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, found {text!r}")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # What follows is vLLM's to read, --help too.
    options = parser().parse_args(given[:1] if given[:1] == ["vllm"] else given)
    try:
        if options.command == "vllm":
            from carryover.serving.command_line import run as run_vllm

            run_vllm(given[1:])
        elif options.command == "config":
            _print(_config_text(options))
        else:
            _run_stage(STAGES[options.command], options)
    except CarryoverError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        if options.command in STAGES:
            print("interrupted: run the same command again to resume", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "carryover"):
            raise
        return _fail(f"the Python package {package} is not installed. Run `make setup`.")
    return 0


def _print(text: str) -> None:
    try:
        print(text, end="", flush=True)
    except OSError as error:
        # Without this, Python complains once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # there, the reader (`| head`) has enough
            raise CarryoverError(f"cannot print: {error.strerror}") from error


def _fail(message: str) -> int:
    for line in message.splitlines():
        print(f"error: {line}", file=sys.stderr)
    return 2


def _run_stage(stage: Stage, options: argparse.Namespace) -> None:
    config = load_config(options.config or DEFAULT_CONFIG, options.set)
    chosen = _choose(config, stage, options)
    _quieten_libraries()
    began = time.monotonic()
    try:
        importlib.import_module(stage.module).run(config, **chosen)
    except Exception as error:
        known = failed_write(error, Path(config.results_dir))
        if known is None:
            raise
        raise known from error
    if os.environ.get("RANK", "0") == "0":  # of several training ranks one speaks
        what = " ".join([options.command, *(f"{v}" for v in chosen.values() if v is not None)])
        print(f"{what}: done in {time.monotonic() - began:.0f} s", file=sys.stderr)


def _quieten_libraries() -> None:
    """Keep out of the logs what says nothing about the run."""
    # The bars of Transformers. Ours asks for itself, and so do those of hub downloads. tqdm reads
    # this when it is imported.
    os.environ.setdefault("TQDM_DISABLE", "1")
    # DeepSpeed warns of what it finds on the machine. A filter outlasts the level it sets itself.
    logging.getLogger("DeepSpeed").addFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _choose(config: Config, stage: Stage, options: argparse.Namespace) -> dict[str, object]:
    """The arguments of a stage's `run`: what was given, or the config's only entry."""
    chosen: dict[str, object] = {}
    for need in stage.needs:
        given = getattr(options, need)
        if need == "target":
            chosen[need] = _named(config.targets, need, given)
        elif need == "drafter":
            chosen[need] = _named(config.drafters, need, given)
        elif need == "temperature":
            chosen[need] = _only_temperature(config) if given is None else given
        else:
            chosen[need] = given
    return chosen


def _named(entries: Mapping[str, object], what: str, given: str | None) -> str:
    if given is None:
        if len(entries) > 1:
            names = ", ".join(entries)
            raise CarryoverError(f"--{what} is missing", f"The config has {names}; choose one.")
        return next(iter(entries))
    pick(entries, what, given)
    return given


def _only_temperature(config: Config) -> float:
    temperatures = config.benchmark.temperatures
    if len(temperatures) > 1:
        shown = ", ".join(f"{value:g}" for value in temperatures)
        raise CarryoverError("--temperature is missing", f"The config has {shown}; choose one.")
    return temperatures[0]


def _config_text(options: argparse.Namespace) -> str:
    if options.explain:
        from carryover.config.keys import explain

        return explain()
    if options.schema:
        return json.dumps(Config.model_json_schema(), indent=2, ensure_ascii=False) + "\n"
    import yaml

    config = load_config(options.config or DEFAULT_CONFIG, options.set)
    return yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True)
