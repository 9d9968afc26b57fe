"""Progress of a long stage: a bar on a terminal, now and then a line in a log."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

LINE_SECONDS = 15.0


class Progress:
    """Counts `unit`s up to `total` on stderr, with the rate and the time left.

        with Progress(total=2400, unit="prompt", desc="responses") as progress:
            progress.update(8, tokens=512)

    On a terminal it is a bar; elsewhere (a log, a batch job) one line every 15 seconds and one at
    the end, since carriage returns would fill the log.

    Args:
        total: how many units there are.
        unit: what is counted, in the singular.
        desc: what is being done.
        done: units that an earlier, interrupted run did; they do not count for the rate.
    """

    def __init__(self, total: int, unit: str, desc: str, done: int = 0) -> None:
        self._total, self.unit, self.desc = total, unit, desc
        self._initial = self._done = done
        self._written: int | None = None
        self._bar: tqdm | None = None
        self._postfix: dict[str, Any] = {}
        self._start = self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        self._start = self._last_line = time.monotonic()
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=self._total,
                unit=f" {self.unit}",
                desc=self.desc,
                initial=self._initial,
                dynamic_ncols=True,
                disable=False,  # whatever TQDM_DISABLE says (see cli.py)
            )
        return self

    @property
    def total(self) -> int:
        """How many units there are; may be set when it turns out that there are fewer or more."""
        return self._total

    @total.setter
    def total(self, total: int) -> None:
        self._total = total
        if self._bar is not None:
            self._bar.total = total  # shown with the next update

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Says `what` is done meanwhile; its time does not count for the rate."""
        start = time.monotonic()
        if self._bar is None:
            print(f"{self.desc}: {what}", file=sys.stderr, flush=True)
        else:
            self._bar.set_postfix_str(what)
        yield
        waited = time.monotonic() - start
        self._start += waited
        if self._bar is not None:
            self._bar.start_t += waited
            self._bar.set_postfix(self._postfix, refresh=False)

    def update(self, n: int = 1, **postfix: Any) -> None:
        """Counts `n` more units; `postfix` (loss=..., tau=...) is shown beside them."""
        self._done += n
        self._postfix |= postfix
        if self._bar is not None:
            self._bar.set_postfix(self._postfix, refresh=False)
            self._bar.update(n)
        elif time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            self._write_line()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._written != self._done:
            self._write_line()

    def _write_line(self) -> None:
        self._written = self._done
        seconds = time.monotonic() - self._start
        rate = (self._done - self._initial) / seconds if seconds > 0 else 0.0
        parts = [f"{self.desc}: {self._done}/{self.total} {self.unit}", f"{rate:.3g} {self.unit}/s"]
        if self._done < self.total and rate > 0:
            parts.append(f"{tqdm.format_interval((self.total - self._done) / rate)} left")
        else:
            parts.append(f"{tqdm.format_interval(seconds)} passed")
        parts += [
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in self._postfix.items()
        ]
        print(", ".join(parts), file=sys.stderr, flush=True)
