"""Hot sets: keys and names, first-touch order, and the algebra against plain sets of blocks."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockindex import hotset as module
from blockindex.errors import BlockIndexError, Corrupt, Unsupported
from blockindex.hotset import (
    HotExtent,
    HotLayer,
    HotSet,
    coalesced,
    fitted,
    from_touches,
    hotset_name,
    image_key,
    includes,
    merge,
    without,
)
from tests.blockindex.hotsets import hotset, hotsets, layer_digest

A, B = layer_digest(0), layer_digest(1)
HEX = "0123456789abcdef" * 4


def blocks_of(it: HotSet) -> list[tuple[int, int]]:
    """(layer, block) in first-touch order."""
    return [(extent.layer, block) for extent in it.extents for block in range(extent.start, extent.end)]


def rows(it: HotSet) -> list[tuple[int, int, int, int]]:
    return [(extent.layer, extent.start, extent.end, extent.time_ms) for extent in it.extents]


def test_the_key_is_that_of_the_layers_each_once() -> None:

    a, b = "sha256:" + "a" * 64, "sha256:" + "b" * 64
    assert image_key([a, b]) == "sha256:4ab61be5d46a66e7f659b66144d4bead5b761c247b565fa202161590dcd9e45d"
    assert image_key([a, b, a, b]) == image_key([a, b])
    assert image_key([a, b]) != image_key([b, a])
    assert image_key([]) == "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_names() -> None:
    assert hotset_name(f"sha256:{HEX}", "default") == f"hot/{HEX}/default.bsh"
    assert hotset_name(f"sha256:{HEX}", "a.b_c-1") == f"hot/{HEX}/a.b_c-1.bsh"


@pytest.mark.parametrize(
    "key", ["", HEX, f"sha256:{HEX[:-1]}", f"sha256:{HEX.upper()}", f"sha256:{HEX}\n", "sha256:.."]
)
def test_keys_that_are_none(key: str) -> None:
    with pytest.raises(Corrupt, match="image_key"):
        hotset_name(key, "default")


@pytest.mark.parametrize("workload", ["", "..", "../x", "a/b", ".hidden", "-x", "A", "a" * 65, "a\n", "é"])
def test_workloads_that_are_none(workload: str) -> None:
    with pytest.raises(Corrupt, match="workload"):
        hotset_name(f"sha256:{HEX}", workload)


def test_touches_count_once_in_order() -> None:
    layers = (HotLayer(A, 100, B), HotLayer(B, 10, B))
    touches = [
        (0, 10, 14, 0),
        (0, 14, 16, 3),  # goes on: joins
        (1, 0, 4, 5),
        (0, 8, 20, 6),  # around what is there: two new ends
        (0, 9, 19, 7),  # nothing new
        (1, 2, 99, 9),  # beyond the end
        (0, 5, 5, 11),  # empty
        (1, 0, 10, 12),
    ]
    made = from_touches(layers, touches, workload="w", manifest=A)
    assert rows(made) == [(0, 10, 16, 0), (1, 0, 4, 5), (0, 8, 10, 6), (0, 16, 20, 6), (1, 4, 10, 9)]
    assert (made.workload, made.manifest, made.records, made.image_key) == ("w", A, 1, image_key([A, B]))
    made.validate()


def test_a_clock_that_goes_back_stands_still() -> None:
    made = from_touches((HotLayer(A, 100, B),), [(0, 0, 1, 50), (0, 5, 6, 20), (0, 9, 10, 1 << 40), (0, 20, 21, 60)])
    assert [extent.time_ms for extent in made.extents] == [50, 50, 2**32 - 1, 2**32 - 1]
    made.validate()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-3, 60), st.integers(-3, 60), st.integers(0, 9)), max_size=60))
def test_touches_against_a_plain_set(touches: list[tuple[int, int, int, int]]) -> None:
    made = from_touches([HotLayer(layer_digest(number), 50, A) for number in range(3)], touches)
    made.validate()
    expected: dict[tuple[int, int], None] = {}
    for layer, start, end, _ in touches:
        for block in range(max(start, 0), min(end, 50)):
            expected.setdefault((layer, block))
    assert blocks_of(made) == list(expected)


def test_small_gaps_are_closed() -> None:
    made = hotset((100, 100), (0, 50, 60, 1), (1, 0, 1, 2), (0, 10, 20, 3), (0, 62, 70, 4), (0, 23, 30, 5))
    assert rows(coalesced(made, 2)) == [(0, 50, 70, 1), (1, 0, 1, 2), (0, 10, 20, 3), (0, 23, 30, 5)]
    assert rows(coalesced(made, 3)) == [(0, 50, 70, 1), (1, 0, 1, 2), (0, 10, 30, 3)]
    late = hotset((100,), (0, 50, 60, 1), (0, 0, 5, 2), (0, 40, 50, 9))
    assert rows(coalesced(late, 0)) == [(0, 40, 60, 1), (0, 0, 5, 2)]


@settings(deadline=None, max_examples=60)
@given(hotsets(), st.integers(0, 40))
def test_coalesced_holds_what_was_there_and_only_small_gaps(it: HotSet, gap: int) -> None:
    made = coalesced(it, gap)
    made.validate()
    assert set(blocks_of(made)) >= set(blocks_of(it))
    for layer, extents in enumerate(made.by_layer()):
        edges = sorted((extent.start, extent.end) for extent in extents)
        assert all(right[0] - left[1] > gap for left, right in pairwise(edges))
        kept = sorted(e for row in it.by_layer()[layer] for e in (row.start, row.end))
        assert all(start in kept and end in kept for start, end in edges)
    first = [next(row for row, e in enumerate(it.extents) if _within(e, extent)) for extent in made.extents]
    assert first == sorted(first)
    assert [it.extents[row].time_ms for row in first] == [extent.time_ms for extent in made.extents]


def _within(inner: HotExtent, outer: HotExtent) -> bool:
    return inner.layer == outer.layer and outer.start <= inner.start and inner.end <= outer.end


@settings(deadline=None, max_examples=60)
@given(hotsets(), st.integers(0, 6))
def test_fitted_has_no_more_extents_than_fit(it: HotSet, most: int) -> None:
    made = fitted(it, most)
    made.validate()
    assert len(made.extents) <= max(most, len(it.layers))
    assert set(blocks_of(made)) >= set(blocks_of(it))
    if len(it.extents) <= most:
        assert made == it


@settings(deadline=None, max_examples=60)
@given(hotsets(), st.data())
def test_without_what_is_there(it: HotSet, data: st.DataObject) -> None:
    present: list[bytes | None] = [
        data.draw(
            st.none() | st.lists(st.sampled_from([0, 1, 2]), min_size=layer.blocks, max_size=layer.blocks).map(bytes)
        )
        for layer in it.layers
    ]
    made = without(it, present)
    made.validate()
    states = [bytes(10_000) if found is None else found for found in present]
    assert blocks_of(made) == [(layer, block) for layer, block in blocks_of(it) if states[layer][block] != 1]


def test_what_a_set_includes() -> None:
    whole = hotset((100, 50), (0, 10, 20, 0), (1, 0, 5, 1), (0, 20, 30, 2))
    assert includes(whole, hotset((100, 50), (0, 15, 25, 0), (1, 4, 5, 0)))
    assert includes(whole, whole) and includes(whole, hotset((100, 50)))
    assert not includes(whole, hotset((100, 50), (0, 29, 31, 0)))
    assert not includes(whole, hotset((100, 51), (0, 15, 25, 0))), "other layers"


def test_without_a_map_that_is_too_short() -> None:
    assert rows(without(hotset((10,), (0, 2, 8, 0)), [b"\1\1\1\1"])) == [(0, 4, 8, 0)]


def test_merged_by_share_and_median_time() -> None:
    one = hotset((100,), (0, 0, 10, 0), (0, 50, 60, 30), records=1)
    two = hotset((100,), (0, 50, 60, 5), (0, 5, 20, 8), records=1)
    three = hotset((100,), (0, 55, 58, 2), (0, 90, 91, 4), records=2, manifest=A)
    any_ = merge([one, two, three])
    assert set(blocks_of(any_)) == {(0, block) for block in (*range(20), *range(50, 60), 90)}
    assert (any_.records, any_.manifest, any_.workload) == (4, A, "default")
    assert rows(any_) == [(0, 0, 10, 0), (0, 55, 58, 2), (0, 90, 91, 4), (0, 50, 55, 5), (0, 58, 60, 5), (0, 10, 20, 8)]
    half = merge([one, two, three], min_share=0.5)
    assert set(blocks_of(half)) == {(0, block) for block in (*range(5, 10), *range(50, 60), 90)}
    most = merge([one, two, three], min_share=1.0)
    assert rows(most) == [(0, 55, 58, 2)]
    weighed = merge([one, two, three], weights=[8, 1, 1], min_share=0.5)
    assert rows(weighed) == [(0, 0, 10, 0), (0, 50, 60, 30)]


@settings(deadline=None, max_examples=60)
@given(st.lists(hotsets(), min_size=1, max_size=4), st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_merge_against_counting_blocks(found: list[HotSet], share: float) -> None:
    first = found[0]
    same = [first, *(replace(it, layers=first.layers, image_key=first.image_key) for it in found[1:])]
    same = [
        replace(
            it, extents=tuple(e for e in it.extents if e.layer < len(it.layers) and e.end <= it.layers[e.layer].blocks)
        )
        for it in same
    ]
    made = merge(same, min_share=share)
    made.validate()
    total = sum(it.records for it in same)
    weight: dict[tuple[int, int], int] = {}
    for it in same:
        for place in blocks_of(it):
            weight[place] = weight.get(place, 0) + it.records
    assert set(blocks_of(made)) == {place for place, have in weight.items() if have >= share * total}
    assert made.records == total


@settings(deadline=None, max_examples=60)
@given(hotsets())
def test_merging_a_set_with_itself_changes_no_order(it: HotSet) -> None:
    assert blocks_of(merge([it, it, it])) == blocks_of(merge([it]))


def test_what_is_merged_with_a_record_is_no_guess_any_more() -> None:
    record = hotset((10,), (0, 1, 2, 0))
    guess, other = replace(record, carried_from=A), replace(record, carried_from=layer_digest(9))
    assert [merge(sets).carried_from for sets in ([guess, other], [guess, record], [record, guess])] == [A, "", ""]


def test_other_images_are_not_merged() -> None:
    with pytest.raises(Unsupported, match="different images"):
        merge([hotset((10,)), hotset((11,))])
    other = replace(hotset((10,)), layers=(replace(hotset((10,)).layers[0], layout=A),))
    with pytest.raises(Unsupported, match="laid out differently"):
        merge([hotset((10,)), other])


def test_sums() -> None:
    it = hotset((100, 5), (0, 0, 10, 0), (1, 2, 3, 1), (0, 20, 21, 2))
    assert (it.block_count, it.hot_bytes) == (12, 12 * 4096)
    assert [[e.start for e in found] for found in it.by_layer()] == [[0, 20], [2]]
    assert "extents" not in repr(it)


GOOD = hotset((100, 5), (0, 0, 10, 0), (1, 2, 3, 1), (0, 20, 21, 2))


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("image_key", replace(GOOD, image_key=A)),
        ("manifest", replace(GOOD, manifest="sha256:12")),
        ("carried_from", replace(GOOD, carried_from="sha256:12")),
        ("workload", replace(GOOD, workload="../x")),
        ("records", replace(GOOD, records=0)),
        ("records", replace(GOOD, records=1 << 31)),
        ("layers", replace(GOOD, layers=(HotLayer("sha512:1", 1, A), GOOD.layers[1]))),
        ("layers", replace(GOOD, layers=(GOOD.layers[1], GOOD.layers[1]))),
        ("layouts", replace(GOOD, layers=(replace(GOOD.layers[0], layout=""), GOOD.layers[1]))),
        ("layers", replace(GOOD, layers=(replace(GOOD.layers[0], blocks=1 << 32), GOOD.layers[1]))),
        ("extents.layer", hotset((10,), (1, 0, 1, 0))),
        ("extents.layer", hotset((10,), (-1, 0, 1, 0))),
        ("extents", hotset((10,), (0, -1, 1, 0))),
        ("extents", hotset((10,), (0, 3, 3, 0))),
        ("extents", hotset((10,), (0, 4, 3, 0))),
        ("extents", hotset((10,), (0, 9, 11, 0))),
        ("extents", hotset((10,), (0, 0, 5, 0), (0, 4, 6, 0))),
        ("extents", hotset((10,), (0, 0, 9, 0), (0, 4, 6, 0))),
        ("extents", hotset((10,), (0, 4, 6, 0), (0, 4, 6, 0))),
        ("extents.time", hotset((10,), (0, 0, 1, 5), (0, 2, 3, 4))),
        ("extents.time", hotset((10,), (0, 0, 1, -1))),
        ("extents.time", hotset((10,), (0, 0, 1, 1 << 32))),
    ],
)
def test_what_validate_refuses(field: str, wrong: HotSet) -> None:
    with pytest.raises(Corrupt) as caught:
        wrong.validate()
    assert caught.value.field == field


def test_sets_beyond_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    GOOD.validate()
    for name, limit in (("MAX_EXTENTS", 2), ("MAX_LAYERS", 1)):
        with monkeypatch.context() as patched, pytest.raises(Unsupported, match="too large") as caught:
            patched.setattr(module, name, limit)
            GOOD.validate()
        assert isinstance(caught.value, BlockIndexError)
