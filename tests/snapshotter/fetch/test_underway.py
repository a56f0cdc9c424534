"""Which request is a straggler, by a clock of the test's."""

import pytest

from snapshotter.fetch.underway import Segment, UnderWay

KIB = 1 << 10
TRIP_S = 0.02
MBIT_100 = 12_500_000


class Requests:
    """Some requests of 1 MiB each, whose bytes come at given rates."""

    def __init__(self, count: int, trip_s: float = TRIP_S) -> None:
        self.now = 10.0
        self.under_way = UnderWay(trip_s, lambda: self.now)
        self.segments = [Segment(number << 20, (number + 1) << 20) for number in range(count)]
        for segment in self.segments:
            self.under_way.add(segment)

    def run(self, seconds: float, *rates: float) -> None:
        """So much time goes by, and the requests bring bytes at these rates."""
        for _ in range(round(seconds / 0.005)):
            self.now += 0.005
            for segment, rate in zip(self.segments, rates, strict=False):
                size = min(round(rate * 0.005), segment.left)
                if size:
                    segment.start += size
                    self.under_way.came(segment, size)
                if not segment.left:
                    self.under_way.remove(segment)


def test_one_that_is_alone_with_an_empty_wire_is_relieved() -> None:
    requests = Requests(3)
    requests.run(0.19, 0.45 * MBIT_100, 0.45 * MBIT_100, 0.1 * MBIT_100)
    slow = requests.segments[2]
    assert len(requests.under_way) == 1 and requests.under_way.relieve(2) is None, "it may have been the wire until now"
    requests.run(0.1, 0, 0, 0.1 * MBIT_100)
    left, end = slow.left, slow.end
    cut = requests.under_way.relieve(2)
    assert cut is not None and (cut.start, cut.end) == (slow.end, end)
    keeps = 2 * TRIP_S * 0.1 * MBIT_100
    assert cut.left == pytest.approx((left - keeps) / 2, rel=0.05), "another one takes as much"
    again = requests.under_way.relieve(1)
    assert again is not None and slow.left == pytest.approx(keeps, rel=0.1)
    assert requests.under_way.relieve(1) is None, "what it keeps it brings itself"


def test_one_that_has_stopped_is_relieved_of_all() -> None:
    requests = Requests(2)
    requests.run(0.2, 0.5 * MBIT_100, 0.1 * MBIT_100)
    requests.run(0.2, 0, 0)
    requests.under_way.remove(requests.segments[0])
    cut = requests.under_way.relieve(1)
    assert cut is not None and requests.segments[1].left == 0 and cut.left > 700 * KIB


def test_little_is_handed_on_whole() -> None:
    """A connection that has lost packets again brings the last 48 KiB no sooner than others a MiB."""
    requests = Requests(2)
    requests.run(0.15, 0.5 * MBIT_100, 0.5 * MBIT_100)
    requests.under_way.remove(requests.segments[0])
    slow = requests.segments[1]
    slow.start = slow.end - 48 * KIB
    requests.run(0.25, 0, 0.001 * MBIT_100)
    left = slow.left
    cut = requests.under_way.relieve(7)
    assert cut is not None and cut.left + slow.left == left and slow.left < KIB


def test_while_the_wire_is_full_nobody_is_a_straggler() -> None:
    requests = Requests(3)
    requests.run(0.2, 0.4 * MBIT_100, 0.4 * MBIT_100, 0.2 * MBIT_100)
    requests.segments[0].start = requests.segments[0].end
    requests.under_way.remove(requests.segments[0])
    requests.run(0.1, 0, 0.5 * MBIT_100, 0.4 * MBIT_100)
    assert requests.under_way.relieve(1) is None


def test_one_that_will_be_done_soon_is_left_alone() -> None:
    requests = Requests(3)
    requests.run(0.2, 0.4 * MBIT_100, 0.4 * MBIT_100, 0.2 * MBIT_100)
    requests.segments[2].start = requests.segments[2].end - 100 * KIB
    requests.run(0.05, 0, 0, 0.1 * MBIT_100)
    assert requests.under_way.relieve(2) is None


def test_one_that_was_asked_for_just_now_is_left_alone() -> None:
    """Its first bytes take a round trip."""
    requests = Requests(2, trip_s=0.1)
    requests.run(0.3, 0.5 * MBIT_100, 0.5 * MBIT_100)
    requests.under_way.remove(requests.segments[0])
    requests.under_way.remove(requests.segments[1])
    late = Segment(9 << 20, 10 << 20)
    requests.under_way.add(late)
    requests.now += 0.2
    assert requests.under_way.relieve(1) is None
    requests.now += 0.1
    assert requests.under_way.relieve(1) is not None, "nothing has come for three round trips"


def test_where_nothing_has_come_yet_nothing_is_slow() -> None:
    requests = Requests(1)
    requests.now += 5.0
    assert requests.under_way.relieve(3) is None
    requests.under_way.clear()
    assert repr(requests.under_way) == "<UnderWay 0 requests>" and requests.under_way.relieve(3) is None


def test_what_was_handed_on_is_not_handed_on_again() -> None:
    """Else all would be asked for again and again where everything has become slow."""
    requests = Requests(2)
    requests.run(0.2, 0.5 * MBIT_100, 0.1 * MBIT_100)
    requests.run(0.2, 0, 0)
    requests.under_way.remove(requests.segments[0])
    cut = requests.under_way.relieve(1)
    assert cut is not None
    requests.under_way.add(cut)
    requests.run(1.0)
    assert requests.under_way.relieve(2) is None
