"""The tar reader from one case list, three ways: whole, byte at a time, with bytes behind the end mark."""

import contextlib
import io
import os
import posixpath
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockindex.erofs import build_metadata, validate_metadata, walk
from blockindex.errors import Corrupt, Unsupported
from blockindex.model import BLOCK, Extent
from blockindex.tar import TarReader
from tests.blockindex.tarcases import (
    CAPABILITY,
    END,
    UUID,
    WAYS,
    base256,
    file,
    header,
    long_name,
    octal,
    padded,
    pax,
    read,
    unpack,
)

GNU = b"ustar  \0"
LONG = b"d/" * 60 + b"x" * 200

SPARSE_MAP = b"2\n3\n4\n20000\n5\n"
SPARSE_DATA = b"ABCDEFGHI"
SPARSE_FILE = b"\0" * 3 + b"ABCD" + b"\0" * 19993 + b"EFGHI" + b"\0" * 10
SPARSE_SIZE = len(SPARSE_FILE)


def old_sparse(entries: list[tuple[int, int]], real_size: int, data: bytes) -> bytes:
    """An old GNU sparse entry: 4 segments in the header, 21 in each extension record."""

    def pack(some: list[tuple[int, int]]) -> bytes:
        return b"".join(octal(offset, 12) + octal(size, 12) for offset, size in some)

    patches = {386: pack(entries[:4]), 482: bytes([len(entries) > 4]), 483: octal(real_size, 12)}
    out = header(b"sparse", b"S", len(data), magic=GNU, patches=patches)
    rest = entries[4:]
    while rest:
        out += pack(rest[:21]).ljust(504, b"\0") + bytes([len(rest) > 21]) + bytes(7)
        rest = rest[21:]
    return out + padded(data)


MANY = [(7000 * i, 10) for i in range(60)]
MANY_DATA = os.urandom(600)
MANY_FILE = b"".join((MANY_DATA[10 * i : 10 * i + 10]).ljust(7000, b"\0") for i in range(60))

