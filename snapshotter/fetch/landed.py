"""What hot packs have brought of the layers, for whoever has the kernel read it before programs do (`hotpages`).

Noted as it lands, taken by the last caller; what nobody takes is forgotten beyond a bound, for it is a hint. What
turns out to be doubtful is noted too: those pages are to be dropped. Thread-safe; no lock is taken under its own.
"""

import time
from dataclasses import dataclass
from threading import Condition

__all__ = ["Batch", "Landed"]

_MOST = 1 << 14  # runs of blocks; `import numpy` has 1,202
_GATHER_S = 0.02  # a frame holds up to 512 KiB in dozens of runs: a call for each would cost more than it brings

Run = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Batch:
    """By node name the runs of blocks that have landed, and those in doubt, in the order in which they came."""

    landed: dict[str, list[Run]]
    doubted: dict[str, list[Run]]


class Landed:
    """See the module."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._batch = Batch({}, {})
        self._count = 0
        self._callers = 0

    def __repr__(self) -> str:
        return f"<Landed {self._count} runs>"

    def add(self, name: str, start: int, end: int) -> None:
        """The blocks `[start, end)` of a layer may be read."""
        with self._changed:
            if self._count < _MOST:
                self._batch.landed.setdefault(name, []).append((start, end))
                self._noted()

    def doubt(self, name: str, start: int, end: int) -> None:
        """They are in doubt now, and wrong perhaps. Kept until it is taken."""
        with self._changed:
            self._batch.doubted.setdefault(name, []).append((start, end))
            self._noted()

    def _noted(self) -> None:
        self._count += 1
        self._changed.notify_all()

    def take(self, wait_s: float) -> Batch:
        """What has been noted since the last call, each once. Waits for it, `wait_s` at most, and a moment more for
        what comes at the same time. Nothing for who waits when another one comes: its process has been killed."""
        with self._changed:
            self._callers += 1
            caller = self._callers
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._count or caller != self._callers, wait_s)
            if not self._count or caller != self._callers:
                return Batch({}, {})
        time.sleep(_GATHER_S)
        with self._changed:
            batch, self._batch, self._count = self._batch, Batch({}, {}), 0
            return batch
