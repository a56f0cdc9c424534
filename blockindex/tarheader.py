"""One 512-byte tar header: bytes in, fields out.

Knows ustar, star, old GNU and V7 headers, octal and base-256 numbers, signed and unsigned checksums. Knows nothing of
streams, PAX records or of what an entry means for a layer. Where tars differ in what they accept, Go's archive/tar is
the model, because it is what containerd unpacks with: what it reads, this reads alike.
"""

import struct
from functools import lru_cache
from typing import NamedTuple
from zlib import adler32

from blockindex.errors import Corrupt

__all__ = ["RECORD", "Header", "device_numbers", "has_valid_checksum", "number", "parse_header"]

RECORD = 512
"""Bytes of a tar record: headers and payloads take whole records."""

# name mode uid gid size mtime checksum type linkname magic version (uname gname devmajor devminor) prefix (pad)
_LAYOUT = struct.Struct("100s8s8s8s12s12s8sc100s6s2s80x155s12x")
_SPACES = 8 * 0x20
_PADDING = b" \0"


class Header(NamedTuple):
    """The fields of a header that matter to a layer; `size` is the stored payload as the header claims it."""

    name: bytes
    mode: int
    uid: int
    gid: int
    size: int
    mtime: int
    typeflag: bytes
    linkname: bytes
    is_gnu: bool


def number(field: bytes) -> int:
    """A numeric header field: base-256 (two's complement) when its top bit is set, else octal padded with blanks or
    NULs; ValueError for anything else."""
    digits = field[:-1]
    if digits.isdigit() and field[-1] in _PADDING:  # nearly all
        return int(digits, 8)
    return _unusual_number(field)


def _unusual_number(field: bytes) -> int:
    if field and field[0] & 0x80:
        value = int.from_bytes(field, "big")
        bits = 8 * len(field)
        # The top bit is the marker, the next one the sign.
        return value - (1 << bits) if field[0] & 0x40 else value - (1 << (bits - 1))
    digits = field.strip(_PADDING).partition(b"\0")[0]
    if not digits:
        return 0
    if not digits.isdigit():
        raise ValueError(f"{field!r} is not an octal number")
    return int(digits, 8)


_repeated = lru_cache(maxsize=4096)(number)
"""For modes, owners and times, which most entries share: faster, and one int object for all of them."""


def parse_header(block: bytes, offset: int) -> Header:
    """The header in `block` (one record, at `offset` of the tar stream); Corrupt when its checksum or a number is
    wrong."""
    (name, mode, uid, gid, size, mtime, checksum, kind, linkname, magic, version, prefix) = _LAYOUT.unpack(block)
    if not _checksum_holds(block, checksum):
        raise Corrupt("tar header", "checksum does not match: not a tar archive, or damaged", offset)
    name = name.partition(b"\0")[0]
    is_gnu = magic == b"ustar " and version == b" \0"
    if prefix[0] and (magic == b"ustar\0" or (is_gnu and _holds_prefix(prefix))):
        if magic == b"ustar\0" and block[508:512] == b"tar\0":  # star: a shorter prefix, then times
            prefix = prefix[:131]
        name = prefix.partition(b"\0")[0] + b"/" + name
    try:
        stored = number(size)
        header = Header(
            name,
            _repeated(mode),
            _repeated(uid),
            _repeated(gid),
            stored,
            _repeated(mtime),
            kind,
            linkname.partition(b"\0")[0],
            is_gnu,
        )
    except ValueError as error:
        raise Corrupt("tar header", str(error), offset) from None
    if stored < 0:
        raise Corrupt("tar header", f"negative size {stored}", offset)
    return header


def has_valid_checksum(block: bytes) -> bool:
    """Whether `block` is a header by its checksum."""
    return _checksum_holds(block, block[148:156])


def device_numbers(block: bytes, offset: int) -> tuple[int, int]:
    """Major and minor number of a device entry's header."""
    try:
        return number(block[329:337]), number(block[337:345])
    except ValueError as error:
        raise Corrupt("tar header", f"device number {error}", offset) from None


def _checksum_holds(block: bytes, checksum: bytes) -> bool:
    digits = checksum[:6]
    try:
        claimed = int(digits, 8) if checksum[6:] == b"\0 " and digits.isdigit() else number(checksum)
    except ValueError:
        return False
    if block.isascii():
        # 512 bytes below 128 sum up to less than adler32's modulus, so its low half is 1 + the sum: 20 times faster.
        return (adler32(block) & 0xFFFF) - (adler32(checksum) & 0xFFFF) + _SPACES == claimed
    total = sum(block) - sum(checksum) + _SPACES
    high_bytes = sum(1 for byte in block if byte & 0x80) - sum(1 for byte in checksum if byte & 0x80)
    # Some old tars summed signed chars.
    return claimed in (total, total - 256 * high_bytes)


def _holds_prefix(field: bytes) -> bool:
    """Whether a GNU header's time fields hold a name prefix instead: Go's writer before 1.8 had this bug, and images
    pushed by old Docker versions still have it."""
    try:
        number(field[:12])
        number(field[12:24])
    except ValueError:
        return field.partition(b"\0")[0].isascii()
    return False