CASES: dict[str, tuple[bytes, dict[bytes, object]]] = {
    "empty": (END, {}),
    "no end mark": (file(b"a", b"x"), {b"/a": b"x"}),
    "one zero record": (file(b"a", b"x") + bytes(512), {b"/a": b"x"}),
    "nothing at all": (b"", {}),
    "no padding": (header(b"a", size=3) + b"abc", {b"/a": b"abc"}),
    "files": (
        file(b"a", b"1" * 512) + file(b"b") + file(b"c", b"22") + END,
        {b"/a": b"1" * 512, b"/b": b"", b"/c": b"22"},
    ),
    "types": (
        header(b"d/", b"5", mode=0o755)
        + header(b"d/s", b"2", link=b"/else/where")
        + header(b"d/c", b"3", device=(1, 3))
        + header(b"d/b", b"4", device=(259, 70000))
        + header(b"d/f", b"6")
        + file(b"d/7", b"contiguous", typeflag=b"7")
        + END,
        {
            b"/d": "dir",
            b"/d/s": ("symlink", b"/else/where"),
            b"/d/c": ("char", 1, 3),
            b"/d/b": ("block", 259, 70000),
            b"/d/f": "fifo",
            b"/d/7": b"contiguous",
        },
    ),
    "types without payload whatever they claim": (
        header(b"d/", b"5", size=999) + header(b"s", b"2", size=999, link=b"t") + file(b"a", b"x") + END,
        {b"/d": "dir", b"/s": ("symlink", b"t"), b"/a": b"x"},
    ),
    "v7": (
        header(b"d/", b"\0", magic=b"") + file(b"d/a", b"x", typeflag=b"\0", magic=b"", prefix=b"not a prefix") + END,
        {b"/d": "dir", b"/d/a": b"x"},
    ),
    "ustar prefix": (
        file(b"name", b"x", prefix=b"some/dir") + END,
        {b"/some": "dir", b"/some/dir": "dir", b"/some/dir/name": b"x"},
    ),
    "star prefix ends early": (
        file(b"name", b"x", prefix=b"dir", patches={476: octal(1, 12), 488: octal(1, 12), 508: b"tar\0"}) + END,
        {b"/dir": "dir", b"/dir/name": b"x"},
    ),
    "gnu times are no prefix": (file(b"name", b"x", magic=GNU, patches={345: octal(5, 12)}) + END, {b"/name": b"x"}),
    "gnu header with a prefix": (
        file(b"name", b"x", magic=GNU, prefix=b"dir") + END,
        {b"/dir": "dir", b"/dir/name": b"x"},
    ),
    "name fills its field": (file(b"n" * 100, b"x") + END, {b"/" + b"n" * 100: b"x"}),
    "gnu long names": (
        long_name(LONG)
        + file(b"short", b"x")
        + long_name(LONG, b"K")
        + header(b"s", b"2", link=b"short", magic=GNU)
        + END,
        {b"/" + b"/".join([b"d"] * n): "dir" for n in range(1, 61)} | {b"/" + LONG: b"x", b"/s": ("symlink", LONG)},
    ),
    "pax path and linkpath": (
        pax([(b"path", b"new\nname=\xff"), (b"uname", b"nobody")])
        + file(b"old", b"x")
        + pax([(b"linkpath", b"t" * 300)])
        + header(b"s", b"2", link=b"t")
        + END,
        {b"/new\nname=\xff": b"x", b"/s": ("symlink", b"t" * 300)},
    ),
    "pax empty value keeps the header's": (pax([(b"path", b"")]) + file(b"a", b"x") + END, {b"/a": b"x"}),
    "pax size": (pax([(b"size", b"5")]) + header(b"a", size=0) + padded(b"12345") + END, {b"/a": b"12345"}),
    "pax applies once": (
        pax([(b"path", b"b")]) + file(b"a", b"x") + file(b"c", b"y") + END,
        {b"/b": b"x", b"/c": b"y"},
    ),
    "gnu name over pax path": (pax([(b"path", b"p")]) + long_name(b"g") + file(b"a", b"x") + END, {b"/g": b"x"}),
    "global header as git writes it": (
        pax([(b"path", b"pax_global_header"), (b"comment", b"0123abcd")], b"g") + file(b"a", b"x") + END,
        {b"/a": b"x"},
    ),
    "base-256 size": (header(b"a", size=base256(3, 12)) + padded(b"abc") + END, {b"/a": b"abc"}),
    "spaces around numbers": (
        header(b"a", size=b"       3 ", mode=b"  644 \0") + padded(b"abc") + END,
        {b"/a": b"abc"},
    ),
    "signed checksum": (header(b"\xe4\xf6", size=1, signed=True) + padded(b"x") + END, {b"/\xe4\xf6": b"x"}),
    "unsigned checksum": (header(b"\xe4\xf6", size=1) + padded(b"x") + END, {b"/\xe4\xf6": b"x"}),
    "hard link": (file(b"a", b"x") + header(b"b", b"1", link=b"./a") + END, {b"/a": b"x", b"/b": b"x"}),
    "hard link with a size but no payload": (
        file(b"a", b"x" * 600) + header(b"b", b"1", size=600, link=b"a") + file(b"c", b"y") + END,
        {b"/a": b"x" * 600, b"/b": b"x" * 600, b"/c": b"y"},
    ),
    "hard link with payload": (
        file(b"a", b"x" * 600) + header(b"b", b"1", size=600, link=b"a") + padded(b"x" * 600) + file(b"c", b"y") + END,
        {b"/a": b"x" * 600, b"/b": b"x" * 600, b"/c": b"y"},
    ),
    "hard link with payload of one record": (
        file(b"a", b"x" * 10) + header(b"b", b"1", size=10, link=b"a") + padded(b"x" * 10) + file(b"c", b"y") + END,
        {b"/a": b"x" * 10, b"/b": b"x" * 10, b"/c": b"y"},
    ),
    "hard link with a size at the end": (
        file(b"a", b"x") + header(b"b", b"1", size=1, link=b"a"),
        {b"/a": b"x", b"/b": b"x"},
    ),
    "payload of whiteouts is passed over": (
        file(b".wh.gone", b"z" * 700) + file(b".wh..wh.aufs", b"z" * 700) + file(b"a", b"x") + END,
        {b"/gone": "whiteout", b"/a": b"x"},
    ),
    "old sparse": (
        old_sparse([(3, 4), (20000, 5)], SPARSE_SIZE, SPARSE_DATA) + file(b"a", b"x") + END,
        {b"/sparse": SPARSE_FILE, b"/a": b"x"},
    ),
    "old sparse with extensions": (
        old_sparse(MANY, len(MANY_FILE), MANY_DATA) + file(b"a", b"x") + END,
        {b"/sparse": MANY_FILE, b"/a": b"x"},
    ),
    "pax sparse 0.0": (
        pax(
            [
                (b"GNU.sparse.size", b"%d" % SPARSE_SIZE),
                (b"GNU.sparse.numblocks", b"2"),
                (b"GNU.sparse.offset", b"3"),
                (b"GNU.sparse.numbytes", b"4"),
                (b"GNU.sparse.offset", b"20000"),
                (b"GNU.sparse.numbytes", b"5"),
            ]
        )
        + file(b"sparse", SPARSE_DATA)
        + file(b"a", b"x")
        + END,
        {b"/sparse": SPARSE_FILE, b"/a": b"x"},
    ),
    "pax sparse 0.1": (
        pax(
            [
                (b"GNU.sparse.name", b"sparse"),
                (b"GNU.sparse.size", b"%d" % SPARSE_SIZE),
                (b"GNU.sparse.numblocks", b"2"),
                (b"GNU.sparse.map", b"3,4,20000,5"),
            ]
        )
        + file(b"GNUSparseFile.1/sparse", SPARSE_DATA)
        + file(b"a", b"x")
        + END,
        {b"/sparse": SPARSE_FILE, b"/a": b"x"},
    ),
    "pax sparse 1.0": (
        pax(
            [
                (b"GNU.sparse.major", b"1"),
                (b"GNU.sparse.minor", b"0"),
                (b"GNU.sparse.name", b"sparse"),
                (b"GNU.sparse.realsize", b"%d" % SPARSE_SIZE),
            ]
        )
        + file(b"GNUSparseFile.1/sparse", padded(SPARSE_MAP) + SPARSE_DATA)
        + file(b"a", b"x")
        + END,
        {b"/sparse": SPARSE_FILE, b"/a": b"x"},
    ),
    "pax sparse 1.0, map of several records": (
        pax(
            [
                (b"GNU.sparse.major", b"1"),
                (b"GNU.sparse.minor", b"0"),
                (b"GNU.sparse.name", b"sparse"),
                (b"GNU.sparse.realsize", b"%d" % len(MANY_FILE)),
            ]
        )
        + file(b"x", padded(b"60\n" + b"".join(b"%d\n%d\n" % part for part in MANY)) + MANY_DATA)
        + END,
        {b"/sparse": MANY_FILE},
    ),
    "sparse file that is all hole": (
        old_sparse([(9000, 0)], 9000, b"") + file(b"a", b"x") + END,
        {b"/sparse": bytes(9000), b"/a": b"x"},
    ),
}

