"""The part of the FUSE kernel protocol that a read-only server of flat files needs (include/uapi/linux/fuse.h, 7.31+).

Pure values: packs and unpacks, does no I/O. All integers are in host byte order, as the kernel writes them.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

__all__ = [
    "FORGET_ONE",
    "IN_HEADER",
    "NOTIFY_RESEND",
    "OUT_HEADER",
    "READ_REQUEST",
    "REQUEST_BUFFER",
    "ROOT_ID",
    "UNIQUE_RESEND",
    "InitReply",
    "Opcode",
    "attr_reply",
    "dirent",
    "entry_reply",
    "forgotten",
    "init_reply",
    "inval_entry",
    "open_reply",
    "statfs_reply",
]

ROOT_ID = 1
REQUEST_BUFFER = 8192
"""FUSE_MIN_READ_BUFFER: the kernel refuses to hand a request to a smaller buffer."""

IN_HEADER = struct.Struct("=IIQQIIIHH")
"""len, opcode, unique, nodeid, uid, gid, pid, total_extlen, padding: 40 bytes."""
READ_REQUEST = struct.Struct("=IIQQIIIHHQQIIQII")
"""IN_HEADER, then fuse_read_in: fh, offset, size, read_flags, lock_owner, flags, padding: 80 bytes."""
OUT_HEADER = struct.Struct("=IiQ")
"""len, error (0 or -errno), unique: 16 bytes."""

UNIQUE_RESEND = 1 << 63
"""Set in the unique of a request that the kernel sends again after NOTIFY_RESEND; it must be echoed in the reply."""
NOTIFY_RESEND = OUT_HEADER.pack(OUT_HEADER.size, 7, 0)
"""Asks the kernel to queue every unanswered request again (Linux >= 6.9; older ones answer EINVAL)."""

FORGET_ONE = struct.Struct("=QQ")
"""nodeid, nlookup: one inode of a BATCH_FORGET, which has a u32 count and 4 bytes of padding before them."""

_NOTIFY_INVAL_ENTRY = 3
_INVAL_ENTRY = struct.Struct("=QII")  # parent, namelen, flags; the name and a zero follow
_INIT_IN = struct.Struct("=IIIII")
_INIT_OUT = struct.Struct("=IIIIHHIIHHII24x")
_ATTR = struct.Struct("=6Q10I")
_ATTR_OUT = struct.Struct("=QII")
_ENTRY_OUT = struct.Struct("=QQQQII")
_OPEN_OUT = struct.Struct("=QII")
_STATFS_OUT = struct.Struct("=5Q4I24x")
_DIRENT = struct.Struct("=QQII")

_FOPEN_KEEP_CACHE, _FOPEN_NOFLUSH = 2, 32
_BIG_WRITES, _ASYNC_DIO, _PARALLEL_DIROPS, _MAX_PAGES, _INIT_EXT = 1 << 5, 1 << 15, 1 << 18, 1 << 22, 1 << 30
_HAS_RESEND_2 = 1 << 7
_MAX_BACKGROUND = 65535
"""With fewer, that many readers of one dead layer stop the whole node (64 stalled it, 1024 made hits wait 4 ms)."""
_VALID_S = 86400
"""Names and sizes of layers never change, so the kernel may believe them for a day."""


class Opcode(IntEnum):
    """Requests that this server answers by other than ENOSYS."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    OPEN = 14
    READ = 15
    STATFS = 17
    RELEASE = 18
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42


@dataclass(frozen=True, slots=True)
class InitReply:
    """The INIT answer and what was agreed: `async_dio` is what keeps blocked readers killable and misses parallel."""

    body: bytes
    async_dio: bool
    resend: bool


def init_reply(body: bytes) -> InitReply:
    """Negotiate from the body of INIT: only flags that this server relies on. Request time-outs (flag bit 42) are left
    out on purpose: they abort the whole connection; a late reader gets EIO from us instead."""
    major, minor, max_readahead, flags, flags2 = _INIT_IN.unpack_from(body.ljust(_INIT_IN.size, b"\0"))
    if major != 7 or minor < 31:
        raise ValueError(f"kernel speaks FUSE {major}.{minor}; 7.31 (Linux 5.4) or later is needed")
    if not flags & _INIT_EXT:
        flags2 = 0
    agreed = flags & (_BIG_WRITES | _ASYNC_DIO | _PARALLEL_DIROPS | _MAX_PAGES | _INIT_EXT)
    agreed2 = flags2 & _HAS_RESEND_2
    reply = _INIT_OUT.pack(
        7, min(minor, 40), max_readahead, agreed, _MAX_BACKGROUND, _MAX_BACKGROUND, 4096, 1, 256, 0, agreed2, 0
    )
    return InitReply(reply, bool(agreed & _ASYNC_DIO), bool(agreed2))


def _attr(node: int, size: int, directory: bool) -> bytes:
    mode = 0o040500 if directory else 0o100400
    return _ATTR.pack(node, size, -(-size // 512), 0, 0, 0, 0, 0, 0, mode, 1 + directory, 0, 0, 0, 4096, 0)


def attr_reply(node: int, size: int, directory: bool = False) -> bytes:
    """Body of GETATTR."""
    return _ATTR_OUT.pack(_VALID_S, 0, 0) + _attr(node, size, directory)


def entry_reply(node: int, size: int) -> bytes:
    """Body of LOOKUP for a layer's file."""
    return _ENTRY_OUT.pack(node, 0, _VALID_S, _VALID_S, 0, 0) + _attr(node, size, False)


def inval_entry(name: bytes) -> bytes:
    """A notification, written to the connection like a reply: forget the name below the root. An inode that nothing
    else holds goes with it (a FORGET follows). ENOENT: the kernel did not know the name."""
    body = _INVAL_ENTRY.pack(ROOT_ID, len(name), 0) + name + b"\0"
    return OUT_HEADER.pack(OUT_HEADER.size + len(body), _NOTIFY_INVAL_ENTRY, 0) + body


def forgotten(body: bytes) -> list[int]:
    """Node ids in the body of a BATCH_FORGET."""
    (count,) = struct.unpack_from("=I", body)
    return [FORGET_ONE.unpack_from(body, 8 + number * FORGET_ONE.size)[0] for number in range(count)]


def open_reply() -> bytes:
    """Body of OPEN and OPENDIR; no file handle is kept, so any successor can serve an open file. No FLUSH is wanted: a
    killed process that holds such a file would wait for its answer while it exits."""
    return _OPEN_OUT.pack(0, _FOPEN_KEEP_CACHE | _FOPEN_NOFLUSH, 0)


def statfs_reply(blocks: int, free: int) -> bytes:
    """Body of STATFS, in units of 4096 bytes."""
    return _STATFS_OUT.pack(blocks, free, free, 0, 0, 4096, 255, 4096, 0)


def dirent(node: int, next_offset: int, name: bytes, directory: bool) -> bytes:
    """One READDIR record, padded to 8 bytes; `next_offset` is the cookie to go on from."""
    kind = 4 if directory else 8  # DT_DIR, DT_REG
    record = _DIRENT.pack(node, next_offset, len(name), kind) + name
    return record + bytes(-len(record) % 8)
