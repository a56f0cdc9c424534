"""What a node holds at a quiet moment, so that two moments can be compared: what the later one has more is a leak.

Looked at are mounts, loop devices, processes, files where things are made and taken away, and what the daemon's
processes have open of these, also when it was deleted. How many descriptors and threads they have in all is not looked
at here, for no process lives long enough: `load` does that.
"""

import collections
import os
import re
import time
from collections.abc import Callable, Collection
from pathlib import Path

from scripts.rig.node import Node
from scripts.rig.process import marked
from scripts.rig.workspace import mounts_below

__all__ = ["Census", "census", "left_over"]

Census = collections.Counter[str]

_DELETED = re.compile(r"^/(?!memfd:).* \(deleted\)$")
_TEMPORARY = re.compile(r"salvage-|\.copy-|\.new|\.damaged|^lost-|ballast")
_BESIDE = frozenset({"ctr", "ctr-remote", "nsenter", "setpriv", "runc", "python3", "bootseer"})
"""Clients that come and go."""


def census(node: Node, root: Path, layers: Collection[str]) -> Census:
    """All that there is now; `root`: the workspace, `layers`: digests whose loop devices are ours."""
    found: Census = collections.Counter()
    found.update(f"mount {point}" for point in mounts_below(node.daemon_root, node.pid))
    names = {digest.removeprefix("sha256:")[:14] for digest in layers}
    for device in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            name = device.read_text().strip().rpartition("/")[2].partition(".")[0]
        except OSError:  # detached between the listing and the reading
            continue
        if name in names:
            found[f"loop device of layer {name}"] += 1
    for pid in marked(str(root)):
        comm = _comm(pid)
        if comm and comm not in _BESIDE:
            found[f"process {comm}"] += 1
        if comm.startswith("bootseer-"):
            found.update(f"{comm} has open {target}" for target in _descriptors(pid))
    inside = Path(f"/proc/{node.pid}/root{node.daemon_root}")
    for pattern in ("layers/*", "m/*", "s/*"):
        for path in inside.glob(pattern):
            found[f"file {path.relative_to(inside)}"] += 1
    found.update(f"file {path.name}" for path in inside.iterdir() if _TEMPORARY.search(path.name))
    return found


def left_over(before: Census, look: Callable[[], Census], patience_s: float) -> list[str]:
    """What is there that was not `before`, once it no longer goes away by itself."""
    give_up = time.monotonic() + patience_s
    while True:
        more = look() - before
        if not more or time.monotonic() > give_up:
            return [f"{count} x {what}" for what, count in sorted(more.items())]
        time.sleep(0.3)


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _descriptors(pid: int) -> list[str]:
    found = []
    try:
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            if target.startswith("/dev/loop") or "/bootseer/layers/" in target or _DELETED.search(target):
                found.append(target)
    except OSError:  # it ends just now
        return []
    return found
