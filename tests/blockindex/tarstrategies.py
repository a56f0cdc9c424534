"""Hypothesis strategies for tar entries, shared by the differential tests against GNU tar and against containerd.

Where CI is set in the environment, Hypothesis derandomizes by itself: the same examples every time. Elsewhere it tries
new ones, and shrinks what fails.
"""

from dataclasses import dataclass

from hypothesis import strategies as st

from tests.blockindex.tarcases import file, header, long_name, pax

__all__ = ["Drawn", "drawn", "encoded"]


@dataclass(frozen=True, slots=True)
class Drawn:
    """An entry but for its name and, if it is a hard link, its target. `content` is a file's, or a symlink's target."""

    kind: str
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    xattr: tuple[bytes, bytes] | None
    content: bytes


def drawn(first_s: int, last_s: int) -> st.SearchStrategy[Drawn]:
    """Entries of all kinds with times from `first_s` up to `last_s`, in seconds since 1970."""
    owners = st.sampled_from([0, 8, 1000, 65_534, 3_000_000])
    return st.builds(
        Drawn,
        kind=st.sampled_from(["file", "dir", "symlink", "hardlink", "fifo", "device"]),
        mode=st.integers(0, 0o7777),
        uid=owners,
        gid=owners,
        mtime_ns=st.integers(first_s * 10**9, last_s * 10**9),
        xattr=st.none() | st.tuples(st.sampled_from([b"user.a", b"user.b"]), st.binary(max_size=30)),
        content=st.builds(bytes.__mul__, st.binary(max_size=40), st.sampled_from([1, 103, 300])),
    )


def encoded(entry: Drawn, name: bytes, target: bytes = b"") -> bytes:
    """The tar entry, with its records and long names; `target` is what a hard link links to."""
    second, ns = divmod(abs(entry.mtime_ns), 10**9)
    mtime = b"%s%d.%09d" % (b"-" if entry.mtime_ns < 0 else b"", second, ns)
    records = [(b"mtime", mtime), (b"uid", b"%d" % entry.uid), (b"gid", b"%d" % entry.gid)]
    if entry.xattr and entry.kind in ("file", "dir"):
        records.append((b"SCHILY.xattr." + entry.xattr[0], entry.xattr[1]))
    name += b"/" if entry.kind == "dir" else b""
    long = (long_name(name) if len(name) > 100 else b"") + (long_name(target, b"K") if len(target) > 100 else b"")
    name, target = name[:100], target[:100]
    match entry.kind:
        case "file":
            made = file(name, entry.content, mode=entry.mode)
        case "dir":
            made = header(name, b"5", mode=entry.mode)
        case "symlink":
            made = header(name, b"2", link=entry.content.replace(b"\0", b"")[:90] or b"x", mode=0o777)
        case "hardlink":
            made = header(name, b"1", link=target, mode=entry.mode)
        case "fifo":
            made = header(name, b"6", mode=entry.mode)
        case _:
            made = header(name, b"3", mode=entry.mode, device=(1, 3 + len(entry.content) % 7))
    return pax(records) + long + made
