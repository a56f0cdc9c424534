"""Bits: where blocks begin, and starting there."""

import random
import zlib

import pytest
from isal import isal_zlib

from blockindex.deflate import WINDOW_SIZE, Inflater, restart_prefix
from blockindex.errors import Corrupt
from blockindex.inflatelib import InflateLibrary, system_zlib, zlib_ng


class Bits:
    """Deflate bits by hand."""

    def __init__(self) -> None:
        self.bits: list[int] = []

    def number(self, value: int, count: int) -> None:
        self.bits += [value >> place & 1 for place in range(count)]

    def code(self, value: int, count: int) -> None:
        """Huffman codes go in from their high bit."""
        self.bits += [value >> place & 1 for place in reversed(range(count))]

    def data(self) -> bytes:
        padded = self.bits + [0] * (-len(self.bits) % 8)
        groups = (padded[i : i + 8] for i in range(0, len(padded), 8))
        return bytes(sum(bit << place for place, bit in enumerate(group)) for group in groups)


def stored_at_every_bit() -> tuple[bytes, list[tuple[int, int]], bytes]:
    """A raw stream of stored blocks, each of which begins at another bit of its byte, with fixed blocks between; the
    stored blocks' first bits as (bit offset, bytes of output before), and the output."""
    bits, output, places = Bits(), bytearray(), []
    rng = random.Random(1)
    for nines in range(8):  # a 9-bit literal each shifts what follows by one bit
        bits.number(0b010, 3)
        for _ in range(nines):
            bits.code(0b110010000 + 5, 9)
            output.append(144 + 5)
        bits.code(0, 7)
        places.append((len(bits.bits), len(output)))
        payload = rng.randbytes(300)
        bits.number(1 if nines == 7 else 0, 3)
        bits.number(0, -len(bits.bits) % 8)
        bits.number(len(payload), 16)
        bits.number(len(payload) ^ 0xFFFF, 16)
        for byte in payload:
            bits.number(byte, 8)
        output += payload
    return bits.data(), places, bytes(output)


def test_stored_blocks_after_a_restart_at_every_bit() -> None:
    raw, places, output = stored_at_every_bit()
    assert zlib.decompress(raw, -15) == output
    assert {place % 8 for place, _ in places} == set(range(8))
    for place, before in places:
        byte, bit = divmod(place, 8)
        stream = restart_prefix(bit, raw[byte]) + raw[byte + 1 :]
        for decode in (zlib.decompressobj, isal_zlib.decompressobj):
            decoder = decode(wbits=-15, zdict=b"dictionary")
            assert decoder.decompress(stream) == output[before:]
            assert decoder.eof
        one_by_one = isal_zlib.decompressobj(wbits=-15, zdict=b"dictionary")
        assert b"".join(one_by_one.decompress(bytes((value,))) for value in stream) == output[before:]


@pytest.mark.parametrize("bit", range(8))
def test_the_bits_of_the_block_before_are_ignored(bit: int) -> None:
    assert len({restart_prefix(bit, 0b10100000 & (0xFF << bit) | low) for low in range(1 << bit)}) == 1


@pytest.fixture(params=[zlib_ng, system_zlib])
def library(request: pytest.FixtureRequest) -> InflateLibrary:
    """Each C library that inflates for us."""
    found: InflateLibrary | None = request.param()
    assert found is not None, "the Python package zlib-ng is a dependency and must export its library"
    return found


def raw_deflate(data: bytes) -> bytes:
    return zlib.compress(data, 6, wbits=-15)


def test_inflater_stops_at_each_boundary_with_its_window(library: InflateLibrary) -> None:
    data = b"".join(b"%d %d\n" % (number, number * number) for number in range(60_000))
    blob = raw_deflate(data)
    inflater = Inflater(library)
    buffer = bytearray(len(data) + 1)
    inflater.give(blob, 0)
    inflater.aim(buffer)
    boundaries = 0
    while not inflater.step():
        assert inflater.at_boundary
        boundaries += 1
        made = len(buffer) - inflater.room
        assert inflater.window() == data[max(made - WINDOW_SIZE, 0) : made]
        if not inflater.after_last_block:
            used = len(blob) - inflater.unread
            start, bit = (used - 1, 8 - inflater.unused_bits) if inflater.unused_bits else (used, 0)
            decoder = zlib.decompressobj(wbits=-15, zdict=inflater.window())
            assert decoder.decompress(restart_prefix(bit, blob[start]) + blob[start + 1 :]) == data[made:]
    assert boundaries > 5
    assert bytes(buffer[: len(data)]) == data and inflater.unread == 0


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_inflater_goes_on_where_input_and_room_end(library: InflateLibrary, chunk: int) -> None:
    """Both in small parts, the next stream right behind: not a byte of it is taken."""
    data = random.Random(7).randbytes(500) * 20
    blob = raw_deflate(data) + b"next"
    inflater = Inflater(library)
    out = bytearray()
    position, ended = 0, False
    while not ended:
        part = blob[position : position + chunk]
        inflater.give(part, 0)
        while True:
            room = bytearray(chunk)
            inflater.aim(room)
            ended = inflater.step()
            made = len(room) - inflater.room
            out += room[:made]
            if ended or not (made or inflater.at_boundary):
                break
        position += len(part) - inflater.unread
    assert out == data
    assert blob[position:] == b"next"


def test_inflater_refuses_what_is_no_deflate(library: InflateLibrary) -> None:
    inflater = Inflater(library)
    inflater.give(b"\x07", 0)  # a block of the type that does not exist
    inflater.aim(bytearray(100))
    with pytest.raises(Corrupt, match="gzip"):
        inflater.step()


def test_inflating_with_blanks(library: InflateLibrary) -> None:
    """A stream whose output repeats its window, then itself: repetitions of what was blanked are blank."""
    window = random.Random(9).randbytes(WINDOW_SIZE)
    data = window[2000:3000] * 2 + b"fresh" * 200
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15, zdict=window)
    blob = compressor.compress(data) + compressor.flush()
    inflater = Inflater(library)
    place = window + bytes(WINDOW_SIZE)
    assert inflater.inflate_blanking(blob, place, len(data), len(data)) == data
    assert inflater.inflate_blanking(blob, place, len(data), 1000)[:2000] == data[:1000] + bytes(1000)
    assert inflater.inflate_blanking(blob, place, 1500, 1400) == data[:1400] + bytes(100), "only from then on"
    with pytest.raises(Corrupt):
        inflater.inflate_blanking(blob[:20], place, len(data), 1000)
