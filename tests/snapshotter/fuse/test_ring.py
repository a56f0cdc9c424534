"""The ring's protocol: what each process finds that comes after one that was killed at any point of it."""

import os
from collections.abc import Iterator

import pytest

from snapshotter.fuse.abi import READ_REQUEST
from snapshotter.fuse.ring import Ring


@pytest.fixture
def fd() -> Iterator[int]:
    fd = Ring.create()
    yield fd
    os.close(fd)


@pytest.fixture
def ring(fd: int) -> Iterator[Ring]:
    ring = Ring(fd)
    yield ring
    ring.close()


def _put(ring: Ring, slot: int, unique: int) -> None:
    request = READ_REQUEST.pack(80, 15, unique, 7 << 8, 0, 0, 0, 0, 0, 0, 4096, 8192, 0, 0, 0, 0)
    head, _scratch = ring.buffers(slot)
    head[:] = request
    head.release()


def test_a_free_slot_is_claimed_lowest_first_and_again_once_it_is_free(ring: Ring) -> None:
    first, second = ring.claim(), ring.claim()
    assert (first, second) == (0, 1)
    ring.free(first)
    assert ring.claim() == first


def test_a_slot_claimed_but_never_filled_is_freed_by_the_successor(fd: int, ring: Ring) -> None:
    ring.claim()
    successor = Ring(fd)
    assert successor.owned() is None
    assert successor.claim() == 0
    successor.close()


def test_a_request_read_but_not_answered_is_found_by_the_successor_and_counted(fd: int, ring: Ring) -> None:
    slot = ring.claim()
    _put(ring, slot, unique=42)
    for attempt in (1, 2, 3):
        successor = Ring(fd)
        assert successor.owned() == slot
        assert successor.request(slot)[2] == 42
        assert successor.attempts(slot) == attempt
        successor.close()


def test_an_old_request_in_a_slot_is_not_mistaken_for_a_new_one(fd: int, ring: Ring) -> None:
    slot = ring.claim()
    _put(ring, slot, unique=1)
    ring.free(slot)
    assert ring.claim() == slot  # killed before the kernel gave it a request
    successor = Ring(fd)
    assert successor.owned() is None
    successor.close()


def test_handed_requests_are_taken_once_and_again_by_a_new_fetch_process(ring: Ring) -> None:
    slots = [ring.claim() for _ in range(3)]
    for slot in slots:
        ring.hand(slot, now=12.5)
    assert ring.claim() == 3 and ring.in_flight() == 3  # a slot that waits for a request is none
    assert list(ring.take()) == slots
    assert ring.in_flight() == 3
    assert list(ring.take()) == []
    ring.free(slots[1])  # answered before it was killed
    ring.inherit()
    assert list(ring.take()) == [slots[0], slots[2]]
    assert ring.since(slots[2]) == 12.5


def test_when_every_slot_is_in_flight_claiming_says_so(ring: Ring) -> None:
    for _ in range(65536):
        ring.claim()
    with pytest.raises(BlockingIOError):
        ring.claim()
    ring.free(40000)
    assert ring.claim() == 40000


def test_a_long_request_runs_over_into_the_scratch_area(ring: Ring) -> None:
    slot = ring.claim()
    head, scratch = ring.buffers(slot)
    message = bytes(range(200))
    head[:] = message[:80]
    scratch[: len(message) - 80] = message[80:]
    assert ring.body(slot, 40, 200) == message[40:]
    assert ring.body(slot, 90, 120) == message[90:120]
    head.release()


def test_what_init_agreed_and_the_heartbeat_outlive_the_process(fd: int, ring: Ring) -> None:
    assert not ring.init_done
    ring.agreed(resend=True, async_dio=False)
    ring.beat()
    successor = Ring(fd)
    assert (successor.init_done, successor.resend, successor.async_dio) == (True, True, False)
    assert successor.beats() == 1
    successor.close()
