"""Where a training is: what its checkpoints are made from, and the drafter it ended with."""

import json
from pathlib import Path
from typing import Any

from carryover.artifacts import read_manifest, write_json
from carryover.config import Config
from carryover.errors import CarryoverError
from carryover.identity import made_from, source_content, stage_code
from carryover.paths import Paths


def checkpoint_config(config: Config, target: str, drafter: str, variant: str) -> dict[str, Any]:
    """What a checkpoint must have been made with to be resumed: `config` of `checkpoints`.

    The config's part, and under `made_from` the hashes of the code, the target, the features (the
    responses, where features are computed online) and what training starts from: the baseline's
    weights for control and carryover, for a baseline the released drafter where there is one.
    Raises CarryoverError where one is missing.
    """
    paths = Paths(config)
    inputs = {"target": paths.target(target)}
    if config.training.features == "online":
        inputs["responses"] = paths.responses(target)
    else:
        inputs["features"] = paths.features(target)
    if variant == "baseline" and config.drafters[drafter].released:
        inputs["released"] = paths.released(target, drafter)
    if variant != "baseline":
        folder = trained_folder(config, target, drafter, "baseline")
        inputs["baseline"] = folder / "model.safetensors"
    return {
        **config.stage("train", target, drafter, variant),
        "made_from": made_from(inputs, stage_code("train")),
    }


def write_trained(config: Config, target: str, drafter: str, variant: str) -> None:
    """Write `Paths.trained`: the training of this config has come to its end."""
    paths = Paths(config)
    folder = paths.training(target, drafter, variant)
    write_json(
        paths.trained(target, drafter, variant),
        {"checkpoint": str(folder / "final"), "metrics": str(folder / "metrics.jsonl")},
    )


def released_folder(config: Config, target: str, drafter: str) -> Path:
    """The folder of the released drafter that a baseline starts from.

    Raises CarryoverError where stage `released` has not made it with this config, or where
    `initialize: path:DIR` holds another drafter by now.
    """
    folder = Paths(config).released(target, drafter)
    subset = config.stage("released", target, drafter)
    manifest = read_manifest(folder, stage="released", config=subset)
    initialize = config.drafters[drafter].initialize
    if source_content(initialize) not in (None, manifest["extra"].get("content")):
        raise CarryoverError(
            f"{initialize} holds another drafter than the one that {folder} was made from",
            "Run `carryover released` again.",
        )
    return folder


def trained_folder(config: Config, target: str, drafter: str, variant: str) -> Path:
    """The folder of the drafter that a finished training ended with.

    Raises CarryoverError where the training of this config has not come to its end.
    """
    paths = Paths(config)
    trained = paths.trained(target, drafter, variant)
    train = f"Run `carryover train --variant {variant}` first."
    if not trained.exists():
        raise CarryoverError(f"{trained} is missing: {variant} is not trained yet", train)
    folder = paths.training(target, drafter, variant) / "final"
    try:
        recorded = Path(json.loads(trained.read_text(encoding="utf-8"))["checkpoint"])
    except (ValueError, KeyError, TypeError) as error:
        raise CarryoverError(f"{trained} is damaged", train) from error
    # The name of its parent holds the config's hash. What lies above it may have been moved.
    if recorded.parent.name != folder.parent.name:
        raise CarryoverError(
            f"{trained} names {recorded}, which was trained with another config", train
        )
    return folder
