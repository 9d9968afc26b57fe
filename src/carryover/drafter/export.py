"""Stage `export`: a trained drafter as the folder that vLLM loads."""

import shutil
from datetime import UTC, datetime
from pathlib import Path

import torch

from carryover.artifacts import write_manifest
from carryover.config import Config
from carryover.drafter.checkpoint import HEAD, load_into, load_tensors, observed_ids, save_drafter
from carryover.drafter.config import STOCK_GEMMA
from carryover.drafter.model import Drafter
from carryover.errors import CarryoverError
from carryover.paths import Paths
from carryover.target.load import target_ends
from carryover.training.result import trained_folder


def run(config: Config, *, target: str, drafter: str, variant: str) -> None:
    """Write `Paths.drafter(...)` from the last training checkpoint, and check it by loading it.

    The check is a round trip through our own loader, bit for bit; the benchmark's engines load the
    same folder. Raises CarryoverError where the training of this config has not ended or a file is
    damaged.
    """
    started = datetime.now(UTC)
    source = trained_folder(config, target, drafter, variant)
    folder = Paths(config).drafter(target, drafter, variant)
    module, tensors = _read(source)
    shutil.rmtree(folder, ignore_errors=True)
    head, embedding = tensors.get(HEAD), None
    if STOCK_GEMMA in module.config.architectures:
        # vLLM's own class takes no drafter without copies of these, and then shares the target's.
        shape = (module.config.vocab_size, module.config.hidden_size)
        ends = target_ends(Paths(config).target(target), shape)
        # Never one tensor under two names, which safetensors does not write.
        embedding, head = (end.to(module.fc.weight.dtype, copy=True) for end in ends)
    save_drafter(folder, module, observed_ids(tensors), head, embedding)
    again, _ = _read(folder)
    for name, value in module.state_dict().items():
        if not torch.equal(value, again.state_dict()[name]):
            raise CarryoverError(
                f"{folder}/model.safetensors does not hold {name} as trained",
                "The disk may be failing; run `carryover export` again.",
            )
    write_manifest(
        folder,
        stage="export",
        config=config.stage("export", target, drafter, variant),
        started=started,
        seed=config.seed,
        inputs={"checkpoint": source / "model.safetensors"},
        extra={"parameters": sum(p.numel() for p in module.parameters())},
    )


def _read(folder: Path) -> tuple[Drafter, dict[str, torch.Tensor]]:
    config, tensors = load_tensors(folder)
    module = Drafter(config).to(tensors["fc.weight"].dtype)
    load_into(module, tensors)
    return module, tensors
