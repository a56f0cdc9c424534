"""Sets out of recordings, block by block: which blocks `default` has, and which it forgets."""

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from blockindex.hotset import HotSet
from snapshotter.workload.mixing import capped, default_set, own_set, recent
from tests.blockindex.hotsets import hotset

BLOCKS = (40, 25)
Block = tuple[int, int]


@st.composite
def records(draw: st.DrawFn) -> HotSet:
    """A recording of an image of two layers."""
    rows, time_ms = [], 0
    free = {(layer, block) for layer, count in enumerate(BLOCKS) for block in range(count)}
    for layer, start, size in draw(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 39), st.integers(1, 9)))):
        run = [(layer, block) for block in range(start, start + size)]
        if all(it in free for it in run):
            free -= set(run)
            time_ms += draw(st.integers(0, 100))
            rows.append((layer, start, start + size, time_ms))
    return hotset(BLOCKS, *rows)


def blocks(it: HotSet) -> set[Block]:
    return {(extent.layer, block) for extent in it.extents for block in range(extent.start, extent.end)}


def first_touch(its: list[HotSet]) -> dict[Block, int]:
    """The earliest time of each block."""
    times: dict[Block, int] = {}
    for it in its:
        for extent in it.extents:
            for block in range(extent.start, extent.end):
                place = (extent.layer, block)
                times[place] = min(times.get(place, extent.time_ms), extent.time_ms)
    return times


@settings(deadline=None)
@given(st.lists(records(), min_size=1, max_size=5), st.integers(0, 70))
def test_the_cap_keeps_what_more_recordings_have(its: list[HotSet], most: int) -> None:
    made = capped(its, most)
    made.validate()
    found = blocks(made)
    count = Counter(place for it in its for place in blocks(it))
    assert len(found) == min(most, len(count)), "as many as there may be"
    assert found <= set(count)
    left = set(count) - found
    if found and left:
        assert min(count[place] for place in found) >= max(count[place] for place in left)


@settings(deadline=None)
@given(records(), st.integers(0, 70))
def test_of_equal_blocks_those_touched_first_are_kept(it: HotSet, most: int) -> None:
    found, times = blocks(capped([it], most)), first_touch([it])
    late = max((times[place] for place in found), default=0)
    assert all(times[place] >= late for place in set(times) - found)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abcd"), st.lists(records(), min_size=1, max_size=5), min_size=1))
def test_default_ages(its: dict[str, list[HotSet]]) -> None:
    """At most so many recordings count; each workload's newest before anybody's second newest."""
    for most in range(1, 8):
        counted = recent(its, most)
        assert len(counted) == min(most, sum(map(len, its.values())))
        places = [(rank, it) for found in its.values() for rank, it in enumerate(found)]
        ranks = [rank for rank, it in places if any(it is one for one in counted)]
        left = [rank for rank, it in places if all(it is not one for one in counted)]
        assert not left or max(ranks) <= min(left)
        made = default_set(its, most, 1 << 20, 1.0)
        assert blocks(made) == {place for it in counted for place in blocks(it)}


def test_a_new_recording_makes_an_old_one_fall_out() -> None:
    old, *new = (hotset(BLOCKS, (0, number, number + 1, 0)) for number in range(4))
    assert blocks(default_set({"a": [old]}, 3, 100, 1.0)) == {(0, 0)}
    assert blocks(default_set({"a": [*new, old]}, 3, 100, 1.0)) == {(0, 1), (0, 2), (0, 3)}
    assert blocks(default_set({"a": new, "b": [old]}, 3, 100, 1.0)) == {(0, 0), (0, 1), (0, 2)}


def test_default_is_capped_by_blocks_and_by_share() -> None:
    whole = replace(hotset(BLOCKS, (0, 0, 40, 0), (1, 0, 25, 5), workload="train"), argvs=("sha256:" + "0" * 64,))
    assert default_set({"train": [whole]}, 8, 10, 1.0).block_count == 10
    half = default_set({"train": [whole]}, 8, 1000, 0.5)
    assert half.block_count == 32 and blocks(half) <= {(0, block) for block in range(40)}
    assert (half.workload, half.argvs, half.records) == ("default", (), 1), "its arguments are the workloads' own"


def test_the_order_is_that_of_the_touches() -> None:
    early, late = hotset(BLOCKS, (1, 5, 6, 10), (0, 3, 4, 30)), hotset(BLOCKS, (0, 9, 10, 20), (1, 5, 6, 40))
    made = default_set({"a": [early], "b": [late]}, 8, 3, 1.0)
    assert [(it.layer, it.start) for it in made.extents] == [(1, 5), (0, 9), (0, 3)]


def test_a_workloads_own_set_has_all_its_recordings() -> None:
    one = replace(hotset(BLOCKS, (0, 0, 2, 0), workload="w"), argvs=("sha256:" + "0" * 64,))
    two = replace(hotset(BLOCKS, (1, 4, 5, 0), workload="w"), argvs=("sha256:" + "1" * 64,))
    made = own_set([one, two])
    assert blocks(made) == blocks(one) | blocks(two)
    assert (made.workload, made.records, made.argvs) == ("w", 2, one.argvs + two.argvs)


def test_recordings_of_another_layout_are_left_out() -> None:
    new = hotset(BLOCKS, (0, 0, 2, 0))
    old = hotset(BLOCKS, (0, 7, 9, 0))
    old = replace(old, layers=tuple(replace(layer, layout=layer.digest) for layer in old.layers))
    assert blocks(own_set([new, old])) == blocks(new)
    assert blocks(default_set({"a": [new], "b": [old]}, 8, 100, 1.0)) == blocks(new)
