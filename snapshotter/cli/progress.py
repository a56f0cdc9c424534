"""Progress on stderr: a bar that redraws itself on a terminal, else a line a second. Never touches stdout.

One thread calls `show`; the counting may happen in any.
"""

import sys
import time
from collections.abc import Callable
from typing import TextIO

__all__ = ["Progress"]

_BAR = 24
_AVERAGE_S = 5.0  # the rate is that of the last seconds


class Progress:
    """Bytes done of `total`, with the current rate; `label` says what is done, as in "3 of 5 layers"."""

    def __init__(self, total: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._tty = self._stream.isatty()
        self._samples = [(clock(), 0)]
        self._shown = clock()
        self.interval_s = 0.1 if self._tty else 1.0

    def show(self, done: int, label: str) -> None:
        """Draw the state, unless the last drawing is younger than `interval_s`."""
        now = self._clock()
        if now - self._shown < self.interval_s:
            return
        self._shown = now
        self._samples = [s for s in self._samples if now - s[0] <= _AVERAGE_S] or [self._samples[-1]]
        since, before = self._samples[0]
        rate = (done - before) / (now - since) if now > since else 0.0
        self._samples.append((now, done))
        text = f"{label}, {done / 1e6:.1f} of {self._total / 1e6:.1f} MB, {rate / 1e6:.1f} MB/s"
        if self._tty:
            filled = _BAR * min(done, self._total) // self._total if self._total else _BAR
            self._stream.write(f"\r\x1b[K[{'#' * filled}{'.' * (_BAR - filled)}] {text}")
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()

    def end(self) -> None:
        """Clear the bar."""
        if self._tty:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
