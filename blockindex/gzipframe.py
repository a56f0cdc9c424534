"""What stands around the deflate data of a gzip member: header and trailer, bytes in, checked.

Both readers of gzip blobs parse these themselves and hand raw deflate to their decompressors. So they agree on where a
member begins and ends, a chunk may end anywhere in a header (isal 1.9.1 loses its way there), and the CRC can be
computed ten times faster than zlib does.

Knows RFC 1952; must not know deflate, spans or layers. What of it is refused is what gunzip refuses.
"""

from isal import isal_zlib

from blockindex.errors import Corrupt

__all__ = ["MAGIC", "MAX_HEADER", "TRAILER_SIZE", "check_trailer", "header_end"]

MAGIC = b"\x1f\x8b"
TRAILER_SIZE = 8
"""Bytes of the trailer: CRC-32 of the member's output, then its size modulo 2^32."""
MAX_HEADER = 1 << 20
"""Bytes of the longest header that is read; gzip sets no limit to names and comments."""

_FIXED_SIZE = 10  # without the optional fields
_DEFLATE = 8
_FHCRC, _FEXTRA, _FNAME, _FCOMMENT, _RESERVED = 2, 4, 8, 16, 0xE0  # the flags


def header_end(head: bytes) -> int | None:
    """Where the gzip header that `head` starts with ends, or None when more bytes are needed to tell. Corrupt when it
    is none, or longer than MAX_HEADER."""
    end = _end(head)
    if end is None and len(head) > MAX_HEADER:
        raise Corrupt("blob", f"a gzip header is longer than {MAX_HEADER} bytes")
    return end


def _end(head: bytes) -> int | None:
    if len(head) < _FIXED_SIZE:
        return None
    flags = head[3]
    if head[2] != _DEFLATE or flags & _RESERVED:
        raise Corrupt("blob", f"not a valid gzip stream: method {head[2]}, flags {flags:#04x}")
    end = _FIXED_SIZE
    if flags & _FEXTRA:
        if len(head) < end + 2:
            return None
        end += 2 + int.from_bytes(head[end : end + 2], "little")
    for flag in (_FNAME, _FCOMMENT):
        if flags & flag:
            end = head.find(0, end) + 1
            if not end:
                return None
    if flags & _FHCRC:
        end += 2
    if end > len(head):
        return None
    if flags & _FHCRC and isal_zlib.crc32(head[: end - 2]) & 0xFFFF != int.from_bytes(head[end - 2 : end], "little"):
        raise Corrupt("blob", "not a valid gzip stream: the header's CRC is wrong")
    return end


def check_trailer(trailer: bytes, crc: int, size: int) -> None:
    """Corrupt unless `trailer` belongs to a member whose output has this CRC-32 and size."""
    if int.from_bytes(trailer[:4], "little") != crc:
        raise Corrupt("blob", "not a valid gzip stream: the data's CRC is wrong")
    if int.from_bytes(trailer[4:], "little") != size & 0xFFFFFFFF:
        raise Corrupt("blob", "not a valid gzip stream: the data's size is wrong")
