"""Memory of the daemon's four processes: with 20 layers mounted, and with one layer of 8 GB.

Two sums over the processes: RSS counts a page once for each process that has it, PSS shares it out among all that have
it, so PSS is what the daemon takes from the machine. Each is taken twice: when the layers have just been mounted, and
after they have been read: the 20 layers whole, of the large one 256 MB here and there. Each of the 20 has 40 files of
512 KiB and 1,000 small ones; the large one has files of 128 MB that hardly compress, as weights do.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.rig.node import Node
from scripts.rig.nodebench.site import Site, in_store
from scripts.rig.nodebench.table import Row
from scripts.rig.snapshotcalls import SnapshotCalls
from scripts.rig.synthetic import SyntheticLayer, contents, layer_of_contents

__all__ = ["GOAL_LARGE_MB", "GOAL_MANY_MB", "Memory", "ProcessMemory", "measure"]

GOAL_MANY_MB = 120.0
GOAL_LARGE_MB = 200.0
_TOML = "[fetch]\nbackground = false\n"
_SMAPS = re.compile(r"^(Rss|Pss): +(\d+) kB$", re.MULTILINE)
_SMALL = 1000
_READS = 256
_READ = 1 << 20


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes of one process."""

    name: str
    rss_bytes: int
    pss_bytes: int


@dataclass(frozen=True, slots=True)
class Moment:
    """The processes' memory at one moment; `layers` is what was mounted, in words."""

    layers: str
    moment: str
    goal_mb: float
    processes: tuple[ProcessMemory, ...]

    def row(self) -> Row:
        """For the table: the sum of RSS is what the goal is for."""
        rss = sum(process.rss_bytes for process in self.processes) / 1e6
        pss = sum(process.pss_bytes for process in self.processes) / 1e6
        parts = ", ".join(f"{process.name} {process.rss_bytes / 1e6:.0f}" for process in self.processes)
        what = f"memory, {self.layers}, {self.moment}"
        figure = f"RSS {rss:.0f} MB ({parts}), PSS {pss:.0f} MB"
        return Row(what, figure, 1, f"RSS <= {self.goal_mb:.0f} MB", rss <= self.goal_mb)


@dataclass(frozen=True, slots=True)
class Memory:
    """All moments."""

    moments: tuple[Moment, ...]

    def rows(self) -> list[Row]:
        """For the table."""
        return [moment.row() for moment in self.moments]


def measure(site: Site, rounds: int, many: int = 20, large_bytes: int = 8_000_000_000) -> Memory:
    """One round whatever `rounds` says: memory hardly varies."""
    del rounds
    directory = site.directory("memory")
    program = contents(directory, "program", 1 << 19, noise=0.35)
    layers = [layer_of_contents(directory, f"layer{number}", program, 40, 1, _SMALL) for number in range(many)]
    site.progress(f"memory: {many} layers of {layers[0].tar_size / 1e6:.0f} MB")
    moments = _moments(site, f"{many} layers", GOAL_MANY_MB, layers, whole=True)
    weights = contents(directory, "weights", min(large_bytes // 8, 16 << 20) // 512 * 512, noise=0.95)
    files = -(-large_bytes // (len(weights.deflated) * 8))
    large = layer_of_contents(directory, "large", weights, files, 8)
    words = f"one layer of {large.size / 1e9:.1f} GB"
    site.progress(f"memory: {words}: building its index, unless it is kept from an earlier run")
    moments += _moments(site, words, GOAL_LARGE_MB, [large], whole=False)
    return Memory(tuple(moments))


def _moments(site: Site, words: str, goal_mb: float, layers: Sequence[SyntheticLayer], whole: bool) -> list[Moment]:
    with site.layers(layers, _TOML) as node:
        calls = SnapshotCalls(node.daemon_socket)
        try:
            calls.prepare(site.made_up, [layer.digest for layer in layers])
        finally:
            calls.close()
        moments = [Moment(words, "mounted", goal_mb, _processes(site, node))]
        for layer in layers:
            _read(site, node, layer, whole)
        moments.append(Moment(words, "read", goal_mb, _processes(site, node)))
    return moments


def _read(site: Site, node: Node, layer: SyntheticLayer, whole: bool) -> None:
    """Read the layer's files whole, or 1 MiB at 256 places."""
    mount = next(row["mount"] for row in site.status(node)["layers"] if row["name"] == in_store(layer.digest))
    if whole:
        site.run(node.command(["sh", "-c", f"find {mount} -type f -exec cat {{}} + >/dev/null"]), "reading a layer")
        return
    script = (
        "import os,random,sys\n"
        "files=[os.path.join(d,f) for d,_,fs in os.walk(sys.argv[1]) for f in fs]\n"
        "source=random.Random(0)\n"
        f"for _ in range({_READS}):\n"
        " with open(source.choice(sorted(files)),'rb') as file:\n"
        f"  file.seek(source.randrange(max(os.fstat(file.fileno()).st_size-{_READ},1)))\n"
        f"  file.read({_READ})\n"
    )
    site.run(node.command(["python3", "-c", script, mount]), "reading from a layer")


def _processes(site: Site, node: Node) -> tuple[ProcessMemory, ...]:
    found = []
    for row in site.status(node)["processes"]:
        sizes = dict(_SMAPS.findall(Path(f"/proc/{row['pid']}/smaps_rollup").read_text()))
        found.append(ProcessMemory(row["name"], int(sizes["Rss"]) << 10, int(sizes["Pss"]) << 10))
    return tuple(found)
