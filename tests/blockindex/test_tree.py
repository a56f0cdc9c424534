"""What archives mean for a layer: paths, duplicates, hard links, whiteouts."""

import pytest

from blockindex.errors import Corrupt, Unsupported
from blockindex.layerpath import clean_path
from blockindex.tree import Attributes, Dir, Tree
from tests.blockindex.tarcases import END, Layer, file, header, pax, unpack


def directory(name: bytes, **fields: object) -> bytes:
    return header(name + b"/", b"5", **({"mode": 0o755} | fields))  # type: ignore[arg-type]


def symlink(name: bytes, target: bytes) -> bytes:
    return header(name, b"2", link=target)


def hardlink(name: bytes, target: bytes, **fields: object) -> bytes:
    return header(name, b"1", link=target, **fields)  # type: ignore[arg-type]


CASES: dict[str, tuple[bytes, dict[bytes, object]]] = {
    "dots and slashes": (
        file(b"./a", b"1") + file(b"/b", b"2") + file(b"//d/./c", b"3"),
        {b"/a": b"1", b"/b": b"2", b"/d": "dir", b"/d/c": b"3"},
    ),
    "dotdot stays inside": (
        file(b"../../a", b"1") + file(b"d/../b", b"2") + file(b"/../../c", b"3"),
        {b"/a": b"1", b"/b": b"2", b"/c": b"3"},
    ),
    "non-directories at the root are ignored": (file(b"./", b"1") + file(b"..", b"2"), {}),
    "last file wins": (file(b"a", b"1") + file(b"a", b"22"), {b"/a": b"22"}),
    "file over directory takes the subtree": (directory(b"d") + file(b"d/a", b"1") + file(b"d", b"2"), {b"/d": b"2"}),
    "directory over file": (file(b"d", b"1") + directory(b"d") + file(b"d/a", b"2"), {b"/d": "dir", b"/d/a": b"2"}),
    "directory over directory merges": (
        directory(b"d") + file(b"d/a", b"1") + directory(b"d") + file(b"d/b", b"2"),
        {b"/d": "dir", b"/d/a": b"1", b"/d/b": b"2"},
    ),
    "directory emptied and filled again": (
        file(b"d/a", b"1") + file(b"d/b", b"1") + symlink(b"d", b"x") + directory(b"d") + file(b"d/b", b"2"),
        {b"/d": "dir", b"/d/b": b"2"},
    ),
    "symlink over directory": (directory(b"d") + symlink(b"d", b"e"), {b"/d": ("symlink", b"e")}),
    "directory over symlink to one": (
        directory(b"e") + symlink(b"d", b"e") + directory(b"d") + file(b"d/a", b"1"),
        {b"/d": "dir", b"/d/a": b"1", b"/e": "dir"},
    ),
    "parents that are symlinks": (
        directory(b"usr/lib")
        + symlink(b"lib", b"usr/lib")
        + file(b"lib/a", b"1")
        + symlink(b"l2", b"/lib/")
        + file(b"l2/b"),
        {
            b"/usr": "dir",
            b"/usr/lib": "dir",
            b"/usr/lib/a": b"1",
            b"/usr/lib/b": b"",
            b"/lib": ("symlink", b"usr/lib"),
            b"/l2": ("symlink", b"/lib/"),
        },
    ),
    "symlinked parents that are not there": (
        symlink(b"lib", b"usr/lib") + file(b"lib/a", b"1"),
        {b"/lib": ("symlink", b"usr/lib"), b"/usr": "dir", b"/usr/lib": "dir", b"/usr/lib/a": b"1"},
    ),
    "symlinked parents do not escape": (
        symlink(b"x", b"../../../e/../f") + file(b"x/a", b"1"),
        {b"/x": ("symlink", b"../../../e/../f"), b"/e": "dir", b"/f": "dir", b"/f/a": b"1"},
    ),
    "the last component is no way through": (
        file(b"a", b"1") + symlink(b"s", b"a") + file(b"s", b"2"),
        {b"/a": b"1", b"/s": b"2"},
    ),
    "hard link to a symlink": (
        symlink(b"s", b"nowhere") + hardlink(b"t", b"s"),
        {b"/s": ("symlink", b"nowhere"), b"/t": ("symlink", b"nowhere")},
    ),
    "hard link through a symlink": (
        directory(b"d") + file(b"d/a", b"1") + symlink(b"e", b"d") + hardlink(b"b", b"e/a"),
        {b"/d": "dir", b"/d/a": b"1", b"/e": ("symlink", b"d"), b"/b": b"1"},
    ),
    "hard link before its target": (
        hardlink(b"b", b"d/a") + hardlink(b"c", b"b") + file(b"d/a", b"1"),
        {b"/b": b"1", b"/c": b"1", b"/d": "dir", b"/d/a": b"1"},
    ),
    "hard link before its target, replaced": (
        hardlink(b"b", b"nothing") + file(b"b", b"1"),
        {b"/b": b"1"},
    ),
    "hard link to itself": (file(b"a", b"1") + hardlink(b"a", b"a"), {b"/a": b"1"}),
    "hard link outlives its target's name": (
        file(b"a", b"1") + hardlink(b"b", b"a") + file(b"a", b"2"),
        {b"/a": b"2", b"/b": b"1"},
    ),
    "whiteout": (file(b"d/.wh.gone"), {b"/d": "dir", b"/d/gone": "whiteout"}),
    "whiteout by any type": (
        directory(b".wh.a") + hardlink(b".wh.b", b".wh..wh.aufs"),
        {b"/a": "whiteout", b"/b": "whiteout"},
    ),
    "whiteout, then the file": (file(b".wh.a") + file(b"a", b"1"), {b"/a": b"1"}),
    "the file, then whiteout": (file(b"a", b"1") + file(b".wh.a"), {b"/a": b"1"}),
    "whiteout, then the directory": (
        file(b".wh.d") + directory(b"d") + file(b"d/a", b"1"),
        {b"/d": "opaque dir", b"/d/a": b"1"},
    ),
    "the directory, then whiteout": (
        directory(b"d") + file(b"d/a", b"1") + file(b".wh.d"),
        {b"/d": "opaque dir", b"/d/a": b"1"},
    ),
    "whiteout, then a file below": (file(b".wh.d") + file(b"d/a", b"1"), {b"/d": "opaque dir", b"/d/a": b"1"}),
    "whiteout, file, directory": (file(b".wh.d") + file(b"d") + directory(b"d"), {b"/d": "opaque dir"}),
    "opaque": (directory(b"d") + file(b"d/.wh..wh..opq") + file(b"d/a", b"1"), {b"/d": "opaque dir", b"/d/a": b"1"}),
    "opaque before its directory": (file(b"d/.wh..wh..opq") + directory(b"d"), {b"/d": "opaque dir"}),
    "opaque forgotten with its directory": (file(b"d/.wh..wh..opq") + file(b"d") + directory(b"d"), {b"/d": "dir"}),
    "aufs metadata": (directory(b".wh..wh.plnk") + file(b".wh..wh.plnk/1.2", b"x") + file(b".wh..wh.aufs"), {}),
}  # fmt: skip

