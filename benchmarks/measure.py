"""Times taken in turn, ratios with intervals, and the file that a benchmark writes."""

from __future__ import annotations

import argparse
import errno
import importlib.metadata
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.shapes import Shape
from carryover.artifacts import git_state, hardware, package_versions, write_json

RESULTS = Path(__file__).parent / "results"
SEED = 42
BOOTSTRAP_SAMPLES = 2000


def arguments(name: str, about: str) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--out", type=writable, default=str(RESULTS / f"{name}.json"), help="file")
    parser.add_argument("--tiny", action="store_true", help="toy shapes: does it run at all?")
    return parser


def positive(text: str) -> int:
    """A number of rounds, for argparse."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, found {text}")
    return int(text)


def writable(text: str) -> Path:
    """A file that can be written once there is a result, for argparse; its folder is made."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be written ({error.strerror})") from None
    return path


def in_turn(
    steps: Mapping[str, Callable[[], Any]], rounds: int, device: str = "cpu"
) -> dict[str, list[float]]:
    """Seconds of every step in every round, after one round that is not counted.

    All steps run in each round, forwards and backwards by turns, so that whatever slows the machine
    for a while meets all of them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for round_ in range(rounds + 1):
        for name in order if round_ % 2 else reversed(order):
            start = _now(device)
            steps[name]()
            if round_:
                seconds[name].append(_now(device) - start)
    return seconds


def _now(device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Median, and all values in the order in which they were taken."""
    return {
        "median_s": round(statistics.median(seconds), 5),
        "seconds": [round(s, 5) for s in seconds],
    }


def ratio(top: Sequence[float], bottom: Sequence[float], seed: int) -> dict[str, float]:
    """sum(top) / sum(bottom) with a 95 % interval: a paired percentile bootstrap over rounds."""
    rounds = len(top)
    generator = np.random.default_rng(seed)
    counts = generator.multinomial(rounds, [1 / rounds] * rounds, size=BOOTSTRAP_SAMPLES)
    draws = (counts @ np.asarray(top)) / (counts @ np.asarray(bottom))
    low, high = np.quantile(draws, [0.025, 0.975])
    return {
        "ratio": round(sum(top) / sum(bottom), 3),
        "low": round(float(low), 3),
        "high": round(float(high), 3),
        "rounds": rounds,
    }


def median_ratio(top: Sequence[float], bottom: Sequence[float], seed: int) -> dict[str, float]:
    """Median of top / bottom over rounds with a 95 % interval: a percentile bootstrap over rounds.

    For rounds of milliseconds: one that was interrupted would outweigh many in `ratio`'s sums.
    """
    ratios = np.asarray(top) / np.asarray(bottom)
    generator = np.random.default_rng(seed)
    draws = np.median(generator.choice(ratios, size=(BOOTSTRAP_SAMPLES, len(ratios))), axis=1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return {
        "ratio": round(float(np.median(ratios)), 3),
        "low": round(float(low), 3),
        "high": round(float(high), 3),
        "rounds": len(ratios),
    }


def matrix_products(
    dtype: torch.dtype, device: str, square: int, shape: Shape
) -> dict[str, tuple[Callable[[], Any], int]]:
    """Products whose rate is the machine's: of a feed-forward layer's shape, and a large square.

    Values: (the product, several times over, and its FLOPs).
    """
    result = {}
    for rows, inside, columns in ((square, shape.hidden, shape.inner), (square, square, square)):
        a = torch.randn(rows, inside, device=device).to(dtype)
        b = torch.randn(columns, inside, device=device).to(dtype)
        count = 2 * rows * inside * columns
        repeats = max(1, 2 * square**3 // count)  # all take about as long

        def product(a: torch.Tensor = a, b: torch.Tensor = b, repeats: int = repeats) -> None:
            for _ in range(repeats):
                torch.nn.functional.linear(a, b)

        result[f"matmul {rows}x{inside}x{columns}"] = (product, count * repeats)
    return result


class Report:
    """One benchmark's file: numbers, and where and when they were taken."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed = name, seed
        self.started, self.load = datetime.now(UTC), os.getloadavg()
        self.git = git_state()  # now: a commit made meanwhile is not the code that runs

    def write(self, out: Path, **content: Any) -> None:
        """Write `out`; the load average beside the numbers says how far to trust them."""
        versions = package_versions()
        for extra in ("speculators",):
            try:
                versions[extra] = importlib.metadata.version(extra)
            except importlib.metadata.PackageNotFoundError:
                continue
        write_json(
            out,
            {
                "benchmark": self.name,
                **content,
                "provenance": {
                    "git": self.git,
                    "packages": versions,
                    "python": platform.python_version(),
                    "hardware": hardware(),
                    "torch_threads": torch.get_num_threads(),
                    "load_average": {
                        "before": [round(x, 2) for x in self.load],
                        "after": [round(x, 2) for x in os.getloadavg()],
                    },
                    "seed": self.seed,
                    "started": self.started.isoformat(timespec="seconds"),
                    "ended": datetime.now(UTC).isoformat(timespec="seconds"),
                },
            },
        )
        print(f"wrote {out}")
