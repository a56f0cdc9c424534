"""Reading a complete image from its first file to its last with a cold page cache, beside the same tree on ext4.

`tar cf - . | cat` of the container's root. With bootseer that is overlayfs on the three layers' mounts, every block
on the node. ext4 is a file system in a file beside bootseer's block store, on a loop device with direct I/O: both then
read from the same disk through one loop device (and bootseer through FUSE as well).
"""

import random
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from scripts.rig.errors import RigError
from scripts.rig.node import SNAPSHOTTER, Node
from scripts.rig.nodebench.site import Site, drop_caches
from scripts.rig.nodebench.statistics import PairedRatio, paired_ratio
from scripts.rig.nodebench.table import Row

__all__ = ["GOAL", "Tar", "measure"]

GOAL = 1.3
_SPARE = 64 << 20
_TRIES = 20


@dataclass(frozen=True, slots=True)
class Tar:
    """The ratio bootseer / ext4, the median seconds of both, bytes of the tar."""

    ratio: PairedRatio
    bootseer_s: float
    ext4_s: float
    tar_bytes: int

    def rows(self) -> list[Row]:
        """For the table."""
        size = f"{self.tar_bytes / 1e6:.0f} MB"
        figure = f"{self.ratio} ({self.bootseer_s:.2f} s / {self.ext4_s:.2f} s, {size})"
        met = self.ratio.median <= GOAL
        return [Row("tar of a complete image, cold / ext4", figure, self.ratio.n, f"<= {GOAL}", met)]


def measure(site: Site, rounds: int) -> Tar:
    """`rounds` pairs after one reading of each that is thrown away."""
    with site.node() as node:
        site.pull(node, SNAPSHOTTER)
        site.complete(node)
        directory = site.directory("tar")
        with _lazy_root(site, node, directory / "lazy") as lazy, _ext4_copy(site, node, lazy, directory) as ext4:
            roots = {SNAPSHOTTER: lazy, "ext4": ext4}
            sizes = {name: _read(site, node, root)[1] for name, root in roots.items()}
            if len(set(sizes.values())) != 1:
                raise RigError(f"the two trees are not the same: tars of {sizes} bytes")
            pairs = []
            for number in range(1, rounds + 1):
                names = random.sample(sorted(roots), 2)
                taken = {name: _read(site, node, roots[name])[0] for name in names}
                pairs.append((taken[SNAPSHOTTER], taken["ext4"]))
                site.progress(f"tar: pair {number}/{rounds}: {taken[SNAPSHOTTER]:.2f} s / {taken['ext4']:.2f} s")
    ours, theirs = (median(values) for values in zip(*pairs, strict=True))
    return Tar(paired_ratio(pairs), ours, theirs, sizes["ext4"])


def _read(site: Site, node: Node, root: Path) -> tuple[float, int]:
    """Seconds of a cold reading of the tree, and bytes of its tar."""
    drop_caches()
    script = 'set -eo pipefail; tar --sort=name --numeric-owner -C "$1" -cf - . | wc -c'
    argv = node.command(["bash", "-c", script, "bash", root])
    started = time.monotonic()
    out = site.run(argv, f"reading {root} whole")
    return time.monotonic() - started, int(out)


@contextmanager
def _lazy_root(site: Site, node: Node, target: Path) -> Iterator[Path]:
    """The image's root as a container has it, read-only: a view of its topmost snapshot, mounted as containerd says."""
    target.mkdir()
    snapshots = ("snapshots", "--snapshotter", SNAPSHOTTER)
    lines = site.run(node.ctr(*snapshots, "ls"), "listing the snapshots").splitlines()[1:]
    rows = [line.split() for line in lines]  # KEY PARENT KIND, the lowest without a parent
    (top,) = {row[0] for row in rows} - {row[1] for row in rows if len(row) == 3}
    site.run(node.ctr(*snapshots, "view", "whole", top), "viewing the image")
    command = site.run(node.ctr(*snapshots, "mounts", str(target), "whole"), "asking for the image's mounts")
    site.run(node.command(shlex.split(command)), "mounting the image")
    with _unmounting(site, node, target):
        yield target


@contextmanager
def _ext4_copy(site: Site, node: Node, source: Path, directory: Path) -> Iterator[Path]:
    """The tree copied to a new ext4 file system in a file below `directory`."""
    file, target = directory / "ext4.image", directory / "ext4"
    target.mkdir()
    _, tar_bytes = _read(site, node, source)
    with file.open("wb") as image:
        image.truncate(2 * tar_bytes + _SPARE)
    what = "making an ext4 file system"
    site.run(["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0", str(file)], what)
    site.run(node.command(["mount", "-o", "loop,noatime", file, target]), what)
    with _unmounting(site, node, target):
        device = site.run(node.command(["findmnt", "-no", "SOURCE", target]), what).strip()
        site.run(node.command(["losetup", "--direct-io=on", device]), what)
        script = 'set -o pipefail; tar -C "$1" --xattrs -cf - . | tar -C "$2" --xattrs -xpf -; rmdir "$2/lost+found"'
        site.run(node.command(["bash", "-ec", script, "bash", source, target]), what)
        yield target


@contextmanager
def _unmounting(site: Site, node: Node, target: Path) -> Iterator[None]:
    try:
        yield
    finally:
        _unmount(site, node, target)


def _unmount(site: Site, node: Node, target: Path) -> None:
    """Whoever looks at the processes in /proc holds their files for a moment, so one that is busy is tried again."""
    for left in reversed(range(_TRIES)):
        try:
            site.run(node.command(["umount", target]), f"unmounting {target}")
            return
        except RigError as error:
            if not left or "target is busy" not in str(error):
                raise
            time.sleep(0.1)
