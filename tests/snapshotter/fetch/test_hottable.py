"""A hot set as its prefetch asks it."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from blockindex.hotset import HotExtent, HotLayer, HotSet, image_key
from blockindex.model import BLOCK
from snapshotter.blockstore import LayerRecord
from snapshotter.fetch.hottable import HotTable
from snapshotter.model import Digest

LAYERS = tuple(HotLayer("sha256:" + name * 64, 100, "sha256:" + name * 64) for name in "abc")
KEY = image_key([layer.digest for layer in LAYERS])


def table(*extents: tuple[int, int, int]) -> HotTable:
    """Of extents (layer, start, end) in this order."""
    return HotTable(HotSet(KEY, "", "default", LAYERS, tuple(HotExtent(*extent, 0) for extent in extents), 1))


def record(layer: HotLayer) -> LayerRecord:
    return LayerRecord(Digest(layer.digest), 1, BLOCK, layer.blocks * BLOCK, (), (), layer.layout)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(1, 10)), max_size=20))
def test_the_row_of_every_block_is_that_of_its_extent(wanted: list[tuple[int, int, int]]) -> None:
    taken: dict[tuple[int, int], int] = {}
    extents: list[tuple[int, int, int]] = []
    for layer, tenth, size in wanted:
        blocks = [(layer, block) for block in range(10 * tenth, 10 * tenth + size)]
        if not taken.keys() & set(blocks):
            taken |= dict.fromkeys(blocks, len(extents))
            extents.append((layer, 10 * tenth, 10 * tenth + size))
    found = table(*extents)
    assert all(found.row_of(layer, block) == taken.get((layer, block)) for layer in range(4) for block in range(101))
    assert found.layers == {layer for layer, _, _ in extents}


def test_extents_of_a_layer_keep_the_order_of_the_set() -> None:
    assert table((1, 50, 60), (0, 1, 2), (1, 0, 5)).blocks_of(1) == [(50, 60), (0, 5)]
    assert table((1, 50, 60)).blocks_of(2) == []


def test_most_of_an_image_is_whole() -> None:
    assert not table((0, 0, 100), (1, 0, 79)).is_whole
    assert table((0, 0, 100), (1, 0, 80)).is_whole


def test_only_a_layer_of_the_same_layout_and_size_fits() -> None:
    found = table((0, 0, 10), (1, 0, 10))
    assert found.fits(0, record(LAYERS[0]))
    assert not found.fits(0, record(replace(LAYERS[0], layout=LAYERS[1].layout)))
    assert not found.fits(1, record(replace(LAYERS[1], blocks=99)))
    assert found.fits(2, record(replace(LAYERS[2], blocks=5))), "the set has nothing to say of it"


def test_it_shows_whose_it_is() -> None:
    assert KEY in repr(table())
