"""Archives that tools disagree on, through the whole daemon, against containerd's own unpacking."""

from collections.abc import Callable

import pytest
import zstandard

from tests.blockindex.layers import frames, members
from tests.blockindex.tarcases import ACL, CAPABILITY, END, base256, file, header, long_name, pax
from tests.snapshotter.containerd import containerd_node
from tests.snapshotter.containerd.test_differential import Both, _assert_same, _directory, both

__all__ = ["both"]

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]


def test_global_headers(both: Both) -> None:
    """Their records change nothing; they make parents, take away what has their name, and void what stands before."""
    archive = b"".join(
        (
            _directory(b"d"),
            file(b"d/a", b"1", uid=5, mtime=1_700_000_000),
            file(b"keep", b"2"),
            pax([(b"uid", b"77"), (b"mtime", b"9"), (b"SCHILY.xattr.user.a", b"b"), (b"size", b"1")], b"g"),
            file(b"plain", b"345", uid=3),
            pax([(b"path", b"d/a"), (b"comment", b"goes")], b"g"),
            pax([(b"path", b"new/thing")], b"g"),
            pax([(b"path", b"lost")]),
            pax([(b"path", b"g")], b"g"),
            file(b"b", b"6"),
            long_name(b"l" * 150),
            pax([(b"path", b"g"), (b"uid", b"no number")], b"g"),
            file(b"c", b"7"),
            END,
        )
    )
    _assert_same(both, [archive], timeless=["new", "PaxHeaders"])


def test_odd_numbers_and_xattrs(both: Both) -> None:
    """Owners beyond 32 bits and below 0, times after 2106, ACLs that do not fit the mode, xattrs of all namespaces."""
    names = [b"user.a", b"security.a", b"trusted.a", b"system.a", b"none", b"foo.bar"]
    every = pax([(b"SCHILY.xattr." + name, b"v") for name in names])
    access = pax([(b"SCHILY.xattr.system.posix_acl_access", ACL)])
    archive = b"".join(
        (
            _directory(b"keeps", uid=4, gid=5),
            _directory(b"keeps", uid=base256(-1, 8), gid=6),  # type: ignore[arg-type]
            file(b"minus", uid=base256(-2, 8), gid=base256(-1, 8)),
            file(b"large", uid=base256(2**32 + 5, 8), gid=base256(2**40 - 1, 8)),
            pax([(b"uid", b"-2"), (b"gid", b"4294967295")]),
            file(b"records", uid=3, gid=3),
            file(b"2106", mtime=base256(2**32 + 7, 12)),
            file(b"2261", mtime=base256(9_220_000_000, 12)),
            every,
            file(b"file"),
            every,
            _directory(b"dir"),
            every,
            header(b"symlink", b"2", link=b"x"),
            every,
            header(b"fifo", b"6"),
            access,
            file(b"acl-fits", mode=0o755),
            access,
            file(b"acl-less", mode=0o640),
            access,
            _directory(b"acl-dir", 0o2710),
            access,
            header(b"acl-symlink", b"2", link=b"x"),
            pax([(b"SCHILY.xattr.system.posix_acl_default", ACL)]),
            _directory(b"acl-default"),
            pax([(b"SCHILY.xattr.security.capability", CAPABILITY)]),
            file(b"capable", mode=0o755, uid=1),
            header(b"char", b"3", device=(4095, 1048575), mode=0o600),
            pax([(b"GNU.sparse.major", b"2"), (b"GNU.sparse.minor", b"0"), (b"GNU.sparse.name", b"other")]),
            file(b"sparse-2.0", b"plain"),
            pax([(b"path", b"\xff" * 255)]),
            file(b"x", b"name"),
            END,
        )
    )
    _assert_same(both, [archive])


@pytest.mark.parametrize("tail", [b"", END + bytes(20 * 512), END + b"\xff" * 999])
def test_ends(both: Both, tail: bytes) -> None:
    """An archive without its end mark, padded, or with rubbish behind it; and one without anything."""
    _assert_same(both, [file(b"a", b"1") + tail, tail if len(tail) > 1024 else END])


def test_an_end_without_padding(both: Both) -> None:
    """The archive ends with its last file's last byte, as umoci writes it."""
    _assert_same(both, [file(b"a", b"1") + header(b"b", size=5) + b"67890"])


@pytest.mark.parametrize("form", ["oci", "v2s2"])
@pytest.mark.parametrize("kind", ["zstd", "zstd frames", "plain", "members"])
def test_media_types_that_lie(both: Both, kind: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest says gzip, the layers are something else: content decides, for us as for containerd."""
    compress: dict[str, Callable[[bytes], bytes]] = {
        "zstd": zstandard.compress,
        "zstd frames": lambda tar: frames(tar, 700),
        "plain": lambda tar: tar,
        "members": lambda tar: members(tar, [500, 0, 600]),
    }
    monkeypatch.setattr(containerd_node, "_compress", compress[kind])
    monkeypatch.setattr(containerd_node, "_FORMAT", form)
    _assert_same(both, [_directory(b"d") + file(b"d/a", b"1" * 5000) + END, file(b"d/b", b"2") + END], timeless=["d"])
