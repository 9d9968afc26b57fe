"""A vLLM engine in a process of its own, driven with JSON lines over its pipes.

vLLM's thread binding and preloaded libraries are fixed when a process starts, several engines have
to be alive at once in a benchmark, and an engine that runs out of memory must not take the stage
with it. Each engine therefore lives in `python -m MODULE`; the driver holds an `EngineProcess`,
the module a `Channel`. A worker ends when its driver does, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from carryover.errors import CarryoverError

Message = dict[str, Any]

_DRIVER_PID = "CARRYOVER_DRIVER_PID"
_PR_SET_PDEATHSIG = 1
_STOP_SECONDS = 20
# vLLM's words for a cache that does not hold the longest text.
_SMALL_CACHE = re.compile(r"KV cache is needed|available KV cache memory")
_NO_MEMORY = re.compile(r"memory|KV cache|bad_alloc|killed by SIGKILL", re.IGNORECASE)


@dataclass(frozen=True)
class Remedies:
    """What the user of a stage can do when its engines fail, a sentence each."""

    no_memory: str
    small_cache: str

    def of(self, failure: str) -> str:
        """The remedy of a failure, by its message; empty where none is known."""
        if "ModuleNotFoundError" in failure:
            return "Run `make setup`."
        if _SMALL_CACHE.search(failure):
            return self.small_cache
        return self.no_memory if _NO_MEMORY.search(failure) else ""


class EngineProcess:
    """The driver's end. Use as a context manager: leaving it ends the worker.

    `label` names the engine in messages; everything the worker prints goes to `log`.
    """

    def __init__(
        self,
        module: str,
        environment: dict[str, str],
        log: Path,
        label: str,
        remedies: Remedies,
    ) -> None:
        self.label = label
        self._remedies = remedies
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env={**os.environ, **environment, _DRIVER_PID: str(os.getpid())},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Message) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None

    def receive(self) -> Message:
        """Wait for the next message. Raises CarryoverError when the worker failed or died."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self._death()
        message = json.loads(line)
        if "error" in message:
            raise self._failure(f"failed: {message['error']}")
        return message

    def close(self) -> None:
        """End the worker: politely by closing its input, by force when it does not listen."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def kill(self) -> None:
        """End the worker at once."""
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.kill()
        self.close()

    def _death(self) -> CarryoverError:
        self._process.kill()
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        cause = _last_error_line(self.log)
        return self._failure(f"{how}: {cause}" if cause else how)

    def _failure(self, what: str) -> CarryoverError:
        remedy = self._remedies.of(what)
        return CarryoverError(
            f"the {self.label} engine {what}", f"{remedy} See {self.log}.".strip()
        )


class Channel:
    """The worker's end: messages in on stdin, out on what was stdout."""

    def __init__(self) -> None:
        _die_with(int(os.environ[_DRIVER_PID]))
        # Libraries print to stdout; give them the log, and keep the pipe for messages.
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def send(self, message: Message) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def receive(self) -> Message | None:
        """Return the next message, or None when the driver has closed the pipe."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None


def run_worker(body: Callable[[Channel], None]) -> NoReturn:
    """Run a worker's body and report any failure to the driver; the traceback goes to the log.

    The process ends here, and at once: to take an engine apart, vLLM and Python would need seconds,
    in which the driver waits. What has to be written in the end, a trace for one, `body` closes.
    """
    channel = Channel()
    try:
        body(channel)
    except Exception as error:
        traceback.print_exc()
        text = str(error).strip() or type(error).__name__
        channel.send({"error": f"{type(error).__name__}: {text.splitlines()[0]}"})
        sys.exit(1)
    sys.stdout.flush()  # what libraries printed, into the log
    sys.stderr.flush()
    os._exit(0)


def _die_with(driver: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != driver:  # it died before the request was in place
        sys.exit(1)


def _last_error_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-200:]
    named = [line.strip() for line in lines if "Error" in line or "error:" in line]
    return named[-1] if named else ""
