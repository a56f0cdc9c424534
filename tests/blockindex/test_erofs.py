"""EROFS metadata: the writer's layout, the validator's judgement, the reader's answers; no kernel needed."""

import random
import struct
from collections.abc import Callable

import pytest

from blockindex.erofs import build_metadata, validate_metadata, walk
from blockindex.erofs.ondisk import INODE, SUPERBLOCK_OFFSET, checksum
from blockindex.errors import Corrupt, Unsupported
from blockindex.model import BLOCK
from blockindex.tree import Attributes, Dir, Tree
from tests.blockindex.tarcases import END, UUID, Layer, file, header, pax, unpack

PLAIN = Attributes(0o644, 0, 0, 0)
FIELD_OFFSETS = {
    "i_format": (0, "<H"),
    "i_xattr_icount": (2, "<H"),
    "i_mode": (4, "<H"),
    "i_reserved": (6, "<H"),
    "i_size": (8, "<Q"),
    "i_u": (16, "<I"),
    "i_ino": (20, "<I"),
    "i_uid": (24, "<I"),
    "i_mtime_nsec": (40, "<I"),
    "i_nlink": (44, "<I"),
}


def small_layer() -> Layer:
    return unpack(
        header(b"d/", b"5", mode=0o755)
        + header(b"d/e/", b"5", mode=0o755)
        + pax([(b"SCHILY.xattr.user.a", b"1"), (b"SCHILY.xattr.user.b", b"22")])
        + file(b"d/a", b"x" * 5000, mtime=7)
        + file(b"d/b", b"y")
        + header(b"d/c", b"1", link=b"d/b")
        + header(b"d/s", b"2", link=b"target")
        + header(b"d/dev", b"3", device=(1, 3))
        + header(b"d/fifo", b"6")
        + file(b"d/none")
        + END
    )


def patched(metadata: bytes, patches: list[tuple[int, bytes]]) -> bytes:
    """`metadata` with bytes written over it and a right checksum: a lie, not damage."""
    out = bytearray(metadata)
    for offset, data in patches:
        out[offset : offset + len(data)] = data
    out[SUPERBLOCK_OFFSET + 4 : SUPERBLOCK_OFFSET + 8] = checksum(bytes(out[:BLOCK])).to_bytes(4, "little")
    return bytes(out)


def inode_lie(path: bytes, field: str, value: int) -> Callable[[Layer], bytes]:
    def lie(layer: Layer) -> bytes:
        offset, code = FIELD_OFFSETS[field]
        place = layer.entries[path].nid * 32 + offset
        return patched(layer.metadata, [(place, struct.pack(code, value))])

    return lie


def dirent_lie(name: bytes, offset: int, data: bytes) -> Callable[[Layer], bytes]:
    """Write `data` at `offset` of the dirent called `name` in the directory /d."""

    def lie(layer: Layer) -> bytes:
        start = layer.entries[b"/d"].nid * 32 + INODE.size
        names = sorted(path[3:] for path in layer.entries if path.startswith(b"/d/"))
        index = sorted([*names, b".", b".."]).index(name)
        return patched(layer.metadata, [(start + 12 * index + offset, data)])

    return lie


def superblock_lie(offset: int, data: bytes) -> Callable[[Layer], bytes]:
    return lambda layer: patched(layer.metadata, [(SUPERBLOCK_OFFSET + offset, data)])


def text_lie(old: bytes, new: bytes) -> Callable[[Layer], bytes]:
    return lambda layer: patched(layer.metadata, [(layer.metadata.index(old), new)])


def nid_of(path: bytes, target: bytes) -> Callable[[Layer], bytes]:
    """The dirent of `path` in /d leads to the inode of `target`."""
    return lambda layer: dirent_lie(path, 0, layer.entries[target].nid.to_bytes(8, "little"))(layer)


