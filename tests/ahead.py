"""Waits for processes, ahead of the tests that need what they leave and side by side."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

RUNNING: set[subprocess.Popen[str]] = set()


@contextlib.contextmanager
def running(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive the block, nor the `Ahead` whose thread waits for it."""
    with subprocess.Popen(command, text=True, **options) as process:
        RUNNING.add(process)
        try:
            yield process
        finally:
            process.kill()
            RUNNING.remove(process)


class Ahead:
    """Functions that wait for `running` processes, each under a key that its result is read with.

    As many at once as there are cores: their processes compute with one thread, or start engines.
    """

    def __init__(self, functions: Mapping[Any, Callable[[], Any]]) -> None:
        self.pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        self.futures = {key: self.pool.submit(function) for key, function in functions.items()}

    def __call__(self, key: Any) -> Any:
        return self.futures[key].result()

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *error: object) -> None:
        """Nobody waits for what still runs: the tests were interrupted, or have failed before."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        while not all(future.done() for future in self.futures.values()):
            for process in RUNNING.copy():
                process.kill()
            time.sleep(0.1)