CORRUPT: dict[str, bytes] = {
    "parent is a file": file(b"a", b"1") + file(b"a/b", b"2"),
    "circle of symlinks": symlink(b"a", b"b") + symlink(b"b", b"a") + file(b"a/c"),
    "hard link to a directory": directory(b"d") + hardlink(b"e", b"d"),
    "hard link to the root": hardlink(b"e", b"/"),
    "hard links in a circle": hardlink(b"a", b"b") + hardlink(b"b", b"a"),
    "hard link to its own name": hardlink(b"a", b"a"),
    "late hard link to a directory": hardlink(b"e", b"d") + directory(b"d"),
    "whiteout of nothing": file(b".wh."),
    "whiteout of the parent": file(b"d/.wh..."),
}


def layer_of(archive: bytes) -> Layer:
    return unpack(archive + END)


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    archive, expected = CASES[name]
    assert layer_of(archive).summary() == expected


@pytest.mark.parametrize("name", CORRUPT)
def test_corrupt(name: str) -> None:
    with pytest.raises(Corrupt):
        layer_of(CORRUPT[name])


def test_links_into_aufs_metadata() -> None:
    """aufs's directory of hard-linked files is left out, but what links to it is not."""
    layer = layer_of(
        directory(b".wh..wh.plnk")
        + file(b".wh..wh.plnk/1.2", b"x" * 5000)
        + hardlink(b"a", b".wh..wh.plnk/1.2")
        + hardlink(b"b", b".wh..wh.plnk/3.4")
        + file(b".wh..wh.plnk/3.4", b"y")
        + hardlink(b".wh..wh.plnk/dangling", b"nowhere")
        + file(b"d/.wh..wh.tmp/z", b"z")
    )
    assert set(layer.summary()) == {b"/a", b"/b", b"/d"}
    assert (layer.content(b"/a"), layer.content(b"/b")) == (b"x" * 5000, b"y")
    assert layer.entries[b"/a"].nlink == 1


def test_symlinks_that_make_a_path_too_long() -> None:
    step, long = b"d/" * 1900, b"d/" * 15_000
    with pytest.raises(Unsupported, match="symlinks followed"):
        layer_of(pax([(b"linkpath", step)]) + symlink(b"s", b"") + pax([(b"path", b"s/" + long + b"f")]) + file(b"x"))


