"""Hot set files, read by the naive decoder: docs/format.md says enough to write one, and blockindex obeys it."""

import hashlib
import io
import struct

import lz4.block
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockindex.hotpack import Codec, decode_frame, decode_pack, encode_hotset, write_pack
from blockindex.hotset import HotSet
from tests.blockindex.hotsets import block_content, hotset, hotsets, read_blocks
from tests.blockindex.naive import BLOCK, read_hotset, read_index, unlz4
from tests.blockindex.test_naive import GOLDEN, LAYER, data_region

GOLDENS = {codec: GOLDEN.with_name(f"golden-v1-{codec.value}.bsh") for codec in (Codec.ZSTD, Codec.LZ4)}


def rows(it: HotSet) -> list[tuple[int, int, int, int]]:
    return [(extent.layer, extent.start, extent.end, extent.time_ms) for extent in it.extents]


@pytest.mark.parametrize("codec", GOLDENS)
def test_the_golden_files(codec: Codec) -> None:
    """A hot set of the golden layer, between two layers without hot blocks."""
    data = GOLDENS[codec].read_bytes()
    naive, ours = read_hotset(data), decode_pack(data)
    assert ours.codec is codec and len(ours.frames) == 5
    assert naive.extents == rows(ours.hotset) and len(naive.extents) == 10
    assert [
        (f"sha256:{digest.hex()}", blocks, f"sha256:{layout.hex()}") for digest, layout, blocks in naive.layers
    ] == [(layer.digest, layer.blocks, layer.layout) for layer in ours.hotset.layers]
    assert (ours.hotset.workload, ours.hotset.records) == ("golden.v1", 300)
    assert naive.head[3] == [b"golden.v1"] and naive.head[4] == [300] and naive.head[2] == [b"\x3d" * 32]
    blocks = {}
    for frame in ours.frames:
        for extent, view in decode_frame(ours, frame, data[frame.offset : frame.offset + frame.size]):
            for number, block in enumerate(range(extent.start, extent.end)):
                blocks[extent.layer, block] = bytes(view[number * BLOCK : (number + 1) * BLOCK])
    assert naive.blocks == blocks


def test_the_golden_files_hold_the_golden_layer() -> None:
    index = read_index(GOLDEN.read_bytes())
    region = data_region(index, LAYER)
    for path in GOLDENS.values():
        naive = read_hotset(path.read_bytes())
        assert {layer for layer, _ in naive.blocks} == {1}, "only the middle layer has hot blocks"
        for (_, block), data in naive.blocks.items():
            assert data == region[block * BLOCK : (block + 1) * BLOCK]
        digest, layout, blocks = naive.layers[1]
        assert digest == hashlib.sha256(LAYER).digest() and blocks * BLOCK == index.data_size
        name = hashlib.sha256(struct.pack("<Q", index.data_size))
        for column in (0, 1, 2):
            name.update(b"".join(struct.pack("<Q", row[column]) for row in index.files))
        assert layout == name.digest()


def test_the_golden_files_are_worth_their_name() -> None:
    """They hold what is easily read wrong."""
    naive = read_hotset(GOLDENS[Codec.LZ4].read_bytes())
    starts = [start for _, start, _, _ in naive.extents]
    ends = [end for _, _, end, _ in naive.extents]
    assert any(start < end for start, end in zip(starts[1:], ends, strict=False)), "a jump back"
    assert any(left == right for left, right in zip(starts[1:], ends, strict=False)), "an extent that was split"
    times = [time_ms for *_, time_ms in naive.extents]
    assert max(times) > 1 << 16 and len(set(times)) < len(times)
    assert 0 in {blocks for _, _, blocks in naive.layers}


@pytest.mark.parametrize("codec", Codec)
@settings(deadline=None, max_examples=25)
@given(it=hotsets(), first=st.sampled_from([1, 3]))
def test_any_file(codec: Codec, it: HotSet, first: int) -> None:
    out = io.BytesIO()
    made = write_pack(it, read_blocks, codec, out, level=1, first_frame=first * BLOCK, frame=12 * BLOCK)
    naive = read_hotset(out.getvalue())
    assert naive.extents == rows(made.hotset)
    places = {(layer, block) for layer, start, end, _ in naive.extents for block in range(start, end)}
    assert naive.blocks == ({} if codec is Codec.NONE else {place: block_content(*place) for place in places})
    bare = read_hotset(encode_hotset(it))
    assert bare.extents == rows(it)
    assert bare.head.get(13, []) == ([bytes.fromhex(it.carried_from[7:])] if it.carried_from else [])
    assert b"".join(bare.head.get(14, [])) == b"".join(bytes.fromhex(argv[7:]) for argv in it.argvs)


def test_the_naive_lz4() -> None:
    for data in (b"", b"a", bytes(5000), bytes(range(256)) * 20, b"abcd" * 1000 + bytes(300) + bytes(range(200))):
        assert unlz4(lz4.block.compress(data, store_size=False)) == data


def test_a_set_of_no_layers() -> None:
    assert read_hotset(encode_hotset(hotset(()))).layers == []
