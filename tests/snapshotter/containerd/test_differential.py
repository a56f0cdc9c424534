"""What a container would see: images through the whole daemon, mounted lazily, against containerd's own unpacking.

Both pull from one registry through one containerd, and both are mounted by `ctr images mount`, with the mounts that the
snapshotters name. Names, types, modes, owners, times in ns, xattrs, link counts and contents must be the same.
"""

import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.blockindex.tarcases import END, base256, file, header, long_name, pax
from tests.blockindex.tarstrategies import drawn, encoded
from tests.blockindex.test_erofs_mount import CAPABILITY, View, differences, rich_tree, view
from tests.snapshotter.containerd.containerd_node import NEEDED, SNAPSHOTTER, Node, tar_of
from tests.snapshotter.daemon import Daemon, origin

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        any(shutil.which(program) is None for program in NEEDED), reason=f"needs {', '.join(NEEDED)}: run scripts/setup"
    ),
]


class Both:
    """A node whose containerd has our daemon beside its own overlayfs snapshotter."""

    def __init__(self, root: Path, node: Node, daemon: Daemon) -> None:
        self._root = root
        self._node = node
        self._daemon = daemon

    def views(self, layers: Sequence[bytes]) -> tuple[View, View]:
        """The image of these tars as we show it and as containerd unpacks it."""
        self._node.push(layers)
        self._node.rpull()
        prepares = self._daemon.status()["prepares"]
        assert (prepares["lazy"], prepares["fallback"]) == (len(layers), 0), "a layer was not served lazily"
        self._node.ctr("images", "pull", "--plain-http", "--snapshotter", "overlayfs", self._node.image)
        return self._view(SNAPSHOTTER), self._view("overlayfs")

    def _view(self, snapshotter: str) -> View:
        target = self._root / f"view-{snapshotter}"
        target.mkdir(exist_ok=True)
        self._node.ctr("images", "mount", "--snapshotter", snapshotter, self._node.image, str(target))
        try:
            return view(target)
        finally:
            subprocess.run(["umount", target], check=True)


@contextmanager
def _both() -> Iterator[Both]:
    root = Path(tempfile.mkdtemp(prefix="bs", dir="/tmp"))  # short: socket paths end at 107 bytes
    node = Node(root, root / "d" / "run" / "bootseer.sock")
    (root / "d").mkdir()
    try:
        with origin() as unused, Daemon(root / "d", unused) as daemon:
            try:
                node.start()
                yield Both(root, node, daemon)
            finally:
                node.stop()
    finally:
        subprocess.run(["rm", "-rf", "--one-file-system", str(root)], check=True)


@pytest.fixture
def both() -> Iterator[Both]:
    with _both() as made:
        yield made


def _assert_same(both: Both, layers: Sequence[bytes], timeless: Sequence[str] = ()) -> None:
    """`timeless`: directories without an entry, whose time is that of the unpacking."""
    ours, theirs = both.views(layers)
    _compare(ours, theirs, timeless)


def _compare(ours: View, theirs: View, timeless: Sequence[str]) -> None:
    for name in (".", *timeless):  # containerd takes nothing of the root's entry, we its time
        ours[name], theirs[name] = (*ours[name][:3], *ours[name][4:]), (*theirs[name][:3], *theirs[name][4:])
    assert differences(ours, theirs) == {}


def _directory(name: bytes, mode: int = 0o755, uid: int = 0, gid: int = 0, mtime: int = 1_600_000_000) -> bytes:
    return header(name + b"/", b"5", mode=mode, uid=uid, gid=gid, mtime=mtime)


def test_implied_directories(both: Both) -> None:
    """`/tmp` stays 1777 and `/opt` its owner's, when a layer above has files in them but no entries for them."""
    base = (
        _directory(b".", 0o755)
        + _directory(b"tmp", 0o1777)
        + pax([(b"SCHILY.xattr.user.note", b"kept")])
        + _directory(b"opt", 0o750, 1000, 1000)
        + _directory(b"opt/a", 0o2711, 7, 8)
        + _directory(b"gone", 0o700)
        + _directory(b"replaced", 0o700)
        + _directory(b"opaque", 0o700)
        + _directory(b"opaque/below", 0o700)
        + _directory(b"deep", 0o701)
        + _directory(b"deep/entry", 0o702)
        + _directory(b"deep/entry/end", 0o703)
        + END
    )
    middle = file(b".wh.gone") + file(b".wh.replaced") + file(b"replaced", b"a file") + END
    top = (
        file(b"tmp/x", b"1")
        + file(b"opt/a/b", b"2")
        + file(b"opt/new/c", b"3")
        + file(b"gone/d", b"4")
        + file(b"opaque/.wh..wh..opq")
        + file(b"opaque/e", b"5")
        + _directory(b"deep/entry", 0o500, 3, 4)
        + file(b"deep/entry/end/f", b"6")
        + END
    )
    timeless = ["tmp", "opt", "opt/a", "opt/new", "gone", "opaque", "deep", "deep/entry/end"]
    ours, theirs = both.views([base, middle, top])
    assert (ours["tmp"][0], ours["opt"][:3], ours["opt"][4]) == (
        "0o41777",
        ("0o40750", 1000, 1000),
        {"user.note": b"kept"},
    )
    _compare(ours, theirs, timeless)


