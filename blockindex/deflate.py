"""Deflate at bit level: stop at block boundaries while building, start at one while decoding.

Building uses the system's zlib through ctypes, because only its `Z_BLOCK` mode tells where deflate blocks begin (in
bits) and only `inflateGetDictionary` tells the window there; ctypes releases the GIL for each call. Decoding uses isal,
which is faster but starts on whole bytes only: `restart_prefix` supplies the bits in front.

Knows bits and bytes; must not know tar, spans or layers.

Invariant: a stream started with `restart_prefix` keeps the byte alignment of the original one. Shifting all bytes
instead would be wrong, for stored blocks align themselves to byte boundaries.
"""

import ctypes
import weakref
from functools import cache

from blockindex.errors import Corrupt, Unsupported

__all__ = ["WINDOW_SIZE", "Inflater", "restart_prefix"]

WINDOW_SIZE = 32768
"""Bytes that a deflate match can reach back."""

_GZIP_WBITS = 31  # 15 bits of window, and zlib reads the gzip headers and checks crc32 and size in the trailers
_Z_BLOCK = 5
_Z_OK = 0
_Z_STREAM_END = 1
_Z_BUF_ERROR = -5
_Z_MEM_ERROR = -4
_UNUSED_BITS = 7
_LAST_BLOCK = 64
_AT_BOUNDARY = 128


class _ZStream(ctypes.Structure):
    """zlib's `z_stream`, which is part of its stable binary interface."""

    _fields_ = (
        ("next_in", ctypes.c_void_p),
        ("avail_in", ctypes.c_uint),
        ("total_in", ctypes.c_ulong),
        ("next_out", ctypes.c_void_p),
        ("avail_out", ctypes.c_uint),
        ("total_out", ctypes.c_ulong),
        ("msg", ctypes.c_char_p),
        ("state", ctypes.c_void_p),
        ("zalloc", ctypes.c_void_p),
        ("zfree", ctypes.c_void_p),
        ("opaque", ctypes.c_void_p),
        ("data_type", ctypes.c_int),
        ("adler", ctypes.c_ulong),
        ("reserved", ctypes.c_ulong),
    )


@cache
def _libz() -> ctypes.CDLL:
    """The system's zlib, loaded at first use; Unsupported where there is none."""
    try:
        lib = ctypes.CDLL("libz.so.1")
        lib.zlibVersion.restype = ctypes.c_char_p
        stream = ctypes.POINTER(_ZStream)
        lib.inflateInit2_.argtypes = [stream, ctypes.c_int, ctypes.c_char_p, ctypes.c_int]
        lib.inflate.argtypes = [stream, ctypes.c_int]
        lib.inflateReset.argtypes = [stream]
        lib.inflateEnd.argtypes = [stream]
        lib.inflateGetDictionary.argtypes = [stream, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint)]
    except (OSError, AttributeError) as error:
        raise Unsupported(
            f"cannot index gzip layers: the system's libz.so.1 (zlib >= 1.2.8) does not load: {error}; install zlib1g"
        ) from error
    return lib


