"""A warm container: the image complete on the node, its files in the page cache, with bootseer and with overlayfs.

Three figures. The whole `ctr run`, the share of containerd and runc included. And, timed inside of another container,
its work (for the numpy image a child process that does `import numpy`: some CPU and a few hundred files), and a walk
through /usr that looks at every file. Both snapshotters are on one node, with the image mounted for both.
"""

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from scripts.rig.errors import RigError
from scripts.rig.node import SNAPSHOTTER, Node
from scripts.rig.nodebench.site import Site
from scripts.rig.nodebench.statistics import PairedRatio, paired_ratio
from scripts.rig.nodebench.table import Row

__all__ = ["GOAL", "Warm", "measure"]

GOAL = 1.02
_WARM_UPS = 2
_OVERLAYFS = "overlayfs"

# Nine times each, and the median: a container is started once for nine, so what disturbs one of them is not counted.
_PYTHON = """
import json, os, subprocess, sys, time
def timed(work):
    taken = []
    for _ in range(9):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return sorted(taken)[4]
def walk():
    for directory, _, files in os.walk("/usr"):
        for name in files:
            os.lstat(os.path.join(directory, name))
child = [sys.executable, "-c", "import numpy"]
print(json.dumps([timed(lambda: subprocess.run(child, check=True)), timed(walk)]))
"""
# busybox has no clock finer than a second for scripts: /proc/uptime has hundredths.
_SHELL = """
now() { cat /proc/uptime | { read up rest; echo $up; }; }
a=$(now); i=0; while [ $i -lt 20 ]; do cat /data/[1-3] | sha256sum >/dev/null; i=$((i+1)); done
b=$(now); i=0; while [ $i -lt 20 ]; do ls -lR /data /bin /etc >/dev/null; i=$((i+1)); done
c=$(now); echo "$a $b $c"
"""


@dataclass(frozen=True, slots=True)
class Warm:
    """Ratios bootseer / overlayfs, and the medians of overlayfs in seconds."""

    whole: PairedRatio
    inside: PairedRatio
    stat: PairedRatio
    whole_s: float
    inside_s: float
    stat_s: float

    def rows(self) -> list[Row]:
        """For the table."""
        parts = (
            ("its work, timed inside", self.inside, self.inside_s),
            ("walk and stat of /usr, inside", self.stat, self.stat_s),
            ("the whole `ctr run`", self.whole, self.whole_s),
        )
        return [
            Row(
                f"warm container / overlayfs: {words}",
                f"{ratio} (overlayfs {seconds:.3f} s)",
                ratio.n,
                f"<= {GOAL}",
                ratio.median <= GOAL,
            )
            for words, ratio, seconds in parts
        ]


def measure(site: Site, rounds: int) -> Warm:
    """`rounds` pairs after two warm-ups of each."""
    with site.node() as node:
        site.pull(node, SNAPSHOTTER, _OVERLAYFS)
        site.complete(node)
        samples: list[dict[str, tuple[float, float, float]]] = []
        for number in range(-_WARM_UPS, rounds):
            systems = random.sample((SNAPSHOTTER, _OVERLAYFS), 2)
            pair = {system: _container(site, node, system, f"{system}{number}") for system in systems}
            if number >= 0:
                samples.append(pair)
                site.progress(f"warm: pair {number + 1}/{rounds}: {_ratio(pair)}")
    return _result(samples)


def _container(site: Site, node: Node, snapshotter: str, name: str) -> tuple[float, float, float]:
    """Seconds of the whole run, of the work inside, of the walk inside."""
    words = ["/usr/bin/python3", "-c", _PYTHON] if site.image.recipe.name != "tiny" else ["/bin/sh", "-c", _SHELL]
    start = ["--rm", "--cgroup", "", "--snapshotter", snapshotter, site.image.reference]
    started = time.monotonic()
    out = site.run(node.ctr("run", *start, f"{name}-w"), "running a warm container")
    whole_s = time.monotonic() - started
    if not site.image.recipe.is_ready(out.strip()):
        raise RigError(f"a warm container with {snapshotter} printed {out!r}")
    out = site.run(node.ctr("run", *start, f"{name}-i", *words), "running a warm container")
    inside_s, stat_s = _inside(out)
    return whole_s, inside_s, stat_s


def _inside(text: str) -> tuple[float, float]:
    if text.startswith("["):
        inside_s, stat_s = json.loads(text)
        return inside_s, stat_s
    before, middle, after = map(float, text.split())
    return middle - before, after - middle


def _ratio(pair: dict[str, tuple[float, float, float]]) -> str:
    ratios = zip(pair[SNAPSHOTTER], pair[_OVERLAYFS], strict=True)
    return ", ".join(f"{ours / theirs:.3f}" for ours, theirs in ratios)


def _result(samples: Sequence[dict[str, tuple[float, float, float]]]) -> Warm:
    ratios, theirs = [], []
    for part in range(3):
        pairs = [(pair[SNAPSHOTTER][part], pair[_OVERLAYFS][part]) for pair in samples]
        ratios.append(paired_ratio(pairs))
        theirs.append(median(them for _, them in pairs))
    whole, inside, stat = ratios
    whole_s, inside_s, stat_s = theirs
    return Warm(whole, inside, stat, whole_s, inside_s, stat_s)
