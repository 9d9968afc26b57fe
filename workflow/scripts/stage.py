"""Run one stage as a job: stage.py LOG STAGE [ARGUMENTS of `carryover STAGE`].

What the stage prints goes to the terminal and to LOG. Two things that a plain pipe does not do:

- A Snakemake that is killed leaves its jobs running. A second copy of a stage waits until the
  first has ended, then goes on from its result, instead of writing the same files beside it.
- A stage that is killed leaves processes of its own (training ranks, engines). They are ended
  with it, so they neither hold the job nor the memory.
"""

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import BinaryIO

_PR_SET_CHILD_SUBREAPER = 36
_PUMP_SECONDS = 10


def main(log: Path, command: list[str]) -> int:
    # Processes that lose their parent become children of this one, where they can be found.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.with_name(f".{log.name}.lock").open("wb") as lock:
        wait_for(lock, command[0])
        with log.open("wb") as sink:
            return run([sys.executable, "-u", "-m", "carryover", *command], sink, lock)


def wait_for(lock: BinaryIO, stage: str) -> None:
    """Take the lock; while another copy of the stage holds it, say so and wait."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(
            f"Stage {stage} of an earlier run is still at work; waiting for its end ...",
            file=sys.stderr,
            flush=True,
        )
        fcntl.flock(lock, fcntl.LOCK_EX)


def run(command: list[str], sink: BinaryIO, lock: BinaryIO) -> int:
    """Run `command` to its end, its output copied to stderr and `sink`; its exit code.

    The command holds the lock too, in case that this process is killed before it.
    """
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=[lock.fileno()]
    )
    # The terminal's Ctrl-C reaches the command directly; here it must only wait for the end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    assert process.stdout is not None
    pump = threading.Thread(target=copy, args=(process.stdout, sink), daemon=True)
    pump.start()
    code = process.wait()
    end_children()
    pump.join(_PUMP_SECONDS)
    return code if code >= 0 else 128 - code


def copy(source: BinaryIO, sink: BinaryIO) -> None:
    """Copy lines as they come. A terminal that has gone away does not stop the stage."""
    terminal: BinaryIO | None = sys.stderr.buffer
    while piece := os.read(source.fileno(), 65536):
        sink.write(piece)
        sink.flush()
        try:
            if terminal is not None:
                terminal.write(piece)
                terminal.flush()
        except OSError:
            terminal = None


def end_children() -> None:
    """Kill every process that the stage left behind, and their children in turn."""
    tasks = Path("/proc/self/task")
    while children := {
        int(child) for path in tasks.glob("*/children") for child in path.read_text().split()
    }:
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
