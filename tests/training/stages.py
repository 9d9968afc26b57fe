"""Stages of the command line, each in a process of its own, without their imports each time.

DeepSpeed trains once in a process, and importing it and torch takes longer than a tiny drafter's
training. So one process imports them and forks for each command line that it is given. It has run
nothing before: a fork of a process whose threads have worked may hang. Its stderr, and what the
stages write to stdout and stderr, go to one log.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from types import TracebackType


class Stages:
    """The process that forks; `run` is `carryover ARGUMENTS` in a fork."""

    def __init__(self, log: Path) -> None:
        self.log = log
        environment = os.environ | {
            # A fork can use no GPU that was asked for before in any other way than through NVML.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            # As the command line sets it, before tqdm is imported.
            "TQDM_DISABLE": "1",
            # Else NumPy's import starts threads, which _check_threads could not tell from others.
            "OPENBLAS_NUM_THREADS": "1",
        }
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                [sys.executable, __file__],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
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
        if kind is None:
            # A Ctrl-C is for this process, too.
            assert self.process.returncode in (0, -signal.SIGINT), self._ended()

    def _ended(self) -> str:
        status = self.process.wait()
        return f"the process that forks ended with {status}:\n{self.log.read_text()[-3000:]}"

    def run(self, *arguments: str, cores: int = 1) -> str:
        """What the stage wrote to stdout and stderr; it has to succeed.

        cores: how many it may use. The drafters are tiny: more threads only wait for each other.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps([cores, *arguments]) + "\n")
            self.process.stdin.flush()
            status = self.process.stdout.readline()
        except BrokenPipeError:
            status = ""
        assert status, self._ended()
        written = self.log.read_text()
        assert status == "0\n", f"ended with {status}{written[-3000:]}"
        return written


def _check_threads() -> None:
    """There are no threads that could have worked; a fork might hang then."""
    others = set(os.listdir("/proc/self/task")) - {str(os.getpid())}
    names = [Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in others]
    # PyArrow's allocator has one, and is made to be forked with it.
    assert set(names) <= {"jemalloc_bg_thd"}, f"threads before a fork: {names}"


def main() -> None:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # as training does before this import
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  (where it trains at first)

    import carryover.drafter.export
    import carryover.training.loop  # noqa: F401
    from carryover.cli import main as command_line

    for line in sys.stdin:
        cores, *arguments = json.loads(line)
        _check_threads()
        os.ftruncate(2, 0)  # the log is this stage's, from here on
        child = os.fork()
        if not child:
            status = 1
            try:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # it reads no command lines
                os.dup2(2, 1)
                os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
                torch.set_num_threads(cores)  # torch counted them when it was imported
                status = command_line(arguments)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        _, ended = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(ended), flush=True)


if __name__ == "__main__":
    main()