LIES: dict[str, tuple[Callable[[Layer], bytes], str]] = {
    "size 2^63 - 1": (inode_lie(b"/d/a", "i_size", 2**63 - 1), "i_size"),
    "size 2^64 - 1": (inode_lie(b"/d/a", "i_size", 2**64 - 1), "i_size"),
    "size one block too long": (inode_lie(b"/d/b", "i_size", BLOCK + 1), "i_size"),
    "size runs into the next file": (inode_lie(b"/d/a", "i_size", 2 * BLOCK + 1), "raw_blkaddr"),
    "directory size 2^63 - 1": (inode_lie(b"/d", "i_size", 2**63 - 1), "i_size"),
    "directory size 0": (inode_lie(b"/d", "i_size", 0), "i_size"),
    "symlink size 0": (inode_lie(b"/d/s", "i_size", 0), "i_size"),
    "symlink size 2^63 - 1": (inode_lie(b"/d/s", "i_size", 2**63 - 1), "i_size"),
    "device with a size": (inode_lie(b"/d/dev", "i_size", 1), "i_size"),
    "start block behind the region": (inode_lie(b"/d/b", "i_u", 4), "raw_blkaddr"),
    "start block in the metadata": (inode_lie(b"/d/b", "i_u", 0), "raw_blkaddr"),
    "start block 2^32 - 1": (inode_lie(b"/d/b", "i_u", 2**32 - 1), "raw_blkaddr"),
    "start block of another file": (inode_lie(b"/d/b", "i_u", 1), "raw_blkaddr"),
    "empty file with a start block": (inode_lie(b"/d/none", "i_u", 1), "raw_blkaddr"),
    "compact inode": (inode_lie(b"/d/a", "i_format", 0), "i_format"),
    "compressed inode": (inode_lie(b"/d/a", "i_format", 3), "i_format"),
    "chunk inode": (inode_lie(b"/d/a", "i_format", 9), "i_format"),
    "inline file": (inode_lie(b"/d/b", "i_format", 5), "i_format"),
    "regular file as a directory": (inode_lie(b"/d/a", "i_mode", 0o40755), "i_mode"),
    "mode without type": (inode_lie(b"/d/a", "i_mode", 0o644), "i_mode"),
    "48-bit block address": (inode_lie(b"/d/a", "i_reserved", 1), "i_reserved"),
    "nanoseconds": (inode_lie(b"/d/a", "i_mtime_nsec", 10**9), "i_mtime_nsec"),
    "uid -1": (inode_lie(b"/d/a", "i_uid", 2**32 - 1), "i_uid"),
    "too many links": (inode_lie(b"/d/b", "i_nlink", 3), "i_nlink"),
    "no links": (inode_lie(b"/d/a", "i_nlink", 0), "i_nlink"),
    "directory links": (inode_lie(b"/d", "i_nlink", 2), "i_nlink"),
    "ino 0": (inode_lie(b"/d/a", "i_ino", 0), "i_ino"),
    "xattrs out of bounds": (inode_lie(b"/d/a", "i_xattr_icount", 0xFFFF), "i_xattr_icount"),
    "empty xattrs": (inode_lie(b"/d/a", "i_xattr_icount", 1), "i_xattr_icount"),
    "xattr prefix unknown": (text_lie(b"\1\1\1\0a1", b"\1\5"), "xattr entry"),
    "xattr value too long": (text_lie(b"\1\1\2\0b22", b"\1\1\xff\xff"), "xattr entry"),
    "xattrs not sorted": (text_lie(b"\1\1\1\0a1", b"\1\1\1\0c1"), "xattr entry"),
    "NUL in a target": (text_lie(b"target", b"tar\0et"), "symlink"),
    "dirent nid outside": (dirent_lie(b"a", 0, (2**40).to_bytes(8, "little")), "dirent nid"),
    "dirent nid 2^64 - 1": (dirent_lie(b"a", 0, b"\xff" * 8), "dirent nid"),
    "dirent nid of the superblock": (dirent_lie(b"a", 0, (32).to_bytes(8, "little")), "dirent nid"),
    "loop of directories": (nid_of(b"e", b"/d"), "dirent nid"),
    "loop to the root": (nid_of(b"e", b"/"), "dirent nid"),
    "dot leads elsewhere": (nid_of(b".", b"/"), "dirent nid"),
    "dotdot leads elsewhere": (nid_of(b"..", b"/d"), "dirent nid"),
    "dirent of another type": (dirent_lie(b"a", 10, b"\7"), "i_mode"),
    "dirent type unknown": (dirent_lie(b"a", 10, b"\6"), "dirent"),
    "dirent reserved": (dirent_lie(b"a", 11, b"\1"), "dirent"),
    "nameoff out of bounds": (dirent_lie(b"a", 8, b"\xff\xff"), "nameoff"),
    "nameoff 0": (dirent_lie(b"a", 8, b"\0\0"), "nameoff"),
    "first nameoff out of bounds": (dirent_lie(b".", 8, b"\xfc\xff"), "nameoff"),
    "first nameoff odd": (dirent_lie(b".", 8, b"\x0d\0"), "nameoff"),
    "names not sorted": (text_lie(b"...abcdev", b"...bacdev"), "dirent name"),
    "name twice": (text_lie(b"...abcdev", b"...aacdev"), "dirent name"),
    "slash in a name": (text_lie(b"...abcdev", b"...abc/ev"), "dirent"),
    "NUL in a name": (text_lie(b"...abcdev", b"...abc\0ev"), "dirent"),
    "magic": (superblock_lie(0, b"x"), "magic"),
    "unknown compatible feature": (superblock_lie(8, b"\x07"), "feature_compat"),
    "block size": (superblock_lie(12, b"\x09"), "blkszbits"),
    "superblock slots": (superblock_lie(13, b"\x01"), "sb_extslots"),
    "root nid outside": (superblock_lie(14, b"\xff\xff"), "dirent nid"),
    "root nid odd": (superblock_lie(14, b"\x25\0"), "i_mode"),
    "inode count": (superblock_lie(16, b"\xff"), "inos"),
    "blocks": (superblock_lie(36, b"\xff"), "blocks"),
    "metadata elsewhere": (superblock_lie(40, b"\x01"), "meta_blkaddr"),
    "shared xattrs": (superblock_lie(44, b"\x01"), "xattr_blkaddr"),
    "unknown incompatible feature": (superblock_lie(80, b"\0\0\0\x80"), "feature_incompat"),
    "compression feature": (superblock_lie(80, b"\x02"), "feature_incompat"),
    "device table": (superblock_lie(86, b"\x01"), "devices"),
    "packed inode": (superblock_lie(96, b"\x01"), "reserved"),
    "boot area": (lambda layer: patched(layer.metadata, [(0, b"x")]), "boot area"),
    "checksum": (lambda layer: layer.metadata[:1028] + bytes(4) + layer.metadata[1032:], "checksum"),
    "half a block": (lambda layer: layer.metadata[:-1], "metadata"),
    "nothing": (lambda layer: b"", "metadata"),
}


