"""What happens in a run: a log with one line an action, the counts, and everything that should not have been.

Used by several threads. Every line has the seconds since the beginning, so that it can be laid beside the daemon's log,
whose times are absolute: the first line has the time of day.
"""

import json
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

__all__ = ["Counts", "Record"]


@dataclass(slots=True)
class Counts:
    """What the bench prints at its end."""

    kills: int = 0
    upgrades: int = 0
    faults: int = 0
    reads: int = 0
    io_errors: int = 0
    mismatches: int = 0
    leaks: int = 0
    longest_pause_s: float = 0.0

    @property
    def clean(self) -> bool:
        """Whether nothing reached a container, and nothing is left."""
        return not (self.io_errors or self.mismatches or self.leaks)

    def text(self) -> str:
        """As one line of JSON."""
        return json.dumps(asdict(self))


@dataclass(slots=True)
class Record:
    """`counts` are changed by one thread each or under `lock`."""

    path: Path
    counts: Counts = field(default_factory=Counts)
    lock: threading.Lock = field(default_factory=threading.Lock)
    problems: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
        self.path.write_text(f"[   0.000 s] it is {stamp}.{int(now % 1 * 1000):03}Z\n")

    def note(self, text: str) -> None:
        """Add a line."""
        with self.lock, self.path.open("a") as log:
            log.write(f"[{time.monotonic() - self.started:8.3f} s] {text}\n")

    def io_error(self, text: str) -> None:
        """A reader got an error, or what reads has ended."""
        self._problem("io_errors", text)

    def mismatch(self, text: str) -> None:
        """A reader got wrong bytes."""
        self._problem("mismatches", text)

    def leak(self, text: str) -> None:
        """Something is left."""
        self._problem("leaks", text)

    def read(self, files: int = 1) -> None:
        """So many files were read, and were right."""
        with self.lock:
            self.counts.reads += files

    def pause(self, seconds: float) -> None:
        """A read of a complete layer took so long."""
        with self.lock:
            self.counts.longest_pause_s = max(self.counts.longest_pause_s, round(seconds, 3))

    def _problem(self, kind: str, text: str) -> None:
        with self.lock:
            setattr(self.counts, kind, getattr(self.counts, kind) + 1)
            self.problems.append(f"{kind}: {text}")
        self.note(f"PROBLEM {kind}: {text}")