CORRUPT: dict[str, tuple[bytes, str]] = {
    "flipped bit": (b"\1" + file(b"a", b"x")[1:], "tar header"),
    "rubbish": (b"hello world" * 100, "tar header"),
    "bad size": (header(b"a", size=b"12x"), "tar header"),
    "octal 8": (header(b"a", mode=b"0000888\0"), "tar header"),
    "negative size": (header(b"a", size=base256(-3, 12)), "tar header"),
    "huge size": (header(b"a", size=base256(1 << 70, 12)), "tar header"),
    "cut header": (file(b"a", b"x") + header(b"b")[:300], "tar stream"),
    "cut payload": (header(b"a", size=700) + b"x" * 600, "tar stream"),
    "cut pax": (pax([(b"path", b"b")])[:700], "tar stream"),
    "cut after pax": (pax([(b"path", b"b")]), "tar stream"),
    "cut after long name": (long_name(b"b"), "tar stream"),
    "cut sparse": (old_sparse(MANY, len(MANY_FILE), MANY_DATA)[:700], "tar stream"),
    "lone zero record": (bytes(512) + file(b"a", b"x"), "tar stream"),
    "pax length": (header(b"p", b"x", 9) + padded(b"99 path=a") + file(b"a"), "PAX record"),
    "pax no length": (header(b"p", b"x", 9) + padded(b"xx path=a") + file(b"a"), "PAX record"),
    "pax no equals": (header(b"p", b"x", 8) + padded(b"8 patha\n") + file(b"a"), "PAX record"),
    "pax NUL in path": (pax([(b"path", b"a\0b")]) + file(b"a"), "PAX record"),
    "pax bad uid": (pax([(b"uid", b"12_3")]) + file(b"a"), "PAX record"),
    "pax bad mtime": (pax([(b"mtime", b"12.x")]) + file(b"a"), "PAX record"),
    "sparse overlaps": (old_sparse([(5, 4), (8, 5)], 99, SPARSE_DATA), "sparse map"),
    "sparse leaves the file": (old_sparse([(5, 4), (98, 5)], 99, SPARSE_DATA), "sparse map"),
    "sparse payload too long": (old_sparse([(5, 4)], 99, SPARSE_DATA), "sparse map"),
    "sparse of negative size": (
        header(b"a", b"S", magic=GNU, patches={483: base256(-5, 12)}) + END,
        "sparse map",
    ),
    "sparse 1.0 map too long": (
        pax([(b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0"), (b"GNU.sparse.realsize", b"9")])
        + file(b"a", padded(b"9\n"))
        + file(b"b", b"x" * 9000),
        "sparse map",
    ),
    "hard link to nothing": (header(b"b", b"1", link=b"a") + END, "hard link"),
    "symlink to nothing": (header(b"b", b"2") + END, "symlink"),
}

UNSUPPORTED: dict[str, bytes] = {
    "multi-volume": header(b"a", b"M"),
    "volume label": header(b"a", b"V"),
    "dump directory": header(b"a", b"D"),
    "unknown type, whiteout's name": header(b".wh.a", b"Q", 700),
    "long path": long_name(b"d/" * 16384 + b"f") + file(b"a"),
    "long path of a global header": pax([(b"path", b"d/" * 16384 + b"f")], b"g") + file(b"a"),
    "long name": long_name(b"n" * 256) + file(b"a"),
    "long target": long_name(b"n" * 4096, b"K") + header(b"a", b"2"),
    "huge pax": header(b"a", b"x", 2 << 20),
    "huge file": header(b"a", size=base256(1 << 45, 12)),
    "device number": header(b"a", b"3", device=(4096, 1)),
}


# What follows is only ignored behind an end mark.
RUNS = [
    (name, way) for name, (archive, _) in CASES.items() for way in WAYS if way != "trailing" or archive.endswith(END)
]


@pytest.mark.parametrize(("name", "way"), RUNS)
def test_case(name: str, way: str) -> None:
    archive, expected = CASES[name]
    layer = unpack(archive, way)
    summary = layer.summary()
    for path, want in expected.items():
        entry = layer.entries[path]
        assert (layer.content(path) if isinstance(want, bytes) and entry.target is None else summary[path]) == want
    assert summary.keys() == expected.keys()


@pytest.mark.parametrize("way", ["whole", "bytewise"])
@pytest.mark.parametrize("name", CORRUPT)
def test_corrupt(name: str, way: str) -> None:
    archive, field = CORRUPT[name]
    with pytest.raises(Corrupt) as caught:
        read(archive, way)[0].finish()
    assert caught.value.field == field


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported(name: str) -> None:
    with pytest.raises(Unsupported):
        read(UNSUPPORTED[name] + END)[0].finish()


def test_offsets_follow_the_archive() -> None:
    archive = file(b"a", b"1" * 5000) + file(b"none") + file(b"b", b"2") + file(b"a", b"3") + END
    layer = unpack(archive)
    assert layer.extents == [
        Extent(512, 0, 5000),
        Extent(512 + 5120 + 512 + 512, 2 * BLOCK, 1),
        Extent(512 + 5120 + 512 + 512 + 512 + 512, 3 * BLOCK, 1),
    ]
    assert layer.entries[b"/a"].data_offset == 3 * BLOCK  # the last one wins
    assert layer.entries[b"/none"].data_offset is None


def test_extents_come_with_their_header() -> None:
    reader = TarReader()
    archive = file(b"a", b"1" * 1000) + file(b"b", b"2")
    assert reader.feed(archive[:511]) == []
    assert reader.feed(archive[511:512]) == [Extent(512, 0, 1000)]
    assert (reader.data_size, reader.ended) == (BLOCK, False)
    assert reader.feed(archive[512:] + END) == [Extent(2048, BLOCK, 1)]
    assert (reader.data_size, reader.ended) == (2 * BLOCK, True)


# Those marked need no root: the mark keeps their seconds out of the quick runs.
@pytest.mark.parametrize(
    "name",
    [
        "v7",
        *(
            pytest.param(name, marks=pytest.mark.system)
            for name in ("types", "gnu long names", "old sparse with extensions", "pax sparse 1.0")
        ),
    ],
)
def test_a_cut_at_every_byte(name: str) -> None:
    """A cut archive is refused, or was cut where an entry ends: then it holds the entries before the cut."""
    archive, _ = CASES[name]
    whole = unpack(archive).summary()
    for cut in range(len(archive)):
        try:
            part = unpack(archive[:cut])
        except Corrupt as error:
            assert error.field in ("tar stream", "hard link")
            continue
        assert part.summary().items() <= whole.items()


def test_files_beyond_4_gib() -> None:
    """Sizes, tar offsets and data offsets of more than 32 bits; payload is passed over, so this costs nothing."""
    size = 5 << 30
    reader = TarReader()
    sparse_map = b"%d,4,%d,5" % (1 << 40, 3 << 40)
    records = [(b"GNU.sparse.size", b"%d" % (4 << 40)), (b"GNU.sparse.map", sparse_map)]
    sparse = pax(records) + file(b"sparse", SPARSE_DATA)
    extents = reader.feed(sparse + header(b"big", size=size))
    zeros = memoryview(bytes(1 << 26))
    for _ in range(size >> 26):
        extents += reader.feed(zeros)
    extents += reader.feed(pax([(b"size", b"%d" % size)]) + header(b"after", size=0))
    for _ in range(size >> 26):
        extents += reader.feed(zeros)
    extents += reader.feed(file(b"last", b"x") + END)
    tree = reader.finish()
    start = len(sparse) + 512
    assert extents[2:] == [
        Extent(start, 4 << 40, size),
        Extent(start + size + 3 * 512, (4 << 40) + size, size),
        Extent(start + 2 * size + 4 * 512, (4 << 40) + 2 * size, 1),
    ]
    assert [extent.data_offset for extent in extents[:2]] == [1 << 40, 3 << 40]
    metadata = build_metadata(tree, reader.data_size, UUID)
    validate_metadata(metadata, reader.data_size)
    sizes = {entry.path: entry.size for entry in walk(metadata)}
    assert (sizes[b"/sparse"], sizes[b"/big"], sizes[b"/after"]) == (4 << 40, size, size)


def test_numbers_at_their_limits() -> None:
    """Owners up to 2^32 - 2, times from before 1970 to after 2106, names of 255 bytes, paths of 4095."""
    deep = b"/".join([b"d" * 255] * 15 + [b"e" * 254])
    assert len(b"/" + deep) == 4095
    archive = (
        file(b"owner", uid=base256(2**32 - 2, 8), gid=base256(2**32 - 2, 8))
        + file(b"before", mtime=base256(-(2**40), 12))
        + file(b"after", mtime=base256(2**40, 12))
        + pax([(b"mtime", b"-0.000000001")])
        + file(b"just-before")
        + pax([(b"path", deep)])
        + file(b"deep", b"x")
        + END
    )
    entries = unpack(archive).entries
    assert (entries[b"/owner"].uid, entries[b"/owner"].gid) == (2**32 - 2, 2**32 - 2)
    times = [entries[path].mtime_ns for path in (b"/before", b"/after", b"/just-before")]
    assert times == [-(2**40) * 10**9, 2**40 * 10**9, -1]
    assert entries[b"/" + deep].size == 1


def test_sparse_extents() -> None:
    archive, _ = CASES["pax sparse 1.0"]
    first, second, third = unpack(archive).extents
    assert (first.data_offset, first.size, second.data_offset, second.size) == (3, 4, 20000, 5)
    assert second.tar_offset == first.tar_offset + 4
    assert third.data_offset == 5 * BLOCK  # holes take room in the region


def test_neighbouring_segments_are_joined() -> None:
    layer = unpack(old_sparse([(0, 4), (4, 5)], 9, SPARSE_DATA) + END)
    assert [extent.size for extent in layer.extents] == [9]


def test_attributes() -> None:
    archive = (
        header(b"a", mode=0o106755, uid=base256(3_000_000, 8), gid=7, mtime=1234567890)
        + pax([(b"uid", b"4294967294"), (b"gid", b"65536"), (b"mtime", b"-1.5"), (b"atime", b"7")])
        + header(b"b", mode=0o1777)
        + pax([(b"mtime", b"1700000000.123456789123")])
        + header(b"c")
        + header(b"d", mtime=base256(-86400, 12))
        + header(b"s", b"2", link=b"x", mode=0o600)
        + END
    )
    entries = unpack(archive).entries
    a, b = entries[b"/a"], entries[b"/b"]
    assert (a.mode, a.uid, a.gid, a.mtime_ns) == (0o106755, 3_000_000, 7, 1234567890 * 10**9)
    assert (b.mode, b.uid, b.gid, b.mtime_ns) == (0o101777, 4294967294, 65536, -1_500_000_000)
    assert entries[b"/c"].mtime_ns == 1_700_000_000_123_456_789
    assert entries[b"/d"].mtime_ns == -86400 * 10**9
    assert entries[b"/s"].mode == 0o120777


def test_xattrs_are_raw_bytes() -> None:
    value = b"=\0\n\xff=12 path=evil\n"
    archive = (
        pax(
            [
                (b"SCHILY.xattr.user.x", value),
                (b"SCHILY.xattr.user.empty", b""),
                (b"SCHILY.xattr.security.capability", CAPABILITY),
                (b"SCHILY.xattr.unknown.name", b"dropped"),
                (b"SCHILY.xattr.trusted.overlay.redirect", b"dropped"),
                (b"LIBARCHIVE.xattr.user.x", b"YQ=="),
            ]
        )
        + file(b"a", b"x")
        + pax([(b"SCHILY.xattr.user.x", b"dropped"), (b"SCHILY.xattr.security.x", b"kept")])
        + header(b"s", b"2", link=b"a")
        + END
    )
    entries = unpack(archive).entries
    assert entries[b"/a"].xattrs == {b"user.x": value, b"user.empty": b"", b"security.capability": CAPABILITY}
    assert entries[b"/s"].xattrs == {b"security.x": b"kept"}


names = st.lists(st.text("ab.\u00e4", min_size=1, max_size=120), min_size=1, max_size=5).map("/".join)
members = st.lists(
    st.tuples(names, st.sampled_from(["file", "dir", "symlink"]), st.integers(0, 3 * BLOCK), st.integers(0, 2**33)),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(members, st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]), st.integers(1, 2000))
def test_reads_what_pythons_tarfile_writes(
    members: list[tuple[str, str, int, int]], tar_format: int, step: int
) -> None:
    """Extents and sizes of every file entry are those that Python's reader finds, however the stream is cut."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as tar:
        for index, (name, kind, size, mtime) in enumerate(members):
            info = tarfile.TarInfo(f"{index}/{name}")
            info.mtime = mtime
            info.type = {"file": tarfile.REGTYPE, "dir": tarfile.DIRTYPE, "symlink": tarfile.SYMTYPE}[kind]
            if kind == "symlink":
                info.linkname = name[::-1]
            info.size = size if kind == "file" else 0
            tar.addfile(info, io.BytesIO(os.urandom(size)))
    archive = buffer.getvalue()
    reader = TarReader()
    extents = [
        extent for start in range(0, len(archive), step) for extent in reader.feed(archive[start : start + step])
    ]
    reader.finish()
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        files = [info for info in tar if info.isreg() and info.size]
    # what resolves to the root is left out, as containerd does
    wanted = [(info.offset_data, info.size) for info in files if posixpath.normpath(f"/{info.name}") != "/"]
    assert [(extent.tar_offset, extent.size) for extent in extents] == wanted


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(CASES)), st.data())
def test_damage_raises_nothing_else(name: str, data: st.DataObject) -> None:
    archive = bytearray(CASES[name][0] or END)
    for _ in range(data.draw(st.integers(1, 4))):
        archive[data.draw(st.integers(0, len(archive) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(Corrupt, Unsupported):
        reader, _ = read(bytes(archive))
        tree = reader.finish()
        validate_metadata(build_metadata(tree, reader.data_size, UUID), reader.data_size)