@pytest.mark.parametrize("name", LIES)
def test_lie_is_rejected(name: str) -> None:
    lie, field = LIES[name]
    layer = small_layer()
    with pytest.raises(Corrupt) as caught:
        validate_metadata(lie(layer), len(layer.data))
    assert field in caught.value.field
    assert name in ("half a block", "nothing") or caught.value.offset >= 0


def test_wrong_data_size_is_rejected() -> None:
    layer = small_layer()
    for size in (0, BLOCK, len(layer.data) + BLOCK, len(layer.data) - 1, -BLOCK):
        with pytest.raises(Corrupt):
            validate_metadata(layer.metadata, size)


def test_directory_in_blocks_lies() -> None:
    """Lies about what only large directories have: whole blocks, and padding between them."""
    layer = unpack(b"".join(file(b"%0100d" % index) for index in range(100)) + END)
    root = layer.entries[b"/"].nid * 32
    start = struct.unpack_from("<I", layer.metadata, root + 16)[0]
    names_end = layer.metadata.rindex(b"%0100d" % 34) + 100
    assert names_end < (start + 1) * BLOCK < len(layer.metadata)
    for patch, field in (
        ((root + 16, struct.pack("<I", 2**31)), "raw_blkaddr"),
        ((root + 16, struct.pack("<I", 0)), "nameoff"),
        ((names_end + 1, b"x"), "dirent"),
        ((start * BLOCK + BLOCK + 8, b"\0"), "nameoff"),
    ):
        with pytest.raises(Corrupt) as caught:
            validate_metadata(patched(layer.metadata, [patch]), len(layer.data))
        assert field in caught.value.field


