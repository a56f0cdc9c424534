"""Trimming: exactly the bytes that are referred to stay, found here by changing each byte of the window in turn."""

import random
import zlib

import pytest

from blockindex.deflate import WINDOW_SIZE, restart_prefix
from blockindex.windows import trim_window
from tests.blockindex.test_deflate import Bits


def referred_to(window: bytes, blob: bytes, size: int) -> set[int]:
    """The places of `window` whose change changes the first `size` bytes that `blob` inflates to."""
    expected = inflated(window, blob, size)
    found = set()
    for place in range(len(window)):
        changed = bytearray(window)
        changed[place] ^= 0xFF
        if inflated(bytes(changed), blob, size) != expected:
            found.add(place)
    return found


def inflated(window: bytes, blob: bytes, size: int) -> bytes:
    return zlib.decompressobj(wbits=-15, zdict=window).decompress(blob, size)


def deflated(window: bytes, data: bytes, level: int = 9) -> bytes:
    compressor = zlib.compressobj(level, zlib.DEFLATED, -15, zdict=window)
    return compressor.compress(data) + compressor.flush()


def expected_window(window: bytes, used: set[int]) -> bytes:
    kept = bytes(byte if place in used else 0 for place, byte in enumerate(window))
    return kept[min(used, default=len(window)) :]


@pytest.mark.parametrize("seed", range(12))
def test_exactly_what_is_referred_to_stays(seed: int) -> None:
    """Windows of all sizes; output that repeats stretches of them, of itself, and fresh bytes, also zeros."""
    rng = random.Random(seed)
    window = bytes(rng.choices(range(rng.choice((2, 40, 256))), k=rng.choice((1, 5, 254, 255, 256, 700, 2000))))
    data = bytearray()
    while len(data) < rng.choice((50, 5000)):
        source = rng.choice((window, bytes(data), rng.randbytes(30), bytes(40)))
        start = rng.randrange(len(source)) if source else 0
        data += source[start : start + rng.randrange(1, 300)]
    blob = deflated(window, bytes(data), rng.choice((1, 6, 9)))
    for tail in (1, len(data) // 2, len(data)):
        used = referred_to(window, blob, tail)
        assert trim_window(window, 0, blob, tail) == expected_window(window, used)


def repeated(count: int) -> bytes:
    """A deflate stream by hand: `count` matches of 258 bytes, each from 32,768 bytes back, as zlib never makes them."""
    bits = Bits()
    bits.number(0b011, 3)  # the last block, fixed codes
    for _ in range(count):
        bits.code(0b11000000 + 285 - 280, 8)  # length 258
        bits.code(29, 5)
        bits.number(32_768 - 24_577, 13)
    bits.code(0, 7)
    return bits.data()


def test_every_place_of_a_full_window_can_be_told() -> None:
    """The output is the window, whole or up to some place."""
    window = random.Random(3).randbytes(WINDOW_SIZE)
    blob = repeated(-(-WINDOW_SIZE // 258))
    for size in (WINDOW_SIZE, WINDOW_SIZE - 1, 1, 254, 255, 256, 2048, 2049, 20_000):
        assert trim_window(window, 0, blob, size) == window[:size] + bytes(WINDOW_SIZE - size)


def test_nothing_stays_of_a_window_nobody_needs() -> None:
    assert trim_window(bytes(range(256)), 0, deflated(b"", b"fresh"), 5) == b""
    assert trim_window(b"", 0, deflated(b"", b"fresh"), 5) == b""


@pytest.mark.parametrize("bit", range(8))
def test_a_point_inside_a_byte(bit: int) -> None:
    """The first bits are another block's."""
    window = random.Random(bit).randbytes(500)
    blob = deflated(window, window[100:160])
    number = int.from_bytes(blob, "little") << bit | random.Random(bit).getrandbits(bit)
    shifted = number.to_bytes(len(blob) + 1, "little")
    assert inflated(window, restart_prefix(bit, shifted[0]) + shifted[1:], 60) == window[100:160]
    assert trim_window(window, bit, shifted, 60) == window[100:160] + bytes(340)
