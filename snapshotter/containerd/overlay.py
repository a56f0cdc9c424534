"""The mounts that containerd (or whoever runs the container) has to make for a snapshot.

Pure: paths in, mount values out. The forms are containerd's own for overlayfs, so that everything that reads them
(runtimes, `ctr`, the unpacker) meets nothing new: a bind mount where there is a single directory, else an overlay.
Layer paths have to be short: mount(2) takes at most one page of options, and containerd's own compaction only helps
where the paths share a prefix.
"""

from collections.abc import Sequence
from pathlib import Path

from snapshotter.containerd.model import Kind, Mount
from snapshotter.errors import InvalidArgument

__all__ = ["check_path", "mounts"]

_INDEX_PARAMETER = Path("/sys/module/overlay/parameters/index")
_SPECIAL = frozenset(":,\\")


def check_path(path: Path) -> Path:
    """`path` itself if it can stand in overlayfs options, which know no common way to escape these characters."""
    if _SPECIAL & set(str(path)):
        raise InvalidArgument(f"{path}: a path with one of ':' ',' '\\' cannot be an overlayfs layer")
    return path


def mounts(kind: Kind, upper: Path, work: Path, lowers: Sequence[Path]) -> list[Mount]:
    """The mounts of an active snapshot or a view.

    `upper` and `work` are its own directories, `lowers` the directories of its parents, the nearest first. With
    parents a view has no use for its own directories.

    A directory that occurs again further down is left out there: overlayfs refuses the same layer twice (ELOOP), images
    do hold the same layer (the empty one, mostly) several times, and all it holds is covered by its upper occurrence.
    """
    assert kind is not Kind.COMMITTED
    lowers = list(dict.fromkeys(lowers))
    mode = "rw" if kind is Kind.ACTIVE else "ro"
    if not lowers:
        return [Mount("bind", str(upper), (mode, "rbind"))]
    if kind is Kind.VIEW and len(lowers) == 1:
        return [Mount("bind", str(lowers[0]), ("ro", "rbind"))]
    options = list(_global_options())
    if kind is Kind.ACTIVE:
        options += [f"workdir={work}", f"upperdir={upper}"]
    options.append("lowerdir=" + ":".join(str(check_path(lower)) for lower in lowers))
    return [Mount("overlay", "overlay", tuple(options))]


def _global_options() -> tuple[str, ...]:
    """`index=off` where the kernel knows the option: the index fails mounts that share layers in ways it cannot see."""
    return ("index=off",) if _INDEX_PARAMETER.exists() else ()