def test_mutants_are_rejected_or_harmless() -> None:
    """700 images with flipped bits (and a right checksum, so that it is not what rejects them)."""
    layer = small_layer()
    rng = random.Random(7)
    used = max(entry.nid for entry in layer.entries.values()) * 32 + 128
    accepted = 0
    for _ in range(700):
        flips = [rng.randrange(SUPERBLOCK_OFFSET, used) for _ in range(rng.choice((1, 1, 1, 2, 8)))]
        mutant = patched(layer.metadata, [(at, bytes([layer.metadata[at] ^ 1 << rng.randrange(8)])) for at in flips])
        try:
            validate_metadata(mutant, len(layer.data))
        except Corrupt:
            continue
        accepted += 1
        names = 0
        for entry in walk(mutant):
            names += 1
            end = (entry.data_offset or 0) + (entry.size if entry.data_offset is not None else 0)
            assert 0 <= (entry.data_offset or 0) <= end <= len(layer.data)
        assert names == len(layer.entries)
    assert 0 < accepted < 525  # owners, times, names and the like may change


def test_walk_raises_only_corrupt() -> None:
    layer = small_layer()
    rng = random.Random(8)
    for _ in range(700):
        flips = [rng.randrange(SUPERBLOCK_OFFSET, BLOCK) for _ in range(8)]
        try:
            for _ in walk(patched(layer.metadata, [(at, bytes([rng.randrange(256)])) for at in flips])):
                pass
        except Corrupt:
            pass


def test_same_tree_same_bytes() -> None:
    assert small_layer().metadata == small_layer().metadata


def test_uuid_is_in_the_superblock() -> None:
    assert small_layer().metadata[SUPERBLOCK_OFFSET + 48 :][:16] == UUID


def test_checksum_is_crc32c() -> None:
    # RFC 3720's all-zero example, here behind a superblock offset: 32 zeros and a checksum field among them.
    block = bytes(SUPERBLOCK_OFFSET + 32)
    assert checksum(block) ^ 0xFFFFFFFF == 0x8A9136AA


def test_walk_is_in_order() -> None:
    paths = [entry.path for entry in walk(small_layer().metadata)]
    names = (b"/a", b"/b", b"/c", b"/dev", b"/e", b"/fifo", b"/none", b"/s")
    assert paths == [b"/", b"/d", *(b"/d" + name for name in names)]


@pytest.mark.parametrize("name_size", [1, 3, 100, 255])
@pytest.mark.parametrize("count", [0, 1, 14, 15, 16, 33, 341, 342, 1000])
def test_directories_of_any_size(name_size: int, count: int) -> None:
    if count > 200**name_size:
        count = 200
    tree = Tree()
    names = [
        b"%0*x" % (name_size, index) if name_size > 2 else bytes([index + 48]) for index in range(min(count, 2**12))
    ]
    for name in names:
        tree.add_file([b"d", name], PLAIN, 0, 0)
    metadata = build_metadata(tree, 0, UUID)
    validate_metadata(metadata, 0)
    assert [entry.path for entry in walk(metadata)][2:] == [b"/d/" + name for name in sorted(names)]


