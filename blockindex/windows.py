"""Trimming of windows: which bytes before a restart point do the bytes after it refer to?

Found by inflating what follows the point with two probe dictionaries, whose bytes tell a place in the window and are
never equal at one place, while a byte that was not copied from the window comes out equal. On the way, the output so
far is blanked in the decoder's window every few KiB. So nearly every place shows up where it is copied the first time,
not in the copies of copies, which are three times as many.

Knows deflate data and windows; must not know blobs, spans or layers. All steps but one are single C calls on whole
buffers: a window takes 1 ms.

Invariant: a trimmed window holds every byte that decoding from its point refers to; all other bytes of it are zero, so
that windows compress well.
"""

import sys
from array import array
from collections.abc import Iterator
from functools import cache

from blockindex.deflate import WINDOW_SIZE, Inflater, restart_prefix

__all__ = ["trim_window"]

_STRIDE = 2048  # 5,900 of 32,768 bytes then come from the window; 1 KiB: 5,200, more calls; never blanked: 17,800
_BLANK = bytes(WINDOW_SIZE)
_FILL = bytes(1) + b"\xff" * 255  # for bytes.translate: any byte but 0 becomes 0xff
_LOW, _HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)  # where a 16-bit number has them


def _rows() -> Iterator[range]:
    """The places of the window in order, in runs: each place as a pair of bytes, `low + 256 * high`, none of them 0,
    the two never equal."""
    left = WINDOW_SIZE
    for high in range(1, 256):
        for low, end in ((1, high), (high + 1, 256)):
            row = range(high << 8 | low, high << 8 | min(end, low + left))
            left -= len(row)
            yield row
        if not left:
            return


_ROWS = tuple(_rows())


@cache
def _probes() -> tuple[bytes, bytes]:
    """The low and the high bytes of all places, each with as many zeros behind them."""
    pairs = [pair for row in _ROWS for pair in row]
    return bytes(pair & 0xFF for pair in pairs) + _BLANK, bytes(pair >> 8 for pair in pairs) + _BLANK


def trim_window(window: bytes, bit: int, blob: bytes, tail: int) -> bytes:
    """`window` with all bytes zeroed, and leading ones cut off, that the next `tail` (up to 32 KiB) of tar do not
    refer to; what comes later cannot reach the window.

    `blob` is the raw deflate data from the restart point on, its first `bit` bits ignored, that yields those bytes; the
    same data must have been inflated with the true window before.
    """
    data = restart_prefix(bit, blob[0]) + blob[1:]
    inflater = Inflater()
    low, high = (inflater.inflate_blanking(data, probe, tail, _STRIDE) for probe in _probes())
    used = _mask(_copied(low, high))[-len(window) :]  # the last places of the probes stand for the window
    first = used.find(b"\xff")
    if first < 0:
        return b""
    kept = int.from_bytes(window, "little") & int.from_bytes(used, "little")
    return kept.to_bytes(len(window), "little")[first:]


def _copied(low: bytes, high: bytes) -> "array[int]":
    """The pairs of bytes that differ. Long integers combine bytes faster than any loop over them."""
    size = len(low)
    low_bits, high_bits = int.from_bytes(low, "little"), int.from_bytes(high, "little")
    differ = int.from_bytes((low_bits ^ high_bits).to_bytes(size, "little").translate(_FILL), "little")
    lows = (low_bits & differ).to_bytes(size, "little").translate(None, b"\0")
    pairs = bytearray(2 * len(lows))
    pairs[_LOW::2] = lows
    pairs[_HIGH::2] = (high_bits & differ).to_bytes(size, "little").translate(None, b"\0")
    return array("H", bytes(pairs))


def _mask(pairs: "array[int]") -> bytes:
    """A byte for each place: 0xff if it is among `pairs`, else 0."""
    marks = bytearray(1 << 16)
    for pair in pairs:
        marks[pair] = 0xFF
    return b"".join([marks[row.start : row.stop] for row in _ROWS])