def test_root_entry_sets_the_roots_time_only() -> None:
    """containerd ignores the entry: a root of 0700 in somebody's build directory must not lock users out."""
    default = layer_of(file(b"a")).entries[b"/"]
    assert (default.mode, default.uid, default.gid, default.mtime_ns) == (0o40755, 0, 0, 0)
    root = layer_of(header(b"./", b"5", mode=0o1700, uid=1, gid=2, mtime=3) + file(b"a")).entries[b"/"]
    assert (root.mode, root.uid, root.gid, root.mtime_ns) == (0o40755, 0, 0, 3 * 10**9)


def test_implied_directories() -> None:
    tree = Tree()
    attributes = Attributes(0o700, 5, 5, 5)
    tree.add_file([b"a", b"b", b"c"], attributes, 0, 0)
    tree.add_dir([b"a"], attributes)
    assert list(tree.implied_dirs()) == [b"/a/b"]
    a = tree.root.children[b"a"]
    assert isinstance(a, Dir)
    b = a.children[b"b"]
    assert (a.mode, a.uid, b.mode, b.uid, b.mtime_ns) == (0o40700, 5, 0o40755, 0, 0)


def test_a_directory_that_replaces_one_below_is_not_implied() -> None:
    """Its whiteout, before or after it, says that it owes nothing to the directory below."""
    tree = Tree()
    attributes = Attributes(0o644, 0, 0, 0)
    tree.add_dir([], attributes)
    tree.add_whiteout([b".wh.a"], attributes)
    tree.add_file([b"a", b"f"], attributes, 0, 0)
    tree.add_file([b"b", b"f"], attributes, 0, 0)
    tree.add_whiteout([b".wh.b"], attributes)
    tree.add_file([b"c", b"f"], attributes, 0, 0)
    tree.add_opaque([b"c", b".wh..wh..opq"])
    assert list(tree.implied_dirs()) == [b"/c"]


def test_merged_directory_keeps_older_xattrs() -> None:
    archive = (
        pax([(b"SCHILY.xattr.user.a", b"1"), (b"SCHILY.xattr.user.b", b"1")])
        + directory(b"d", mode=0o700, uid=1)
        + pax([(b"SCHILY.xattr.user.b", b"2")])
        + directory(b"d", mode=0o711, uid=2)
    )
    entry = layer_of(archive).entries[b"/d"]
    assert (entry.mode, entry.uid, entry.xattrs) == (0o40711, 2, {b"user.a": b"1", b"user.b": b"2"})


def test_whiteout_has_the_owner_and_time_of_its_entry() -> None:
    entry = layer_of(file(b".wh.a", mode=0o644, uid=3, gid=4, mtime=5)).entries[b"/a"]
    assert (entry.mode, entry.rdev, entry.uid, entry.gid, entry.mtime_ns) == (0o20000, (0, 0), 3, 4, 5 * 10**9)


def test_hard_links_share_an_inode() -> None:
    archive = (
        file(b"a", b"1", mode=0o600, uid=1)
        + hardlink(b"d/b", b"a", mode=0o644, uid=2, mtime=9)
        + hardlink(b"c", b"d/b", mode=0o640, uid=3)
    )
    entries = layer_of(archive).entries
    a, b, c = entries[b"/a"], entries[b"/d/b"], entries[b"/c"]
    assert a.nid == b.nid == c.nid
    assert (a.nlink, a.mode, a.uid) == (3, 0o100640, 3)  # the last header's, as containerd does
    assert len({entry.nid for entry in entries.values()}) == 3


def test_link_count_after_a_name_is_gone() -> None:
    entries = layer_of(file(b"a", b"1") + hardlink(b"b", b"a") + hardlink(b"c", b"a") + file(b"b", b"2")).entries
    assert (entries[b"/a"].nlink, entries[b"/b"].nlink, entries[b"/c"].nlink) == (2, 1, 2)


def test_parent_cache_forgets_replaced_directories() -> None:
    archive = file(b"d/a", b"1") + file(b"d", b"2") + directory(b"d") + file(b"d/b", b"3")
    assert layer_of(archive).summary() == {b"/d": "dir", b"/d/b": b"3"}


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        (b"", []),
        (b"/", []),
        (b"./a//b/.", [b"a", b"b"]),
        (b"a/../../b", [b"b"]),
        (b"a/b/..", [b"a"]),
        (b"..a/b..", [b"..a", b"b.."]),
        (b"a/...", [b"a", b"..."]),
    ],
)
def test_clean_path(path: bytes, parts: list[bytes]) -> None:
    assert clean_path(path) == parts


@pytest.mark.parametrize(
    "xattrs",
    [
        {b"user." + b"n" * 251: b""},
        {b"user.": b"1"},
        {b"user.a": bytes(65536)},
        {b"system.posix_acl_access": b"nonsense"},
    ],
)
def test_xattrs_that_do_not_fit(xattrs: dict[bytes, bytes]) -> None:
    with pytest.raises(Unsupported):
        Tree().add_dir([b"d"], Attributes(0o755, 0, 0, 0, xattrs))
