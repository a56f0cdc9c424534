"""Many containers of one image starting together on a cold node, with bootseer and with overlayfs.

The clock runs from the order to pull until the last container has ended. With two cores runc is what bounds both: each
container is a `ctr`, a shim, a runc and a Python. All outputs are compared. What the registry sent of the layers is
counted in its log: with bootseer the background may go on after the last container, so the node is kept until the image
is complete, and the bytes are those of the whole image.
"""

import random
import subprocess
import time
from dataclasses import dataclass
from statistics import median

from scripts.rig.errors import RigError
from scripts.rig.node import SNAPSHOTTER, Node
from scripts.rig.nodebench.site import Site
from scripts.rig.nodebench.statistics import PairedRatio, paired_ratio
from scripts.rig.nodebench.table import Row
from scripts.rig.process import end, spawn

__all__ = ["GOAL_SENT", "Together", "measure"]

GOAL_SENT = 1.05
"""Once, and what neighbouring spans share at their edges."""

_ROUNDS_MAX = 3
_DEADLINE_S = 300.0
_OVERLAYFS = "overlayfs"


@dataclass(frozen=True, slots=True)
class Together:
    """`containers` at once: seconds from the order to pull, and from the first start, medians; `sent`: bytes of layer
    blobs that the registry sent to bootseer, in parts of their size, the most of all rounds."""

    containers: int
    ratio: PairedRatio
    bootseer_s: float
    overlayfs_s: float
    bootseer_start_s: float
    overlayfs_start_s: float
    sent: float

    def rows(self) -> list[Row]:
        """For the table."""
        what = f"{self.containers} containers together"
        whole = f"{self.ratio} ({self.bootseer_s:.1f} s / {self.overlayfs_s:.1f} s, pull included)"
        start = f"{self.bootseer_start_s:.1f} s / {self.overlayfs_start_s:.1f} s"
        sent, met = f"{self.sent:.3f}", self.sent <= GOAL_SENT
        return [
            Row(f"{what} / overlayfs", whole, self.ratio.n),
            Row(f"{what}: without the pull, bootseer / overlayfs", start, self.ratio.n),
            Row(f"{what}: layer bytes sent, of their size", sent, self.ratio.n, f"<= {GOAL_SENT}", met),
        ]


def measure(site: Site, rounds: int, containers: int = 50) -> Together:
    """Up to 3 pairs, each start on a node of its own."""
    rounds = min(rounds, _ROUNDS_MAX)
    samples: dict[str, list[tuple[float, float, float]]] = {SNAPSHOTTER: [], _OVERLAYFS: []}
    for number in range(1, rounds + 1):
        for system in random.sample(sorted(samples), 2):
            taken = _storm(site, system, containers)
            samples[system].append(taken)
            figures = f"{taken[0]:.1f} s, without the pull {taken[1]:.1f} s"
            site.progress(f"together: round {number}/{rounds}: {system}: {figures}")
    ours, theirs = samples[SNAPSHOTTER], samples[_OVERLAYFS]
    pairs = [(our[0], their[0]) for our, their in zip(ours, theirs, strict=True)]
    return Together(
        containers=containers,
        ratio=paired_ratio(pairs),
        bootseer_s=median(sample[0] for sample in ours),
        overlayfs_s=median(sample[0] for sample in theirs),
        bootseer_start_s=median(sample[1] for sample in ours),
        overlayfs_start_s=median(sample[1] for sample in theirs),
        sent=max(sample[2] for sample in ours),
    )


def _storm(site: Site, system: str, containers: int) -> tuple[float, float, float]:
    """Seconds from the pull, from the first start, and bytes sent in parts of the image's."""
    with site.node() as node:
        site.registry.warm()
        before = _sent(site)
        started = time.monotonic()
        site.pull(node, system)
        pulled = time.monotonic()
        _start_all(site, node, system, containers)
        ended = time.monotonic()
        if system == SNAPSHOTTER:
            site.complete(node)
            site.registry.settled_requests()
    return ended - started, ended - pulled, (_sent(site) - before) / site.image.layout.size


def _start_all(site: Site, node: Node, system: str, containers: int) -> None:
    """Start them all, wait for them all; RigError unless each printed the image's line and ended well."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(containers):
            words = ["--rm", "--cgroup", "", "--snapshotter", system, site.image.reference, f"c{number}"]
            argv = node.ctr("run", *words)
            processes.append(spawn(argv, site.workspace.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + _DEADLINE_S
        for process in processes:
            out, _ = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
            text = out.decode(errors="replace").strip()
            if process.returncode or not site.image.recipe.is_ready(text):
                raise RigError(f"a container with {system} ended with {process.returncode}: {text[-800:]}")
    except subprocess.TimeoutExpired:
        raise RigError(f"{containers} containers with {system} did not end within {_DEADLINE_S:.0f} s") from None
    finally:
        for process in processes:
            end(process, grace_s=0)
            if process.stdout is not None:
                process.stdout.close()


def _sent(site: Site) -> int:
    """Bytes of layer blobs that the registry has sent so far."""
    layers = set(site.image.layout.layers)
    return sum(size for digest, size in site.registry.blob_reads() if digest in layers)
