"""A blob in parts: each byte once, in its place; whatever goes wrong ends all parts."""

import contextlib
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest

from snapshotter.config import RegistryConfig
from snapshotter.errors import SnapshotterError, Transient
from snapshotter.fetch.blobparts import fetch_parts, parts_of
from snapshotter.registry import Registry
from snapshotter.registry.blob import RegistryBlob
from tests.snapshotter.fetch.blobs import PATIENCE_S
from tests.snapshotter.rangeserver import Action, Hold, IgnoreRange, RangeServer, Request, Status, Truncate

KIB = 1 << 10
DIGEST = "sha256:" + "ab" * 32
PATH = f"/v2/app/blobs/{DIGEST}"
DATA = bytes(number * 7 & 0xFF ^ number >> 8 & 0xFF for number in range(100_001))


@pytest.fixture
def server() -> Iterator[RangeServer]:
    with RangeServer({PATH: DATA}) as server:
        yield server


@pytest.fixture
def blob(server: RangeServer) -> Iterator[RegistryBlob]:
    registry = Registry(
        RegistryConfig(hosts_dir="", docker_config="/nonexistent/config.json", read_timeout_s=PATIENCE_S)
    )
    with contextlib.closing(registry):
        yield registry.blob(f"{server.host}/app:1", DIGEST)


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([327_343, 139_983, 110_909], [2, 1, 1]),
        ([1 << 20], [4]),
        ([95 * KIB], [1]),
        ([192 * KIB], [2]),
        ([600 * KIB] * 50, [1] * 50),
        ([0], [1]),
    ],
)
def test_an_images_indexes_take_few_parts(sizes: list[int], parts: list[int]) -> None:
    assert [parts_of(size, sum(sizes)) for size in sizes] == parts


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_each_byte_comes_once(server: RangeServer, blob: RegistryBlob, parts: int) -> None:
    told: list[int] = []
    assert fetch_parts(blob, len(DATA), parts, told.append) == DATA
    assert max(told) == len(DATA)
    ranges = sorted((start, end) for start, end in filter(None, server.ranges()) if end is not None)
    assert len(ranges) == parts and ranges[0][0] == 0 and ranges[-1][1] == len(DATA)
    assert all(left[1] == right[0] for left, right in pairwise(ranges))


def test_they_come_side_by_side(server: RangeServer, blob: RegistryBlob) -> None:
    asked, all_asked = threading.Semaphore(0), threading.Event()

    def behaviour(request: Request) -> Action:
        asked.release()
        return Hold(-1, all_asked)

    server.behaviour = behaviour
    got: list[bytes | None] = []
    thread = threading.Thread(target=lambda: got.append(fetch_parts(blob, len(DATA), 3, lambda came: None)))
    thread.start()
    for _ in range(3):
        assert asked.acquire(timeout=PATIENCE_S)
    all_asked.set()
    thread.join(PATIENCE_S)
    assert got == [DATA]


def test_a_server_that_ignores_ranges_is_left_to_the_caller(server: RangeServer, blob: RegistryBlob) -> None:
    server.behaviour = lambda request: IgnoreRange()
    assert fetch_parts(blob, len(DATA), 3, lambda came: None) is None


@pytest.mark.parametrize("action", [Truncate(10), Status(404)])
def test_a_part_that_fails_ends_the_others(server: RangeServer, blob: RegistryBlob, action: Action) -> None:
    """The second part fails; the others are held for ever."""
    never = threading.Event()

    def behaviour(request: Request) -> Action:
        return action if request.range is not None and request.range[0] == len(DATA) // 3 + 1 else Hold(10, never)

    server.behaviour = behaviour
    try:
        with pytest.raises(SnapshotterError, match="short body" if isinstance(action, Truncate) else "404"):
            fetch_parts(blob, len(DATA), 3, lambda came: None)
    finally:
        never.set()


def test_the_caller_may_end_it(server: RangeServer, blob: RegistryBlob) -> None:
    never = threading.Event()
    server.behaviour = lambda request: Hold(10, never)

    def enough(came: int) -> None:
        raise Transient(f"{came} bytes are too few")

    try:
        with pytest.raises(Transient, match="bytes are too few"):
            fetch_parts(blob, len(DATA), 3, enough)
    finally:
        never.set()


def test_where_there_is_no_thread_it_fails(blob: RegistryBlob, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(SnapshotterError, match="no thread for a part"):
        fetch_parts(blob, len(DATA), 2, lambda came: None)
