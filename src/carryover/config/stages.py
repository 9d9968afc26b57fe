"""Which part of the config decides which stage's result (see `Config.stage`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from carryover.errors import CarryoverError

if TYPE_CHECKING:
    from carryover.config.schema import Config

Entry = TypeVar("Entry")

TRAINED_VARIANTS = ("baseline", "control", "carryover")
VARIANTS = ("autoregressive", *TRAINED_VARIANTS)

# Left out: how much is decoded, kept or logged at a time changes no result, so a run that went out
# of memory continues with smaller numbers. What lays out checkpoints (nodes, ranks, ZeRO) and the
# order of sums (micro_batch) stays in.
_RESPONSES_OPERATIONAL = {"max_num_seqs"}
_FEATURES_OPERATIONAL = {"batch_tokens"}
_TRAINING_OPERATIONAL = {"log_every", "evaluate_every", "checkpoint_every", "keep_checkpoints"}
_TRAINING_VARIANTS = {"baseline", "further"}


def stage_subset(
    config: Config, name: str, target: str | None, drafter: str | None, variant: str | None
) -> dict[str, Any]:
    """See `Config.stage`."""
    match name:
        case "prompts":
            return _train_prompts(config) | _evaluation_prompts(config)
        case "train_prompts":
            return _train_prompts(config)
        case "evaluation_prompts":
            return _evaluation_prompts(config)
        case "target":
            return _target(config, target)
        case "responses":
            return _responses(config, target)
        case "features":
            return _features(config, target)
        case "released":
            return _released(config, target, drafter)
        case "train" | "export":
            return _train(config, target, drafter, variant)
        case "benchmark":
            return _benchmark(config, target, drafter)
        case "report":
            return _report(config)
    raise ValueError(f"no such stage: {name}")


def _train_prompts(config: Config) -> dict[str, Any]:
    return {"seed": config.seed, "train_prompts": config.prompts.train.model_dump()}


def _evaluation_prompts(config: Config) -> dict[str, Any]:
    return {"seed": config.seed, "evaluation_prompts": config.prompts.evaluation.model_dump()}


def _target(config: Config, target: str | None) -> dict[str, Any]:
    chosen = pick(config.targets, "target", target)
    return {"target": chosen.model_dump(include={"source", "dtype"})}


def _responses(config: Config, target: str | None) -> dict[str, Any]:
    chosen = pick(config.targets, "target", target)
    return {
        **_train_prompts(config),
        "target": chosen.model_dump(include={"source", "dtype", "thinking"}),
        "responses": config.responses.model_dump(exclude=_RESPONSES_OPERATIONAL),
    }


def _features(config: Config, target: str | None) -> dict[str, Any]:
    chosen = pick(config.targets, "target", target)
    return {
        **_responses(config, target),
        "target": chosen.model_dump(include={"source", "dtype", "thinking", "feature_layers"}),
        "features": config.features.model_dump(exclude=_FEATURES_OPERATIONAL),
    }


def _released(config: Config, target: str | None, drafter: str | None) -> dict[str, Any]:
    chosen = pick(config.drafters, "drafter", drafter)
    subset = {
        "target": pick(config.targets, "target", target).model_dump(exclude={"thinking"}),
        "drafter": chosen.model_dump(),
        "max_model_len": config.benchmark.max_model_len,
    }
    if chosen.kind == "markov":  # whether the drafter has to have a confidence head
        subset["confidence"] = config.training.losses.markov.confidence > 0
    return subset


def _train(
    config: Config, target: str | None, drafter: str | None, variant: str | None
) -> dict[str, Any]:
    if variant is None:
        raise ValueError("this stage needs a variant")
    if variant not in TRAINED_VARIANTS:
        raise CarryoverError(
            f"--variant {variant} is not trained", f"Choose one of {', '.join(TRAINED_VARIANTS)}."
        )
    chosen = pick(config.drafters, "drafter", drafter)
    training = config.training.model_dump(exclude=_TRAINING_OPERATIONAL | _TRAINING_VARIANTS)
    training["losses"] = training["losses"][chosen.kind]
    training["baseline"] = config.training.baseline.model_dump()
    if variant != "baseline":
        training["further"] = config.training.further.model_dump()
    online = config.training.features == "online"
    subset = {
        **(_responses(config, target) if online else _features(config, target)),
        "target": pick(config.targets, "target", target).model_dump(),
        "drafter": chosen.model_dump(),
        "variant": variant,
        "training": training,
    }
    if variant == "carryover":
        subset["carry"] = config.carry.model_dump()
    return subset


def _benchmark(config: Config, target: str | None, drafter: str | None) -> dict[str, Any]:
    # Of the variants, carryover's part includes the others'. The temperature names the file, so
    # that measuring one more repeats none.
    training = _train(config, target, drafter, "carryover")
    del training["variant"]
    return {
        **training,
        **_evaluation_prompts(config),
        "benchmark": config.benchmark.model_dump(exclude={"temperatures"}),
    }


def _report(config: Config) -> dict[str, Any]:
    return {
        "report": config.report.model_dump(),
        "temperatures": list(config.benchmark.temperatures),
        "benchmark": {
            target: {drafter: _benchmark(config, target, drafter) for drafter in config.drafters}
            for target in config.targets
        },
    }


def pick(entries: Mapping[str, Entry], what: str, name: str | None) -> Entry:
    """The entry called `name`; CarryoverError where there is none.

    Args:
        what: `target` or `drafter`, for the message.
    """
    if name is None:
        raise ValueError(f"this stage needs a {what}")
    if name not in entries:
        raise CarryoverError(
            f"--{what} {name} is not in the config", f"Its {what}s are {', '.join(entries)}."
        )
    return entries[name]
