"""DeepSpeed checkpoints that a kill cannot spoil: written aside, synced, renamed, verified."""

import logging
import os
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist

from carryover.artifacts import read_manifest, write_manifest
from carryover.errors import CarryoverError

STAGE = "train"
PARTIAL = ".partial"
log = logging.getLogger(__name__)


def save(
    engine: Any, folder: Path, step: int, *, config: dict, seed: int, started: datetime, keep: int
) -> None:
    """Save the engine (weights, fp32 masters, optimizer, scheduler) as `folder/step-N`.

    Collective: every rank calls it. `config` is what `load_newest` asks for (see
    `result.checkpoint_config`). Only the newest `keep` of the checkpoints with this config are
    left: those of another one, and those that this training has fallen back behind, are removed.
    """
    final = folder / f"step-{step:08d}"
    partial = final.with_name(final.name + PARTIAL)
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    engine.save_checkpoint(
        str(folder), tag=partial.name, client_state={"step": step}, save_latest=False
    )
    dist.barrier()
    if dist.get_rank() == 0:
        for path in partial.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        write_manifest(partial, stage=STAGE, config=config, started=started, seed=seed)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        own = [path for path in _all(folder) if path <= final and _fits(path, config)]
        for old in folder.glob("step-*"):
            if old not in own[-keep:]:
                shutil.rmtree(old)
    dist.barrier()


def load_newest(engine: Any, folder: Path, *, config: dict) -> int:
    """Load the newest intact checkpoint into the engine; returns its step, 0 where there is none.

    A damaged or foreign one is skipped with a warning. Collective.
    """
    for path in reversed(_all(folder)):
        try:
            read_manifest(path, stage=STAGE, config=config, verify=True)
        except CarryoverError as error:
            log.warning("skipping checkpoint %s: %s", path.name, error.reason)
            continue
        _, state = engine.load_checkpoint(str(folder), tag=path.name)
        return int(state["step"])
    return 0


def _fits(path: Path, config: dict) -> bool:
    try:
        read_manifest(path, stage=STAGE, config=config)
    except CarryoverError:
        return False
    return True


def _all(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("step-*") if p.suffix != PARTIAL)
