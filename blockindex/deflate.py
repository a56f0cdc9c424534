"""Deflate at bit level: stop at block boundaries while building, start at one while decoding.

Building uses zlib or zlib-ng through ctypes (see `inflatelib`), because only their `Z_BLOCK` mode tells where deflate
blocks begin (in bits) and only `inflateGetDictionary` tells the window there. It inflates raw deflate, for a gzip
member's CRC is computed faster elsewhere (see `gzipframe`). Decoding uses isal, which starts on whole bytes only:
`restart_prefix` supplies the bits in front.

Knows bits and bytes; must not know tar, spans or layers.

Invariant: a stream started with `restart_prefix` keeps the byte alignment of the original one. Shifting all bytes
instead would be wrong, for stored blocks align themselves to byte boundaries.
"""

import ctypes
import weakref
from functools import cache

from blockindex.errors import Corrupt, Unsupported
from blockindex.inflatelib import InflateLibrary, Stream, inflate_library

__all__ = ["WINDOW_SIZE", "Inflater", "restart_prefix"]

WINDOW_SIZE = 32768
"""Bytes that a deflate match can reach back."""

_Z_NO_FLUSH = 0
_Z_BLOCK = 5
_Z_OK = 0
_Z_STREAM_END = 1
_Z_BUF_ERROR = -5
_Z_MEM_ERROR = -4
_UNUSED_BITS = 7
_LAST_BLOCK = 64
_AT_BOUNDARY = 128


class Inflater:
    """Inflates raw deflate streams one after the other and stops at each deflate block boundary.

    Give it input (`give`) and room (`aim`), then `step` until neither is used up further. Neither buffer is copied;
    both are kept alive until replaced.
    """

    def __init__(self, library: InflateLibrary | None = None) -> None:
        self._lib = library or inflate_library()
        self._stream = Stream()
        self._ref = ctypes.byref(self._stream)
        status = self._lib.init(self._ref)
        if status != 0:
            raise Unsupported(f"{self._lib.name} refuses to start (status {status})")
        weakref.finalize(self, self._lib.end, self._ref)
        self._source: object = b""
        self._target: object = b""

    def reset(self) -> None:
        """Expect a new stream; its window starts empty."""
        self._lib.reset(self._ref)

    def give(self, data: bytes, start: int) -> None:
        """Read from `data[start:]` (below 4 GiB) from now on."""
        self._source = data
        self._stream.next_in = _address(data) + start
        self._stream.avail_in = len(data) - start

    def aim(self, buffer: bytearray) -> None:
        """Write into `buffer` from its start; it must not be resized while it is in use."""
        view = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        self._target = view
        self._stream.next_out = ctypes.addressof(view)
        self._stream.avail_out = len(buffer)

    def step(self) -> bool:
        """Inflate up to the next block boundary, the end of the input or of the room, whichever comes first; true
        when the stream is complete. Corrupt when zlib rejects the input."""
        status = self._lib.inflate(self._ref, _Z_BLOCK)
        self._check(status)
        return bool(status == _Z_STREAM_END)

    def inflate_blanking(self, data: bytes, window: bytes, size: int, stride: int) -> bytes:
        """Inflate `data`, a stream's rest, to its first `size` bytes, with the first WINDOW_SIZE bytes of `window` in
        place of the output before it, and every `stride` bytes replace the last of these by the zeros that follow in
        `window`. Corrupt when `data` is invalid or does not yield that much."""
        out = bytearray(size)
        self.reset()
        self.give(data, 0)
        self.aim(out)
        base = _address(window)
        assert len(window) >= 2 * WINDOW_SIZE >= WINDOW_SIZE + size
        stream, ref, inflate, replace = self._stream, self._ref, self._lib.inflate, self._lib.set_dictionary
        for start in range(0, size, stride):
            replace(ref, base + start, WINDOW_SIZE)
            stream.avail_out = min(stride, size - start)
            self._check(inflate(ref, _Z_NO_FLUSH))
            if stream.avail_out:
                raise Corrupt("blob", f"not a valid gzip stream: {size} bytes expected")
        return bytes(out)

    def _check(self, status: int) -> None:
        if status == _Z_MEM_ERROR:
            raise MemoryError("zlib is out of memory")
        if status not in (_Z_OK, _Z_STREAM_END, _Z_BUF_ERROR):
            message = (self._stream.msg or b"invalid data").decode("ascii", "replace")
            raise Corrupt("blob", f"not a valid gzip stream: {message}")

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
        """The last (up to) 32 KiB of the current stream's output."""
        out = ctypes.create_string_buffer(WINDOW_SIZE)
        size = ctypes.c_uint(0)
        status = self._lib.get_dictionary(self._ref, out, ctypes.byref(size))
        assert status == 0, status
        return out.raw[: size.value]


def _address(data: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


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
