"""Stage `released`: the drafter that a baseline starts from, checked and written as one of ours.

It runs before anything long: what does not fit is said before the target answers a prompt. Like the
target it comes from the hub or a folder once, and its files are what the training depends on.
"""

import functools
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from carryover.artifacts import read_manifest, write_manifest
from carryover.config import Config
from carryover.config.stages import pick
from carryover.drafter import formats
from carryover.drafter.checkpoint import HEAD, load_into, observed_ids, save_drafter
from carryover.drafter.config import DrafterConfig
from carryover.drafter.formats import Released
from carryover.drafter.model import Drafter
from carryover.errors import CarryoverError
from carryover.identity import source_content
from carryover.paths import Paths
from carryover.target.load import logit_cap, target_ends
from carryover.target.source import find_source

_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", formats.MASK_EMBEDDING_FILE)


def run(config: Config, *, target: str, drafter: str) -> None:
    """Write `Paths.released(...)`: the drafter of `initialize`, in our format.

    Raises CarryoverError where it cannot be fetched or read, or does not fit config and target;
    then the line names every key to change.
    """
    started = datetime.now(UTC)
    key = f"drafters.{drafter}.initialize"
    wanted = pick(config.drafters, "drafter", drafter)
    if not wanted.released:
        raise CarryoverError(
            f"{key} is {wanted.initialize}, which needs no released drafter",
            "Set it to path:DIR or hub:ID@REVISION to start from one.",
        )
    paths = Paths(config)
    read_manifest(paths.target(target), stage="target", config=config.stage("target", target))
    source = find_source(wanted.initialize, key, _FILES)
    found = formats.read(source)
    settings = check(found, config, target, drafter)
    # All tensors of a drafter have one type: the widest, so that none is rounded.
    types = [t.dtype for t in found.tensors.values() if t.is_floating_point()] or [torch.float32]
    module = Drafter(settings).to(functools.reduce(torch.promote_types, types))
    try:
        load_into(module, found.tensors)
    except CarryoverError as error:
        raise CarryoverError(
            f"{key}: {error.reason}", f"Its config.json ({found.format}) promises other tensors."
        ) from None
    files = [source / "config.json", *sorted(source.glob("*.safetensors"))]
    folder = paths.released(target, drafter)
    shutil.rmtree(folder, ignore_errors=True)
    save_drafter(folder, module, observed_ids(found.tensors), found.tensors.get(HEAD))
    write_manifest(
        folder,
        stage="released",
        config=config.stage("released", target, drafter),
        started=started,
        seed=config.seed,
        inputs={path.name: path for path in files},
        extra={"format": found.format, "content": source_content(wanted.initialize)},
    )


def check(found: Released, config: Config, target: str, drafter: str) -> DrafterConfig:
    """The drafter's shapes and conventions; CarryoverError where they are not the config's.

    Reads the target's own config and, where the drafter holds copies of them, its embedding and
    head.
    """
    key = f"drafters.{drafter}.initialize"
    folder = Paths(config).target(target)
    text = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    fields = {
        "target_hidden_size": found.fields["hidden_size"],
        "target_blocks": text.num_hidden_layers,
        "final_logit_softcapping": logit_cap(text),
        **found.fields,
    }
    for field, value in (
        ("hidden_size", text.hidden_size),
        ("target_hidden_size", text.hidden_size),
        ("vocab_size", text.vocab_size),
        ("target_blocks", text.num_hidden_layers),
        ("final_logit_softcapping", logit_cap(text)),
    ):
        if fields[field] != value:
            raise CarryoverError(
                f"{key} names a drafter for another target than {target}: its {field} is "
                f"{fields[field]}, and the target's is {value}",
                f"Set {key} to a drafter that was trained for {target}, or to random.",
            )
    wrong = [
        f"{name} to {_shown(theirs)} (now {_shown(ours)})"
        for name, ours, theirs in _settings(config, target, drafter, fields)
        if ours != theirs
    ]
    longest = fields["max_position_embeddings"]
    if config.benchmark.max_model_len > longest:
        now = config.benchmark.max_model_len
        wrong.append(f"benchmark.max_model_len to {longest} or less (now {now})")
    if wrong:
        raise CarryoverError(
            f"{key} names a drafter ({found.format}) that does not fit the config",
            f"Set {', '.join(wrong)}.",
        )
    _check_shared(found, folder, key, fields["vocab_size"], fields["hidden_size"])
    return DrafterConfig(**fields)


def _settings(
    config: Config, target: str, drafter: str, fields: dict[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """(key, its value in the config, the drafter's) of everything that both say."""
    wanted, chosen = config.drafters[drafter], config.targets[target]
    at, rank = f"drafters.{drafter}", fields.get("markov_rank", 0)
    yield f"{at}.kind", wanted.kind, "markov" if rank else "dflash"
    if rank:
        yield f"{at}.markov_rank", wanted.markov_rank, rank
        trained = config.training.losses.markov.confidence
        # Only whether there is a confidence head; any factor above 0 trains one.
        has = fields.get("confidence", False)
        fits = trained if has == (trained > 0) else float(has)
        yield "training.losses.markov.confidence", trained, fits
    yield f"{at}.layers", wanted.layers, fields["num_hidden_layers"]
    yield f"{at}.proposals", wanted.proposals, fields["proposals"]
    yield f"{at}.slot_layout", wanted.slot_layout, fields["slot_layout"]
    yield f"{at}.blocks", wanted.blocks, fields.get("blocks", "qwen3")
    if wanted.rope_theta is not None:
        yield f"{at}.rope_theta", wanted.rope_theta, fields["rope_theta"]
    yield f"{at}.qk_norm", wanted.qk_norm, fields["qk_norm"]
    reduced = fields.get("draft_vocab_size") is not None
    yield f"{at}.vocabulary", wanted.vocabulary, "observed" if reduced else "full"
    ids = list(fields["target_layer_ids"])
    yield f"targets.{target}.feature_layers", chosen.feature_layers, ids
    yield f"targets.{target}.mask_token_id", chosen.mask_token_id, fields["mask_token_id"]


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_shared(found: Released, target: Path, key: str, vocabulary: int, width: int) -> None:
    """Refuse a drafter whose embedding or head is not the target's: ours share the target's."""
    own_head = found.tensors.get(HEAD, found.head)
    if own_head is None and found.embedding is None:
        return
    rows = observed_ids(found.tensors)
    embedding, head = target_ends(target, (vocabulary, width))
    pairs = [("embed_tokens.weight", found.embedding, embedding)]
    pairs += [("lm_head.weight", own_head, head if rows is None else head[rows])]
    for name, theirs, ours in pairs:
        if theirs is not None and not _same(theirs, ours):
            raise CarryoverError(
                f"{key}: the drafter's {name} differs from the target's, which carryover's "
                "drafters share",
                "Name a drafter that was trained for this very target with both frozen.",
            )


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers, as far as the coarser of their types tells."""
    coarser = min(a.dtype, b.dtype, key=lambda dtype: torch.finfo(dtype).bits)
    return a.shape == b.shape and torch.equal(a.to(coarser), b.to(coarser))
