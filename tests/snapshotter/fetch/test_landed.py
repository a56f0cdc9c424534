"""What has landed is handed on once, together, to whoever asked last; doubts are never lost to a bound."""

import threading

import pytest

from snapshotter.fetch import landed as landed_module
from snapshotter.fetch.landed import Batch, Landed

PATIENCE_S = 30.0


def test_what_lands_is_taken_once_and_in_order() -> None:
    landed = Landed()
    landed.add("one", 5, 9)
    landed.add("two", 0, 1)
    landed.add("one", 1, 2)
    landed.doubt("two", 0, 1)
    assert landed.take(0.0) == Batch({"one": [(5, 9), (1, 2)], "two": [(0, 1)]}, {"two": [(0, 1)]})
    assert landed.take(0.0) == Batch({}, {})


def _taking(landed: Landed, found: list[Batch]) -> threading.Thread:
    thread = threading.Thread(target=lambda: found.append(landed.take(PATIENCE_S)), daemon=True)
    thread.start()
    return thread


def test_whoever_waits_is_woken() -> None:
    landed, found = Landed(), list[Batch]()
    thread = _taking(landed, found)
    landed.add("one", 5, 9)
    thread.join(PATIENCE_S)
    assert found == [Batch({"one": [(5, 9)]}, {})]


def test_the_call_of_a_process_that_has_been_killed_takes_nothing_from_its_successor() -> None:
    landed, found = Landed(), list[Batch]()
    dead = _taking(landed, found)
    while landed._callers < 1:
        threading.Event().wait(0.001)
    alive = _taking(landed, found)
    dead.join(PATIENCE_S)
    assert found == [Batch({}, {})]
    landed.add("one", 5, 9)
    alive.join(PATIENCE_S)
    assert found[1:] == [Batch({"one": [(5, 9)]}, {})]


def test_what_nobody_takes_is_bounded_but_for_doubts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landed_module, "_MOST", 2)
    landed = Landed()
    for number in range(4):
        landed.add("one", number, number + 1)
        landed.doubt("two", number, number + 1)
    batch = landed.take(0.0)
    assert len(batch.landed["one"]) == 1 and len(batch.doubted["two"]) == 4
