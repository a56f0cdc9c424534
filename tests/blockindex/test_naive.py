"""The golden index, read by the naive decoder: docs/format.md says enough to write one, and blockindex obeys it."""

import gzip
import hashlib
import io
import stat
import tarfile
from decimal import Decimal
from pathlib import Path

import pytest

from blockindex.codec import encode_index
from tests.blockindex.layers import BLOBS, archive, build
from tests.blockindex.naive import BLOCK, Index, read_index, read_span, read_tree

GOLDEN = Path(__file__).parent / "golden-v1.bsi"
LAYER = (Path(__file__).parent / "golden-v1.tar.gz").read_bytes()


@pytest.fixture(scope="module")
def index() -> Index:
    return read_index(GOLDEN.read_bytes())


@pytest.fixture(scope="module")
def region(index: Index) -> bytes:
    return data_region(index, LAYER)


def data_region(index: Index, blob: bytes) -> bytes:
    """The data region, each span decoded alone and its pieces compared with their digests."""
    region = bytearray(index.data_size)
    digests = iter(index.digests)
    for span in index.spans:
        for block, data in read_span(index, span, blob).items():
            region[block * BLOCK : (block + 1) * BLOCK] = data
        for start, end in span.pieces:
            assert hashlib.sha256(region[start * BLOCK : end * BLOCK]).digest() == next(digests)
    assert next(digests, None) is None
    return bytes(region)


def test_the_head(index: Index) -> None:
    tar = gzip.decompress(LAYER)
    assert index.head[1] == [hashlib.sha256(LAYER).digest()] and index.head[2] == [len(LAYER)]
    assert index.head[3] == [hashlib.sha256(tar).digest()] and index.tar_size == len(tar)
    assert index.compression == 2 and index.head[14] == [b"/implied", b"/implied/deep"]
    uuid = bytearray(hashlib.sha256(b"bootseersha256:" + hashlib.sha256(tar).hexdigest().encode()).digest()[:16])
    uuid[6], uuid[8] = uuid[6] & 15 | 128, uuid[8] & 63 | 128
    assert index.metadata[1024 + 48 : 1024 + 64] == uuid


def test_the_golden_file_is_worth_its_name(index: Index) -> None:
    """It holds what is easily read wrong."""
    spans = index.spans
    assert len(spans) > 5 and sum(1 for span in spans if span.window) > 3 and len({span.bit for span in spans}) > 2
    assert any(not span.raw for span in spans[1:]), "a second gzip member"
    assert any(stop - start < 32 for span in spans for start, stop in span.pieces[:-1] or span.pieces)
    assert len(index.files) > len({data // BLOCK for _, data, _ in index.files}), "two extents in one block"
    owned = {block for span in spans for block in span.blocks}
    assert len(owned) < index.data_size // BLOCK, "holes"


def contents(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes | None:
    """Of a file or a hard link to one."""
    file = None if member.issym() else tar.extractfile(member)
    return file.read() if file is not None else None


def test_names_attributes_and_contents(index: Index, region: bytes) -> None:
    tree = read_tree(index.metadata)
    links: dict[str, int] = {}
    with tarfile.open(fileobj=io.BytesIO(LAYER)) as tar:
        members = {"/" + member.name: (member, contents(tar, member)) for member in tar}
    expected = {path for path in members if "/.wh." not in path} | {"/implied", "/implied/deep", "/gone", "/"}
    assert {path.decode("utf-8", "surrogateescape") for path in tree} == expected
    for path, (member, content) in members.items():
        if "/.wh." in path or path == "/":
            continue
        inode = tree[path.encode("utf-8", "surrogateescape")]
        mode = 0o777 if member.issym() else member.mode
        assert (stat.S_IMODE(inode.mode), inode.uid, inode.gid) == (mode, member.uid, member.gid), path
        assert inode.mtime_ns == int(Decimal(member.pax_headers.get("mtime", member.mtime)) * 10**9), path
        prefix = "SCHILY.xattr."
        wanted = {k.removeprefix(prefix): v for k, v in member.pax_headers.items() if k.startswith(prefix)}
        opaque = {"trusted.overlay.opaque": "y"} if path == "/opaque" else {}
        assert {k.decode(): v.decode("utf-8", "surrogateescape") for k, v in inode.xattrs.items()} == wanted | opaque
        if content is not None:
            start = inode.start * BLOCK - len(index.metadata)
            assert (region[start : start + inode.size] if inode.size else b"") == content, path
        if member.issym():
            assert inode.data == member.linkname.encode()
        if member.ischr():
            assert inode.start == member.devminor & 0xFF | member.devmajor << 8 | (member.devminor & ~0xFF) << 12
        links[path] = inode.nid
    assert links["/hard"] == links["/dir/text"] and tree[b"/hard"].nlink == 2
    gone = tree[b"/gone"]
    assert (gone.mode, gone.start) == (stat.S_IFCHR, 0), "a whiteout"


@pytest.mark.parametrize("kind", ["tar", "gzip-9", "fixed", "full-header", "members", "stored-members", "small-blocks"])
def test_other_layers(kind: str) -> None:
    blob = BLOBS[kind](archive(seed=3, files=7))
    index, region = build(blob, span_size=4000)
    naive = read_index(encode_index(index))
    assert len(naive.spans) > 1
    assert data_region(naive, blob) == region
