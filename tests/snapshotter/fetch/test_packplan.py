"""The bookkeeping of a prefetch: nothing twice, nothing forgotten, whatever order bytes come in."""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockindex.hotpack import Codec, Frame, HotPack
from blockindex.hotset import HotExtent, HotLayer, HotSet, image_key
from snapshotter.fetch import packplan
from snapshotter.fetch.packplan import PackPlan
from snapshotter.fetch.underway import Segment, UnderWay

LAYER = "sha256:" + "1" * 64
KIB = 1 << 10


def pack_of(sizes: Iterable[int], head: int = 100) -> HotPack:
    """A pack whose frames have these sizes in the file, one block each."""
    frames, offset = [], head
    for number, size in enumerate(sizes):
        frames.append(Frame(number, number + 1, offset, size, 4096, bytes(32)))
        offset += size
    extents = tuple(HotExtent(0, number, number + 1, 0) for number in range(len(frames)))
    hotset = HotSet(image_key([LAYER]), "", "default", (HotLayer(LAYER, len(frames), LAYER),), extents, 1)
    return HotPack(hotset, Codec.ZSTD, tuple(frames), head, offset)


def content(pack: HotPack) -> bytes:
    """The pack's file: bytes that tell their place."""
    return bytes((place * 7 + place // 251) & 0xFF for place in range(pack.size))


class Wire:
    """Feeds a plan with the bytes of its pack, and counts what it asked for and what it gave."""

    def __init__(
        self,
        pack: HotPack,
        wanted: Iterable[int],
        streaming_to: int,
        far: bool = False,
        under_way: UnderWay | None = None,
    ) -> None:
        self.pack, self.data = pack, content(pack)
        self.wanted = set(wanted)
        self.plan = PackPlan(pack, self.wanted, streaming_to, far, under_way)
        self.asked = Counter[int]()
        self.whole: list[int] = []

    def feed(self, segment: Segment, size: int) -> None:
        """The segment's next `size` bytes come, and more if they reach beyond its end, as when it was cut."""
        chunk = self.data[segment.start : segment.start + size]
        self.asked.update(range(segment.start, min(segment.start + len(chunk), segment.end)))
        for number, data in self.plan.feed(segment, chunk):
            frame = self.pack.frames[number]
            assert bytes(data) == self.data[frame.offset : frame.offset + frame.size]
            assert number in self.wanted
            self.whole.append(number)
            self.plan.landed(number)

    def bring(self, segment: Segment) -> None:
        """All of it comes at once."""
        self.feed(segment, segment.end - segment.start)

    def finish(self) -> None:
        """All that is queued comes, one after another."""
        while (segment := self.plan.take()) is not None:
            self.bring(segment)

    def wanted_bytes(self) -> set[int]:
        frames = [self.pack.frames[number] for number in self.wanted]
        return {place for frame in frames for place in range(frame.offset, frame.offset + frame.size)}


def segments(plan: PackPlan) -> list[tuple[int, int]]:
    """What is asked for, in order."""
    found = []
    while (segment := plan.take()) is not None:
        found.append((segment.start, segment.end))
    return found


def test_the_first_segments_are_short_and_end_with_a_frame() -> None:
    pack = pack_of([100 * KIB] * 40)
    found = segments(PackPlan(pack, range(40), pack.head_size))
    assert [(end - start) // KIB for start, end in found] == [200, 500, 1000, 1100, 1200]
    assert found[0][0] == pack.head_size and found[-1][1] == pack.size
    assert all(left[1] == right[0] for left, right in pairwise(found))


def test_from_a_far_host_segments_grow_and_then_shrink() -> None:
    """The first are asked for at once; then a part of what is left, so that the last ones end together."""
    pack = pack_of([100 * KIB] * 100)
    found = segments(PackPlan(pack, range(100), pack.head_size, far=True))
    sizes = [(end - start) // KIB for start, end in found]
    assert sizes[:5] == [100, 200, 500, 500, 1000] and max(sizes) == 1000 and sizes[-2] == 200
    assert sizes[4:] == sorted(sizes[4:], reverse=True)
    assert found[0][0] == pack.head_size and found[-1][1] == pack.size
    assert all(left[1] == right[0] for left, right in pairwise(found))


def test_a_frame_larger_than_a_segment_is_asked_for_whole() -> None:
    pack = pack_of([3 << 20, 10, 3 << 20])
    assert sum(end - start for start, end in segments(PackPlan(pack, range(3), 100))) == pack.size - 100


def test_the_first_stream_may_end_within_a_frame() -> None:
    wire = Wire(pack_of([1000, 1000, 1000]), range(3), 1600)
    assert wire.plan.hurry(1) == (True, False), "its beginning is on the way"
    wire.bring(Segment(100, 1600))
    assert wire.whole == [0]
    [segment] = [wire.plan.take()]
    assert segment is not None and (segment.start, segment.end) == (1600, 3100)
    wire.bring(segment)
    assert wire.whole == [0, 1, 2] and wire.plan.left == 0


def test_the_two_halves_of_a_frame_may_come_in_any_order() -> None:
    wire = Wire(pack_of([1000, 1000]), range(2), 1600)
    wire.finish()
    assert wire.whole == []
    wire.bring(Segment(100, 1600))
    assert wire.whole == [0, 1] and wire.plan.left == 0


def test_a_server_without_ranges_sends_everything_at_once() -> None:
    pack = pack_of([1000] * 5)
    wire = Wire(pack, range(5), pack.size)
    assert wire.plan.take() is None
    wire.bring(Segment(0, pack.size))  # head and all
    assert wire.whole == [0, 1, 2, 3, 4] and wire.plan.left == 0


def test_frames_that_nobody_wants_are_passed_over() -> None:
    pack = pack_of([1000] * 6)
    wire = Wire(pack, [0, 3, 5], 1600)
    assert wire.plan.hurry(1) == (False, False) and wire.plan.left == 3
    wire.bring(Segment(100, 1600))
    wire.finish()
    assert wire.whole == [0, 3, 5] and wire.plan.left == 0
    assert sorted(wire.asked) == [*range(100, 1600), *range(3100, 4100), *range(5100, 6100)]


def test_nothing_wanted_is_nothing_left() -> None:
    plan = PackPlan(pack_of([1000] * 3), [], 100)
    assert (plan.left, plan.take()) == (0, None)


def test_who_hurries_is_first_and_takes_along_what_follows() -> None:
    pack = pack_of([100 * KIB] * 20)
    plan = PackPlan(pack, range(20), pack.head_size)
    at = pack.frames[9].offset
    assert plan.hurry(9) == (True, True)
    assert plan.hurry(9) == plan.hurry(10) == (True, False), "one request is enough"
    found = segments(plan)
    assert found[0][0] == at
    assert sorted(found)[0][0] == pack.head_size
    assert sum(end - start for start, end in found) == pack.size - pack.head_size
    assert plan.hurry(9) == plan.hurry(3) == (True, False), "on its way"


def test_a_frame_that_has_landed_is_not_on_its_way() -> None:
    wire = Wire(pack_of([1000]), [0], 100)
    wire.finish()
    assert wire.plan.hurry(0) == (False, False)


def test_what_broke_off_is_asked_for_next_from_where_it_stopped() -> None:
    wire = Wire(pack_of([200 * KIB] * 8), range(8), 100)
    segment = wire.plan.take()
    assert segment is not None
    wire.feed(segment, 150 * KIB)
    wire.plan.put_back(segment)
    again = wire.plan.take()
    assert again is not None and (again.start, again.attempts) == (100 + 150 * KIB, 1)
    wire.bring(again)
    wire.finish()
    assert set(wire.asked.values()) == {1} and wire.whole == list(range(8))


def test_frames_that_are_given_up_are_not_on_their_way_and_not_left() -> None:
    wire = Wire(pack_of([100 * KIB] * 6), range(6), 100)
    segment = wire.plan.take()
    assert segment is not None
    wire.feed(segment, 150 * KIB)
    wire.plan.drop(segment)
    assert wire.plan.hurry(1) == (False, False)
    assert wire.plan.left == 4 and wire.whole == [0]
    wire.bring(segment)  # it comes all the same
    wire.finish()
    assert 1 not in wire.whole and wire.plan.left == 0


def test_giving_everything_up_ends_it() -> None:
    wire = Wire(pack_of([100 * KIB] * 6), range(6), 100)
    segment = wire.plan.take()
    assert segment is not None
    wire.plan.drop_all()
    assert (wire.plan.left, wire.plan.take()) == (0, None)
    wire.bring(segment)
    assert wire.whole == [] and wire.plan.left == 0


def test_it_shows_what_is_left() -> None:
    assert repr(PackPlan(pack_of([10] * 3), [0, 2], 100)) == "<PackPlan 2 of 3 frames to come, 2 requests to make>"


def test_the_end_of_a_straggler_comes_by_another_request() -> None:
    """What it brings beyond its new end is passed over."""
    now = [0.0]
    wire = Wire(pack_of([100 * KIB] * 10), range(10), 100, under_way=UnderWay(0.01, lambda: now[0]))
    first, slow = wire.plan.take(), wire.plan.take()
    assert first is not None and slow is not None
    while wire.plan.left > 8:
        now[0] += 0.06
        wire.feed(first, 100 * KIB)
    assert wire.plan.relieve(2) is None, "something is queued"
    wire.finish()
    before = slow.end
    now[0] += 1.0
    assert wire.plan.look_again_s() is not None
    rest = wire.plan.relieve(2)
    assert rest is not None and rest.end == before and rest.start == slow.end
    wire.bring(rest)
    wire.feed(slow, before)
    assert slow.left == 0 and wire.plan.left == 0 and set(wire.asked.values()) == {1}
    assert wire.plan.look_again_s() is None and wire.plan.relieve(2) is None


class Relieving(UnderWay):
    """Takes any request for a straggler, when it is drawn so."""

    def __init__(self, data: st.DataObject) -> None:
        super().__init__()
        self._data = data

    def relieve(self, idle: int) -> Segment | None:
        long = [segment for segment in self._paces if segment.left > 1]
        if not long or self._data.draw(st.booleans()):
            return None
        slow = self._data.draw(st.sampled_from(long))
        cut = Segment(slow.start + self._data.draw(st.integers(0, slow.left - 1)), slow.end)
        slow.end = cut.start
        return cut


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_happens_each_byte_comes_once(data: st.DataObject) -> None:
    """Several requests under way; they are fed, broken off, given up; readers hurry frames; others bring some."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(packplan, "_FIRST", 50)
        patched.setattr(packplan, "_MOST", 200)
        for name, sizes in (("_FAR_FIRST", (30, 60)), ("_FAR_LEAST", 40), ("_FAR_MOST", 150)):
            patched.setattr(packplan, name, sizes)
        pack = pack_of(data.draw(st.lists(st.integers(1, 120), min_size=1, max_size=25)))
        wanted = data.draw(st.sets(st.sampled_from(range(len(pack.frames)))))
        streaming_to = data.draw(st.integers(pack.head_size, pack.size))
        wire = Wire(pack, wanted, streaming_to, data.draw(st.booleans()), Relieving(data))
        under_way = [Segment(pack.head_size, streaming_to)] if streaming_to > pack.head_size else []
        dropped: set[int] = set()
        while under_way or wire.plan.left:
            step = data.draw(st.sampled_from(["take", "feed", "feed", "break", "hurry", "drop", "skip"]))
            if step == "skip":
                numbers = data.draw(st.sets(st.sampled_from(range(len(pack.frames)))))
                dropped |= {number for number in numbers if wire.plan._states[number] == packplan._QUEUED}
                wire.plan.skip(numbers)
                continue
            if step == "take" or not under_way:
                segment = wire.plan.take() or wire.plan.relieve(2)
                if segment is not None:
                    under_way.append(segment)
                else:
                    assert under_way or not wire.plan.left, "frames are left that nobody brings"
                continue
            place = data.draw(st.integers(0, len(under_way) - 1))
            segment = under_way[place]
            if step == "hurry":
                number = data.draw(st.sampled_from(range(len(pack.frames))))
                coming, brought_forward = wire.plan.hurry(number)
                assert coming == (number in wanted - dropped - set(wire.whole))
                if brought_forward:
                    first = wire.plan.take()
                    assert first is not None and first.start == pack.frames[number].offset
                    under_way.append(first)
            elif step == "feed":
                wire.feed(segment, data.draw(st.integers(1, 90)))
            elif step == "break":
                wire.plan.put_back(under_way.pop(place))
                continue
            else:
                wire.plan.drop(segment)
                dropped |= {
                    number
                    for number, frame in enumerate(pack.frames)
                    if frame.offset < segment.end and segment.start < frame.offset + frame.size
                }
                under_way.pop(place)
                continue
            if segment.start == segment.end:
                under_way.pop(place)
        assert Counter(wire.whole) == Counter(wanted - dropped)
        assert not wire.asked or set(wire.asked.values()) == {1}, "bytes were asked for twice"
        missed = wire.wanted_bytes() - set(wire.asked)
        frames = [pack.frames[number] for number in dropped]
        assert all(any(it.offset <= place < it.offset + it.size for it in frames) for place in missed)
        assert wire.plan.take() is None
