"""A read of 4 KiB that is there, on the layer's file of the FUSE connection: how long until the block server answers.

Direct I/O, one read after another at random places of a complete layer, past page cache and loop device. First with
nothing else going on; then while 16 threads of the fetch process decode cold layers that come from a registry on this
machine as fast as they can be stored. The registry and the reader need the same two cores.
"""

import mmap
import os
import random
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from scripts.rig.errors import RigError
from scripts.rig.node import Node
from scripts.rig.nodebench.site import Site, in_store
from scripts.rig.nodebench.statistics import Latency
from scripts.rig.nodebench.table import Row
from scripts.rig.snapshotcalls import SnapshotCalls
from scripts.rig.synthetic import Contents, SyntheticLayer, contents, layer_of_contents

__all__ = ["GOAL_MEDIAN_US", "GOAL_P99_US", "Hit", "measure"]

GOAL_MEDIAN_US = 20.0
GOAL_P99_US = 1000.0
THREADS = 16
_SIZE = 4096
_ROUNDS_MAX = 3
_BUSY_NS = 1_000_000
_SLICES = 8  # of a round under load; those in which nothing was decoded any more do not count
_PIECE = 8 << 20
_TOML = f"""
[fetch]
demand_threads = {THREADS}
background_threads = {THREADS}
"""


@dataclass(frozen=True, slots=True)
class Hit:
    """Both latencies. `threads`: how many threads of the fetch process were busy at once under load, in the least busy
    round; `stored_mb_s`: the median rate at which they stored bytes."""

    rounds: int
    idle: Latency
    loaded: Latency
    threads: int
    stored_mb_s: float

    def rows(self) -> list[Row]:
        """For the table."""
        met = self.idle.median_us <= GOAL_MEDIAN_US
        load = f"{self.threads} threads, {self.stored_mb_s:.0f} MB/s stored"
        return [
            Row("4 KiB FUSE hit, idle", str(self.idle), self.idle.n, f"median <= {GOAL_MEDIAN_US:.0f} us", met),
            Row(
                f"4 KiB FUSE hit while {THREADS} threads decode",
                f"{self.loaded} ({load})",
                self.loaded.n,
                f"p99 < {GOAL_P99_US / 1000:.0f} ms",
                self.loaded.p99_us < GOAL_P99_US,
            ),
        ]


def measure(site: Site, rounds: int, cold_bytes: int = 96 << 20, seconds: float = 2.5) -> Hit:
    """Up to 3 rounds of `seconds` idle and `seconds` under load; each of the 16 cold layers has `cold_bytes` of tar."""
    rounds = min(rounds, _ROUNDS_MAX)
    warm, cold = _layers(site.directory("hit"), cold_bytes)
    idle: list[int] = []
    loaded: list[int] = []
    loads = []
    for number in range(1, rounds + 1):
        with site.layers([warm, *cold], _TOML) as node:
            calls = SnapshotCalls(node.daemon_socket)
            try:
                calls.prepare(site.made_up, [warm.digest])
                site.complete(node)
                file = _Layer(site, node, warm)
                try:
                    idle += file.read(seconds)
                    load = _Load(site, node)
                    calls.prepare(site.made_up, [layer.digest for layer in cold])
                    for _ in range(_SLICES):
                        taken = file.read(seconds / _SLICES)
                        if not load.went_on():
                            break
                        loaded += taken
                    loads.append(load.end())
                finally:
                    file.close()
            finally:
                calls.close()
        threads, rate = loads[-1]
        site.progress(f"hit: round {number}/{rounds}: {threads} threads, {rate:.0f} MB/s")
    rates = sorted(rate for _, rate in loads)
    fewest = min(threads for threads, _ in loads)
    return Hit(rounds, Latency.of_ns(idle), Latency.of_ns(loaded), fewest, rates[len(rates) // 2])


def _layers(directory: Path, cold_bytes: int) -> tuple[SyntheticLayer, list[SyntheticLayer]]:
    """The layer that is read, 32 MiB, and the cold ones, which compress like programs do."""
    piece: Contents = contents(directory, "piece", min(_PIECE, cold_bytes), noise=0.35)
    warm = layer_of_contents(directory, "warm", piece, 1, max(min(cold_bytes, 32 << 20) // len(piece.data), 1))
    repeats = max(cold_bytes // len(piece.data), 1)
    return warm, [layer_of_contents(directory, f"cold{number}", piece, 1, repeats) for number in range(THREADS)]


class _Layer:
    """The layer's file, opened below the mount that the service holds: it is on no path."""

    def __init__(self, site: Site, node: Node, layer: SyntheticLayer) -> None:
        service = next(row["pid"] for row in site.status(node)["processes"] if row["name"] == "service")
        self._file = _open_below(service, in_store(layer.digest))
        self._size = os.fstat(self._file).st_size
        self._buffer = mmap.mmap(-1, _SIZE)

    def read(self, seconds: float) -> list[int]:
        """Nanoseconds of each read for so long."""
        source = random.Random(0)
        offsets = [source.randrange(self._size // _SIZE) * _SIZE for _ in range(4096)]
        buffers, file, clock = [self._buffer], self._file, time.perf_counter_ns
        taken: list[int] = []
        until = clock() + int(seconds * 1e9)
        while clock() < until:
            for offset in offsets[:256]:
                before = clock()
                read = os.preadv(file, buffers, offset)
                taken.append(clock() - before)
                if read != _SIZE:
                    raise RigError(f"a read of {_SIZE} bytes gave {read}")
            offsets = offsets[256:] + offsets[:256]
        return taken

    def close(self) -> None:
        """Close file and buffer."""
        self._buffer.close()
        os.close(self._file)


def _open_below(pid: int, name: str) -> int:
    """The file `name` of the FUSE mount whose root the process has open."""
    for number in os.listdir(f"/proc/{pid}/fd"):
        try:
            file = os.open(f"/proc/{pid}/fd/{number}/{name}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            continue
        if stat.S_ISREG(os.fstat(file).st_mode):
            return file
        os.close(file)
    raise RigError(f"process {pid} has no mount with a file {name}")


class _Load:
    """What the fetch process does from now to `end`, slice after slice."""

    def __init__(self, site: Site, node: Node) -> None:
        self._site, self._node = site, node
        document = site.status(node)
        self._pid = next(row["pid"] for row in document["processes"] if row["name"] == "fetch")
        self._present = sum(layer["present_bytes"] for layer in document["layers"])
        self._started = time.monotonic()
        self._used = _used_ns(self._pid)
        self._busy: list[int] = []

    def went_on(self) -> bool:
        """Whether threads used CPU since the last call (or the beginning)."""
        used = _used_ns(self._pid)
        busy = sum(1 for thread, ns in used.items() if ns - self._used.get(thread, 0) > _BUSY_NS)
        self._used = used
        if busy:
            self._busy.append(busy)
        return busy > 0

    def end(self) -> tuple[int, float]:
        """Threads that were busy in a slice, the median, and MB stored a second since the beginning. RigError if
        nothing went on in any."""
        if not self._busy:
            raise RigError("the cold layers were complete before anything was measured: take larger ones")
        present = sum(layer["present_bytes"] for layer in self._site.status(self._node)["layers"])
        rate = (present - self._present) / (time.monotonic() - self._started) / 1e6
        return sorted(self._busy)[len(self._busy) // 2], rate


def _used_ns(pid: int) -> dict[int, int]:
    """CPU time by thread."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {int(task.name): int((task / "schedstat").read_text().split()[0]) for task in tasks}