class Inflater:
    """Inflates gzip members one after the other and stops at each deflate block boundary.

    Give it input (`give`) and room (`aim`), then `step` until `starved`. Neither buffer is copied; both are kept
    alive until replaced.
    """

    def __init__(self) -> None:
        self._lib = _libz()
        self._stream = _ZStream()
        self._ref = ctypes.byref(self._stream)
        version = self._lib.zlibVersion()
        status = self._lib.inflateInit2_(self._ref, _GZIP_WBITS, version, ctypes.sizeof(_ZStream))
        if status != 0:
            raise Unsupported(f"zlib refuses to start (status {status}, version {version!r})")
        weakref.finalize(self, self._lib.inflateEnd, self._ref)
        self._source: object = b""
        self._target: object = b""

    def reset(self) -> None:
        """Expect the header of a new gzip member; its window starts empty."""
        self._lib.inflateReset(self._ref)

    def give(self, data: bytes, start: int) -> None:
        """Read from `data[start:]` (below 4 GiB) from now on."""
        self._source = data
        address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
        self._stream.next_in = address + start
        self._stream.avail_in = len(data) - start

    def aim(self, buffer: bytearray) -> None:
        """Write into `buffer` from its start; it must not be resized while it is in use."""
        view = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        self._target = view
        self._stream.next_out = ctypes.addressof(view)
        self._stream.avail_out = len(buffer)

    def step(self) -> bool:
        """Inflate up to the next block boundary, the end of the input or of the room, whichever comes first; true
        when the member is complete, trailer included and checked. Corrupt when zlib rejects the input."""
        status = self._lib.inflate(self._ref, _Z_BLOCK)
        if status == _Z_MEM_ERROR:
            raise MemoryError("zlib is out of memory")
        if status not in (_Z_OK, _Z_STREAM_END, _Z_BUF_ERROR):
            message = (self._stream.msg or b"invalid data").decode("ascii", "replace")
            raise Corrupt("blob", f"not a valid gzip stream: {message}")
        return bool(status == _Z_STREAM_END)

    @property
    def unread(self) -> int:
        """Bytes of the input that are not consumed yet."""
        return int(self._stream.avail_in)

    @property
    def room(self) -> int:
        """Bytes of the output buffer that are still free."""
        return int(self._stream.avail_out)

    @property
    def at_boundary(self) -> bool:
        """The last step stopped between two deflate blocks (or before the first, or after the last)."""
        return bool(self._stream.data_type & _AT_BOUNDARY)

    @property
    def after_last_block(self) -> bool:
        """At a boundary: no further deflate block follows in this member."""
        return bool(self._stream.data_type & _LAST_BLOCK)

    @property
    def unused_bits(self) -> int:
        """At a boundary: the high bits (0-7) of the last consumed byte that belong to the next block."""
        return int(self._stream.data_type & _UNUSED_BITS)

    def window(self) -> bytes:
        """The last (up to) 32 KiB of the current member's output."""
        out = ctypes.create_string_buffer(WINDOW_SIZE)
        size = ctypes.c_uint(0)
        status = self._lib.inflateGetDictionary(self._ref, out, ctypes.byref(size))
        assert status == 0, status
        return out.raw[: size.value]


class _Bits:
    """Bits in deflate's order: numbers from the low bit on, bytes filled from the low bit on."""

    def __init__(self) -> None:
        self.value = 0
        self.count = 0

    def put(self, number: int, bits: int) -> None:
        self.value |= number << self.count
        self.count += bits


def _put_fixed_block(out: _Bits) -> None:
    """An empty block with the fixed codes: 10 bits."""
    out.put(0b010, 3)  # not the last block; type 1
    out.put(0, 7)  # end of block


def _put_dynamic_block(out: _Bits) -> None:
    """An empty block with codes of its own: 91 bits, an odd number, which fixed blocks cannot make."""
    out.put(0b100, 3)  # not the last block; type 2
    out.put(0, 5)  # 257 literal/length codes
    out.put(0, 5)  # 1 distance code
    out.put(18 - 4, 4)  # 18 code length codes: 16 17 18 0 8 7 9 6 10 5 11 4 12 3 13 2 14 1
    for symbol in (16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1):
        out.put(1 if symbol in (1, 18) else 0, 3)  # so symbol 1 is coded "0" and symbol 18 "1"
    out.put(0, 1)  # literal 0: length 1
    for zeros in (138, 117):  # literals 1 to 255: unused
        out.put(1, 1)
        out.put(zeros - 11, 7)
    out.put(0, 1)  # end of block: length 1, coded "1" as the higher of two symbols
    out.put(0, 1)  # the one distance code: length 1
    out.put(1, 1)  # end of block


@cache
def _prefix(bit: int) -> tuple[bytes, int]:
    """Whole bytes of empty blocks, and the `bit` low bits of the byte after them."""
    out = _Bits()
    if bit % 2:
        _put_dynamic_block(out)
    while out.count % 8 != bit:
        _put_fixed_block(out)
    data = out.value.to_bytes(out.count // 8 + 1, "little")
    return data[:-1], data[-1]


def restart_prefix(bit: int, first_byte: int) -> bytes:
    """The bytes to inflate in place of `first_byte`, of which the low `bit` (0-7) bits belong to the block before:
    empty blocks that end exactly where the wanted block begins, and the rest of the byte."""
    whole, low = _prefix(bit)
    return whole + bytes(((first_byte >> bit << bit) | low,))
