"""A process that runs a container's command on a cold EROFS image with no read-ahead, and counts the pages it touched.

It expects mount, PID and network namespaces of its own, and arguments: the EROFS file, a directory for its mounts, and
the command. It prints the command's first line and the page cache's content as JSON: `{"line": text, "files":
[[path, [[first page, last page + 1], ...]], ...]}`.

With no read-ahead a page is in the cache because somebody read it, or touched it through a mapping: `mincore` tells
which. The command works on an overlay of the image, as in a container. Its files are then those of the image, so that
the cache is the image's. Names and attributes are not counted.
"""

import ctypes
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["EMPTIED", "WITNESS", "main", "regions", "resident"]

EMPTIED = 75
"""Exit code: somebody emptied the page cache before it was looked at."""
WITNESS = ".witness"
"""In the image's root, one page long."""

_PAGE = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
_TIMEOUT_S = 600


def main() -> int:
    """See above."""
    image, directory, *command = sys.argv[1:]
    below = Path(directory)
    lower, root = below / "lower", below / "root"
    _mount(image, below, lower, root)
    Path("/proc/sys/vm/drop_caches").write_text("3")
    (lower / WITNESS).read_bytes()
    done = subprocess.run(
        ["chroot", str(root), *command],
        env=_ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True, timeout=_TIMEOUT_S,
    )  # fmt: skip
    line = done.stdout.split(b"\n", 1)[0].decode(errors="replace")
    answer = {"line": line, "files": list(_touched(lower))}
    if not regions(resident(str(lower / WITNESS))):
        return EMPTIED
    json.dump(answer, sys.stdout)
    return 0


def resident(path: str) -> bytes:
    """A byte for each page of a file, its lowest bit set if the page is in the page cache. Reads nothing."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        size = os.fstat(descriptor).st_size
        if size == 0:
            return b""
        with mmap.mmap(descriptor, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as mapping:
            pages = ctypes.create_string_buffer(-(-size // _PAGE))
            place = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
            if _LIBC.mincore(place, size, pages) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), path)
            return pages.raw
    finally:
        os.close(descriptor)


def regions(pages: bytes) -> list[tuple[int, int]]:
    """The runs of pages that are there, half-open."""
    found = []
    start = None
    for number, page in enumerate(pages):
        if page & 1 and start is None:
            start = number
        elif not page & 1 and start is not None:
            found.append((start, number))
            start = None
    if start is not None:
        found.append((start, len(pages)))
    return found


def _mount(image: str, below: Path, lower: Path, root: Path) -> None:
    for path in (lower, root, below / "upper"):
        path.mkdir()
    _run("mount", "-t", "erofs", "-o", "loop,ro", image, str(lower))
    device = os.stat(lower).st_dev
    setting = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/queue/read_ahead_kb")
    setting.write_text("0")
    _run("mount", "-t", "tmpfs", "tmpfs", str(below / "upper"))
    for name in ("upper", "work"):
        (below / "upper" / name).mkdir()
    layers = f"lowerdir={lower},upperdir={below}/upper/upper,workdir={below}/upper/work"
    _run("mount", "-t", "overlay", "-o", layers, "overlay", str(root))
    for name in ("proc", "dev", "tmp", "sys"):
        (root / name).mkdir(exist_ok=True)
    _run("mount", "-t", "proc", "proc", str(root / "proc"))
    _run("mount", "--rbind", "/dev", str(root / "dev"))
    _run("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", str(root / "dev" / "shm"))
    _run("ip", "link", "set", "lo", "up")


def _touched(lower: Path) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    seen: set[int] = set()
    for directory, _, names in os.walk(lower):
        for name in sorted(names):
            path = os.path.join(directory, name)
            status = os.lstat(path)
            if os.path.islink(path) or not os.path.isfile(path) or status.st_ino in seen:
                continue
            seen.add(status.st_ino)
            found = regions(resident(path))
            if found and path != str(lower / WITNESS):
                yield os.path.relpath(path, lower), found


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True)


if __name__ == "__main__":
    sys.exit(main())
