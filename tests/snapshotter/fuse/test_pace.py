"""When the block server looks again for a request instead of going to sleep."""

import pytest

from snapshotter.fuse import server
from snapshotter.fuse.server import _Pace


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(server, "time", clock)
    return clock


def _requests(pace: _Pace, clock: Clock, number: int, gap_s: float) -> None:
    for _ in range(number):
        clock.now += gap_s
        pace.came()


def test_it_sleeps_until_requests_come_fast(clock: Clock) -> None:
    pace = _Pace()
    assert not pace.next_is_near()
    _requests(pace, clock, 10, 0.0001)
    assert not pace.next_is_near(), "ten requests are no burst yet"
    _requests(pace, clock, 100, 0.0001)
    assert pace.next_is_near()


def test_after_a_burst_it_sleeps_within_a_moment(clock: Clock) -> None:
    pace = _Pace()
    _requests(pace, clock, 200, 0.0001)
    clock.now += server._SPIN_S / 2
    assert pace.next_is_near()
    clock.now += server._SPIN_S
    assert not pace.next_is_near()
    pace.came()
    assert pace.next_is_near(), "a short pause in a burst"
    clock.now += 10
    pace.came()
    assert not pace.next_is_near(), "the burst is over"


def test_slow_requests_are_slept_for(clock: Clock) -> None:
    pace = _Pace()
    _requests(pace, clock, 1000, 2 * server._NEAR_S)
    assert not pace.next_is_near()
