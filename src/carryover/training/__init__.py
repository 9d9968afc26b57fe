"""Train a drafter: `run` starts the ranks, `loop.Trainer` is what each of them does.

The modules of a step (batch, dvd, objective, verify, ...) need torch and transformers alone, so
what reads configs and results (pydantic) is imported where it is used.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from carryover.artifacts import write_json
from carryover.errors import CarryoverError

if TYPE_CHECKING:
    from carryover.config import Config

# Set in the ranks that `run` starts under torchrun.
RANK_MARK = "CARRYOVER_TRAINING_RANK"


def run(config: Config, *, target: str, drafter: str, variant: str) -> None:
    """Train one variant to its last step and write `Paths.trained`.

    variant: baseline, control (further steps without carry) or carryover (further steps of
    parallel DVD). A run that was interrupted goes on from its newest intact checkpoint.
    """
    from carryover.paths import Paths
    from carryover.training.result import released_folder, trained_folder, write_trained

    if variant != "baseline":
        trained_folder(config, target, drafter, "baseline")
    if RANK_MARK not in os.environ:
        if variant == "baseline" and config.drafters[drafter].released:
            released_folder(config, target, drafter)
        # Until the end there is no finished training, whatever an earlier one has left.
        Paths(config).trained(target, drafter, variant).unlink(missing_ok=True)
    if RANK_MARK in os.environ or config.training.nodes * config.training.ranks == 1:
        _train(config, target, drafter, variant)
    else:
        _launch(config, target, drafter, variant)
    if RANK_MARK not in os.environ:
        write_trained(config, target, drafter, variant)


def _train(config: Config, target: str, drafter: str, variant: str) -> None:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // config.training.ranks))
        keep_freed_memory()
    if RANK_MARK not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
    import deepspeed

    # DeepSpeed would compile a shared-memory all-reduce here, which needs a C++ compiler and
    # Python's headers. gloo's serves as well: one small reduction a step.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    from carryover.training.loop import Trainer

    try:
        Trainer(config, target, drafter, variant).run()
    finally:
        torch.distributed.destroy_process_group()


def keep_freed_memory() -> None:
    """Let glibc keep large freed blocks, which it would hand back to the kernel and fault in anew.

    Every step allocates the same tensors: measured 12 % of a baseline step on 2 cores.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # absent from other C libraries
        trim_threshold, mmap_threshold, size = -1, -3, 1 << 30
        mallopt(trim_threshold, size)
        mallopt(mmap_threshold, size)


def _launch(config: Config, target: str, drafter: str, variant: str) -> None:
    """Start the ranks: torchrun on one node, `srun ... torchrun` on several (SLURM)."""
    from carryover.paths import Paths

    settings = config.training
    resolved = Paths(config).training(target, drafter, variant) / "config.json"
    write_json(resolved, config.model_dump(mode="json"))
    stage = [
        "-m", "carryover", "train", "--config", str(resolved),
        "--target", target, "--drafter", drafter, "--variant", variant,
    ]  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={settings.ranks}"]
    if settings.nodes == 1:
        command += ["--standalone", *stage]
    else:
        head = _first_host()
        port = 20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 20000
        command += [
            f"--nnodes={settings.nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={head}:{port}",
            f"--rdzv-id={os.environ.get('SLURM_JOB_ID', 'carryover')}",
            *stage,
        ]
        command = ["srun", f"--nodes={settings.nodes}", "--ntasks-per-node=1", *command]
    environment = os.environ | {RANK_MARK: "1"}
    if subprocess.run(command, env=environment).returncode:
        raise CarryoverError(
            f"a training rank of {variant} ended early (its messages stand above)",
            "Run the same command again: it goes on from the last checkpoint.",
        )


def _first_host() -> str:
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if nodes is None:
        raise CarryoverError(
            "training.nodes is above 1, but this is no SLURM job",
            "Submit with --workflow-profile profiles/slurm, or set training.nodes: 1.",
        )
    hosts = subprocess.run(
        ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True
    )
    return hosts.stdout.split()[0]