def test_a_rich_tree(both: Both, tmp_path: Path) -> None:
    """GNU tar's archive of one of everything."""
    rich_tree(tmp_path)
    os.utime(tmp_path / "d/empty", ns=(0, 5 * 10**9))  # containerd sets times before 1970 to 1970
    options = ["--format=pax", "--xattrs", "--xattrs-include=*", "--numeric-owner", "--sort=name"]
    packed = subprocess.run(["tar", "-C", tmp_path, *options, "-c", "."], check=True, capture_output=True).stdout
    _assert_same(both, [packed])


def test_layers_that_change_each_other(both: Both) -> None:
    def layer(*entries: bytes) -> bytes:
        return b"".join(entries) + END

    base = layer(
        _directory(b".", 0o711, 5, 6),
        _directory(b"etc"),
        file(b"etc/removed", b"r"),
        file(b"etc/changed", b"old", mode=0o600),
        _directory(b"dir"),
        file(b"dir/old", b"o"),
        _directory(b"opaque", 0o750),
        file(b"opaque/old", b"o"),
        header(b"link", b"2", link=b"etc", mode=0o777),
        file(b"becomes-dir", b"f"),
        file(b"hard-a", b"shared"),
        header(b"hard-b", b"1", link=b"hard-a"),
    )
    top = layer(
        file(b"etc/.wh.removed"),
        file(b"etc/changed", b"new", mode=0o4755),
        _directory(b"etc", 0o700, 1, 2),
        file(b".wh.dir"),
        _directory(b"opaque", 0o711),
        file(b"opaque/.wh..wh..opq"),
        file(b"opaque/new", b"n"),
        file(b".wh.link"),
        _directory(b"becomes-dir", 0o1755),
        file(b"becomes-dir/f", b"inside"),
        file(b"hard-a", b"no more"),
        _directory(b".", 0o711, 5, 6),
    )
    _assert_same(both, [base, top])


def test_odd_archives(both: Both) -> None:
    """Names, numbers and repetitions that ordinary tools write seldom."""
    long = b"long/" + b"n" * 200 + b"/" + b"m" * 255
    archive = b"".join(
        (
            _directory(b"./"),
            _directory(b"./dot"),
            file(b"./dot/./f", b"1", mtime=1_600_000_001),
            file(b"/absolute", b"2", mtime=1_600_000_002),
            file(b"../../outside", b"3"),
            file(b"dot/x/../y", b"4"),
            _directory(b"long"),
            long_name(long.rpartition(b"/")[0] + b"/"),
            _directory(b"long/cut"),
            long_name(long),
            file(b"long/cut", b"5"),
            file(b"no-utf8-\xff\xfe", b"6"),
            pax([(b"path", "päx/näme".encode()), (b"mtime", b"1600000000.123456789"), (b"uid", b"4000000000")]),
            file(b"short", b"7"),
            file(b"base256", b"8", uid=base256(70_000, 8), gid=base256(2**31, 8), mtime=base256(2**33, 12)),
            file(b"v7", b"9", typeflag=b"\0", magic=b""),
            file(b"twice", b"first", mode=0o600),
            file(b"twice", b"second", mode=0o644),
            file(b"file-then-dir", b"x"),
            _directory(b"file-then-dir", 0o700),
            _directory(b"dir-then-link"),
            file(b"dir-then-link/child", b"x"),
            header(b"dir-then-link", b"2", link=b"dot"),
            pax([(b"SCHILY.xattr.security.capability", CAPABILITY)]),
            file(b"capable", b"x", mode=0o755),
            file(b"suid", b"x", mode=0o6755, uid=1, gid=2),
            header(b"symlink", b"2", link=b"dot", uid=3, gid=4),
            header(b"hard-symlink", b"1", link=b"symlink", uid=3, gid=4),
            file(b"symlink/inside", b"through"),
            header(b"char", b"3", device=(1, 3), mode=0o666),
            header(b"block", b"4", device=(259, 70_000)),
            header(b"fifo", b"6", mode=0o622),
            END,
            b"garbage after the end" * 50,
        )
    )
    _assert_same(both, [archive], timeless=["päx", "dot"])


