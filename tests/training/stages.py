"""Stages of the command line, each in a process of its own, without their imports each time.

DeepSpeed trains once in a process, and importing it and torch takes longer than a tiny drafter's
training. So one process imports them and forks for each command line that it is given. It has run
nothing before: a fork of a process whose threads have worked may hang.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from types import TracebackType


class Stages:
    """The process that forks; `run` is `carryover ARGUMENTS` in a fork."""

    def __init__(self, log: Path) -> None:
        log.touch()
        self.log = log
        # A fork can use no GPU that was asked for before in any other way than through NVML.
        environment = os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(log)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Stages:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.process.communicate()

    def run(self, *arguments: str, cores: int = 1) -> str:
        """What the stage wrote to stderr; it has to succeed.

        cores: how many it may use. The drafters are tiny: more threads only wait for each other.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([cores, *arguments]) + "\n")
        self.process.stdin.flush()
        status = self.process.stdout.readline()
        written = self.log.read_text()
        assert status == "0\n", (status, written[-3000:])
        return written


def main(log: str) -> None:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # as training does before this import
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  (where it trains at first)

    import carryover.drafter.export
    import carryover.training.loop  # noqa: F401
    from carryover.cli import main as command_line

    for line in sys.stdin:
        cores, *arguments = json.loads(line)
        child = os.fork()
        if not child:
            status = 1
            try:
                sink = os.open(log, os.O_WRONLY | os.O_TRUNC)
                for stream in (1, 2):
                    os.dup2(sink, stream)
                os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
                status = command_line(arguments)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        _, ended = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(ended), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