@pytest.mark.parametrize("size", [0, 1, 4000, 4008, 4009, 4010, 4020, 4032, 4033, 5000, 65535])
def test_xattrs_of_any_size(size: int) -> None:
    """Around a block, next to directory tails and symlink targets, which then need blocks of their own."""
    tree = Tree()
    xattrs = {b"security.a": bytes(size), b"security.b": b"b"}
    attributes = PLAIN._replace(xattrs=xattrs)
    tree.add_symlink([b"s"], attributes, b"t" * 50)
    tree.add_dir([b"d"], attributes)
    tree.add_file([b"d", b"f"], attributes, 5, 0)
    tree.add_file([b"g"], PLAIN, 5, BLOCK)
    metadata = build_metadata(tree, 2 * BLOCK, UUID)
    validate_metadata(metadata, 2 * BLOCK)
    entries = {entry.path: entry for entry in walk(metadata)}
    assert all(entries[path].xattrs == xattrs for path in (b"/s", b"/d", b"/d/f"))
    assert (entries[b"/s"].target, entries[b"/g"].data_offset) == (b"t" * 50, BLOCK)


def test_long_symlink() -> None:
    tree = Tree()
    for size in (4031, 4032, 4033, 4095):
        tree.add_symlink([b"%d" % size], PLAIN, b"t" * size)
    metadata = build_metadata(tree, 0, UUID)
    validate_metadata(metadata, 0)
    targets = [entry.target for entry in walk(metadata)][1:]
    assert [len(target or b"") for target in targets] == [4031, 4032, 4033, 4095]


def test_too_many_xattrs() -> None:
    tree = Tree()
    tree.add_dir([b"d"], PLAIN._replace(xattrs={b"user.%d" % index: bytes(60000) for index in range(5)}))
    with pytest.raises(Unsupported):
        build_metadata(tree, 0, UUID)


def test_image_too_large() -> None:
    build_metadata(Tree(), (2**32 - 2) * BLOCK, UUID)
    with pytest.raises(Unsupported):
        build_metadata(Tree(), (2**32 - 1) * BLOCK, UUID)


@pytest.mark.system  # needs no root: the mark keeps its 5 s out of the quick runs
def test_100_000_entries_in_one_directory() -> None:
    tree = Tree()
    for number in range(100_000):
        tree.add_file([b"d", b"file-%06d" % (number * 7919 % 100_000)], PLAIN, number % 3, number * BLOCK)
    data_size = 100_000 * BLOCK
    metadata = build_metadata(tree, data_size, UUID)
    validate_metadata(metadata, data_size)
    names = [entry.path for entry in walk(metadata)][2:]
    assert names == [b"/d/file-%06d" % number for number in range(100_000)]


def test_deep_tree() -> None:
    layer = unpack(pax([(b"path", b"d/" * 2000 + b"f")]) + file(b"x", b"1") + END)
    assert layer.content(b"/" + b"d/" * 2000 + b"f") == b"1"


def test_walk_does_not_follow_endless_paths() -> None:
    tree = Tree()
    parts = [b"d" * 200] * 400
    directory = tree.root
    for part in parts:
        directory.children[part] = child = Dir(0o40755, 0, 0, 0, None)
        directory = child
    metadata = build_metadata(tree, 0, UUID)
    validate_metadata(metadata, 0)
    with pytest.raises(Corrupt):
        list(walk(metadata))


def test_gaps_are_filled() -> None:
    """Metadata stays near the sum of its parts: 64 bytes an inode, 12 and its name a dirent."""
    tree = Tree()
    for index in range(200):
        for child in range(30):
            tree.add_file([b"directory%03d" % index, b"some-file-%02d" % child], PLAIN, 0, 0)
    needed = 200 * (64 + 12 + 12 + 27 + 30 * (64 + 12 + 12))
    assert len(build_metadata(tree, 0, UUID)) < 1.03 * needed + BLOCK