def test_the_same_layer_twice_and_an_empty_one(both: Both) -> None:
    empty = END
    one = tar_of({"a/b": b"1"})
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        member = tarfile.TarInfo("a")
        member.type, member.mode = tarfile.DIRTYPE, 0o711
        tar.addfile(member)
    _assert_same(both, [one, empty, stream.getvalue(), one, empty], timeless=["a"])


# --- generated images


class _Image:
    """The tars of five layers; `timeless` are the directories without an entry. Shown by its names."""

    def __init__(self, layers: list[bytes], timeless: set[str]) -> None:
        self.layers, self.timeless = layers, timeless

    def __repr__(self) -> str:
        names = []
        for layer in self.layers:
            with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
                names.append(tar.getnames())
        return f"<image of {names}>"


@st.composite
def _images(draw: st.DrawFn) -> _Image:
    """Layers that add to, replace and hide what is below, with missing directory entries and opaque ones."""
    layers: list[bytes] = []
    below: dict[str, str] = {}
    gone: set[str] = set()
    timeless: set[str] = set()
    for _ in range(5):
        layer, implied = _layer(draw, below, gone)
        layers.append(layer)
        timeless |= implied
    return _Image(layers, timeless)


_PLACES = st.lists(st.sampled_from("abc"), max_size=3).map("/".join)
# containerd sets times before 1970 to 1970
_ENTRIES = st.lists(st.tuples(drawn(0, 2**33 - 1), _PLACES, st.integers(0, 3)), min_size=5, max_size=25)


def _layer(draw: st.DrawFn, below: dict[str, str], gone: set[str]) -> tuple[bytes, set[str]]:
    """A layer's tar, and its directories without an entry.

    `below` is what lower layers show (path -> kind), and then with this layer. Names say what they are, so that no
    layer puts a file where another needs a directory, and no whiteout names what its own layer holds: containerd fails
    on both. It also fails on a directory without an entry two levels below what a lower layer has hidden: `gone`
    collects the whiteouts so far.
    """
    hidden: set[str] = set()
    for path in draw(st.lists(st.sampled_from(sorted(below)), max_size=4, unique=True)) if below else ():
        if not any(path.startswith(other + "/") or other.startswith(path + "/") for other in hidden):
            hidden.add(path)
    entries: dict[str, str] = {}
    parts: list[bytes] = []
    for entry, directory, number in draw(_ENTRIES):
        kind = entry.kind
        name = directory if kind == "dir" and directory else f"{directory}/{kind}{number}".lstrip("/")
        if any(name == path or name.startswith(path + "/") for path in hidden) or (kind == "dir" and not directory):
            continue
        parent = name.rpartition("/")[0]
        if any(parent.startswith(path + "/") for path in gone):
            continue
        files = [path for path, found in entries.items() if found == "file"]
        if kind == "hardlink" and (not files or name in entries):
            continue
        parts.append(encoded(entry, name.encode(), files[-1].encode() if files else b""))
        entries[name] = kind
    parts += [file((path.rpartition("/")[0] + "/.wh." + path.rpartition("/")[2]).encode()) for path in sorted(hidden)]
    # Nothing is hidden twice: overlayfs lists a whiteout that hides nothing.
    dirs = [path for path, kind in entries.items() if kind == "dir"]
    dirs = [path for path in dirs if not any(other.startswith(path + "/") for other in hidden)]
    opaque = draw(st.lists(st.sampled_from(dirs), max_size=2, unique=True)) if dirs else []
    parts += [file(path.encode() + b"/.wh..wh..opq") for path in opaque]
    gone |= hidden
    covered = [path + "/" for path in (*hidden, *opaque)]
    for path in [path for path in below if path in hidden or path.startswith(tuple(covered))]:
        del below[path]
    below |= {path: kind for path, kind in entries.items() if not _is_swept(path, opaque, entries)}
    parents = {path[:end] for path in (*entries, *hidden) for end in range(len(path)) if path[end] == "/"}
    return b"".join(parts) + END, {path for path in parents if entries.get(path) != "dir"}


def _is_swept(path: str, opaque: list[str], entries: Mapping[str, str]) -> bool:
    """Whether an opaque directory of its own layer takes it away: with a directory in between that has no entry."""
    ends = [end for end in range(len(path)) if path[end] == "/"]
    return any(
        path.startswith(f"{top}/") and any(path[:end] not in entries for end in ends if end > len(top))
        for top in opaque
    )


@pytest.mark.timeout(300)
@settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.generate], database=None)
@given(_images())
def test_generated_images(image: _Image) -> None:
    """Each on a node of its own, which takes seconds: few examples, and no shrinking."""
    with _both() as both:
        ours, theirs = both.views(image.layers)
    _compare(ours, theirs, sorted(image.timeless & ours.keys() & theirs.keys()))
