"""From containerd's Prepare of a layer to the answer that it is there, mounted: for layers of any number of files.

The index is a file on the node's disk (`index.url` is a path), in the page cache; nothing of the layer is fetched
(`background = false`). The layer is new to the store each time: between two rounds its snapshot is removed, and the
layer from the cache. The clock is the client's, around the gRPC call.
"""

import re
from dataclasses import dataclass
from statistics import median

from scripts.rig.errors import RigError
from scripts.rig.nodebench.site import Site
from scripts.rig.nodebench.table import Row
from scripts.rig.snapshotcalls import SnapshotCalls
from scripts.rig.synthetic import layer_of_files

__all__ = ["FILES", "GOAL_MS", "Prepare", "measure"]

GOAL_MS = 10.0
FILES = (1, 1_000, 10_000, 100_000)
_ROUNDS_MAX = 10
_TOML = "[fetch]\nbackground = false\n"
_MOUNTED = re.compile(r"layer\.mounted .*ready_s=([\d.]+) mount_s=([\d.]+)")


@dataclass(frozen=True, slots=True)
class Prepared:
    """Medians in ms of a layer of `files` files: the whole call, and of it, as the daemon logs them to the ms, until
    the layer was in the store (index read, decoded, judged, written) and from there until it was mounted."""

    files: int
    n: int
    ms: float
    low_ms: float
    high_ms: float
    ready_ms: float
    mount_ms: float


@dataclass(frozen=True, slots=True)
class Prepare:
    """One element a layer."""

    layers: tuple[Prepared, ...]

    def rows(self) -> list[Row]:
        """For the table."""
        return [
            Row(
                f"Prepare to mounted, {each.files:,} files",
                f"{each.ms:.1f} ms [{each.low_ms:.1f}-{each.high_ms:.1f}]"
                f" (index {each.ready_ms:.0f} ms, mount {each.mount_ms:.0f} ms)",
                each.n,
                f"<= {GOAL_MS:.0f} ms",
                each.ms <= GOAL_MS,
            )
            for each in self.layers
        ]


def measure(site: Site, rounds: int, files: tuple[int, ...] = FILES) -> Prepare:
    """Up to 10 rounds after one that is thrown away: the first layer ever takes imports along."""
    rounds = min(rounds, _ROUNDS_MAX)
    directory = site.directory("prepare")
    layers = {count: layer_of_files(directory, f"files{count}", count) for count in files}
    taken: dict[int, list[tuple[float, float, float]]] = {count: [] for count in files}
    with site.layers(list(layers.values()), _TOML) as node:
        calls = SnapshotCalls(node.daemon_socket)
        try:
            for number in range(rounds + 1):
                for count, layer in layers.items():
                    (seconds,) = calls.prepare(site.made_up, [layer.digest])
                    found = _MOUNTED.findall(node.daemon_log.read_text())
                    if not found:
                        raise RigError("the daemon's log does not say that it has mounted a layer")
                    ready_s, mount_s = map(float, found[-1])
                    if number:
                        taken[count].append((seconds * 1000, ready_s * 1000, mount_s * 1000))
                    calls.remove([layer.digest])
                    site.run(node.bootseer("cache", "rm", layer.digest), "removing a layer from the cache")
                site.progress(f"prepare: round {number}/{rounds}")
        finally:
            calls.close()
    return Prepare(tuple(_summary(count, samples) for count, samples in taken.items()))


def _summary(files: int, samples: list[tuple[float, float, float]]) -> Prepared:
    whole, ready, mount = zip(*samples, strict=True)
    return Prepared(files, len(samples), median(whole), min(whole), max(whole), median(ready), median(mount))
