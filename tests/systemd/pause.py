"""How long a reader waits when something of the daemon ends: `sudo .venv/bin/python -m tests.systemd.pause`.

A process reads 4 KiB blocks of a complete layer past the page cache, one after the other, while the block server is
killed, the whole daemon is killed or restarted by a service manager that keeps its descriptors, or an upgrade is made.
The longest read is the pause; it is printed for each kind, with the longest read while nothing happens beside it.
"""

import argparse
import mmap
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.snapshotter.daemon import make_layer, origin
from tests.systemd.managed import Managed, as_installed

__all__ = ["main"]

_AROUND_S = 0.1


class Prober:
    """Reads in a thread; `longest` gives the longest read since it was asked last."""

    def __init__(self, file: Path) -> None:
        self._fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
        self._blocks = os.fstat(self._fd).st_size // 4096
        self._longest_s = 0.0
        self._stop = False
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> "Prober":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop = True
        self._thread.join()
        os.close(self._fd)

    def longest(self) -> float:
        longest, self._longest_s = self._longest_s, 0.0
        return longest

    def _read(self) -> None:
        with mmap.mmap(-1, 4096) as buffer:
            while not self._stop:
                began = time.monotonic()
                os.preadv(self._fd, [buffer], random.randrange(self._blocks) * 4096)
                self._longest_s = max(self._longest_s, time.monotonic() - began)
                time.sleep(0.001)


def main(argv: list[str]) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="pause", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--turns", type=int, default=20, help="how often each is done (default: 20)")
    turns = parser.parse_args(argv).turns
    layer = make_layer(files=1, size=8 << 20)
    with tempfile.TemporaryDirectory(prefix="bs-pause-") as home, origin(layer) as registry:
        as_installed(Path(home))
        with Managed(Path(home), registry, "") as daemon, Prober(daemon.prepare(layer) / "f0000") as prober:
            kinds: dict[str, Callable[[], None]] = {
                "nothing": lambda: None,
                "block server killed": lambda: daemon.kill("block"),
                "service killed": lambda: daemon.kill("service"),
                "all killed, started again": lambda: daemon.restarted(signal.SIGKILL),
                "restarted": lambda: daemon.restarted(signal.SIGTERM),
                "upgraded in place": daemon.upgraded,
            }
            print(f"{'what':28} {'median':>8} {'longest':>8}   (ms, n = {turns})")
            for kind, act in kinds.items():
                pauses = [_pause(prober, act) * 1000 for _ in range(turns)]
                print(f"{kind:28} {statistics.median(pauses):8.1f} {max(pauses):8.1f}", flush=True)
    return 0


def _pause(prober: Prober, act: Callable[[], None]) -> float:
    time.sleep(_AROUND_S)
    prober.longest()
    act()
    time.sleep(_AROUND_S)
    return prober.longest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
