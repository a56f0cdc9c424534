"""HotDirectory: the first bytes of a hot set or None within its time, whatever the directory does."""

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockindex.hotset import hotset_name
from snapshotter.errors import InvalidArgument, NotFound, SnapshotterError, Transient
from snapshotter.registry.hotdir import FIRST_BYTES, HotDirectory
from snapshotter.registry.hotfile import HotFile
from tests.snapshotter.rangeserver import (
    Behaviour,
    Hold,
    IgnoreRange,
    RangeServer,
    Reset,
    ShortRange,
    Status,
    Truncate,
    WrongRange,
    in_order,
    redirect,
)

KEY, OTHER = "sha256:" + "ab" * 32, "sha256:" + "cd" * 32
NAME = hotset_name(KEY, "default")
LONG = bytes(range(256)) * 2400  # 600 KiB: more than the look-up asks for
SHORT = LONG[:5000]


class Clock:
    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


@contextlib.contextmanager
def directory(
    body: bytes = LONG, behaviour: Behaviour | None = None, timeout_s: float = 0.3
) -> Iterator[tuple[RangeServer, HotDirectory, Clock]]:
    clock = Clock()
    with (
        RangeServer({f"/h/{NAME}": body}, behaviour) as server,
        contextlib.closing(HotDirectory(f"{server.url}/h/", timeout_s, clock=clock)) as hot,
    ):
        yield server, hot, clock


def found(hot: HotDirectory) -> HotFile:
    """The file, which is there."""
    file = hot.find(KEY, "default")
    assert file is not None
    return file


def read(file: HotFile, start: int, end: int) -> bytes:
    with contextlib.closing(file.stream(start, end)) as stream:
        assert (stream.start, stream.end) == (start, min(end, file.size))
        return b"".join(stream)


def first(file: HotFile) -> bytes:
    with contextlib.closing(file.first) as stream:
        assert stream.start == 0
        return b"".join(stream)


def test_the_look_up_is_the_first_request_for_the_bytes() -> None:
    with directory() as (server, hot, _):
        file = found(hot)
        assert (file.size, file.first.end) == (len(LONG), FIRST_BYTES)
        assert first(file) == LONG[:FIRST_BYTES]
        assert server.ranges() == [(0, FIRST_BYTES)] and server.connections == 1


def test_more_comes_on_the_same_connection() -> None:
    with directory() as (server, hot, _):
        file = found(hot)
        first(file)
        assert read(file, FIRST_BYTES, FIRST_BYTES + 1000) == LONG[FIRST_BYTES : FIRST_BYTES + 1000]
        assert read(file, 600_000, 1 << 20) == LONG[600_000:]
        assert (len(server.requests), server.connections) == (3, 1)


def test_requests_run_side_by_side() -> None:
    with directory() as (server, hot, _):
        file = found(hot)
        streams = [file.stream(start, start + 100_000) for start in (0, 100_000, 200_000)]
        assert [next(stream)[:1] for stream in streams] == [LONG[start : start + 1] for start in (0, 100_000, 200_000)]
        for stream in (*streams, file.first):
            stream.close()
            stream.close()
        assert server.connections == 4


def test_a_file_smaller_than_the_first_request() -> None:
    with directory(SHORT) as (server, hot, _):
        file = found(hot)
        assert (file.size, file.first.end) == (5000, 5000)
        assert first(file) == SHORT
        assert hot.find(OTHER, "default") is None and server.connections == 1


def test_absence_is_remembered_briefly() -> None:
    with directory() as (server, hot, clock):
        assert [hot.find(OTHER, "default") for _ in range(3)] == [None] * 3
        assert hot.find(KEY, "other") is None
        assert [it.path for it in server.requests] == [
            f"/h/{hotset_name(OTHER, 'default')}",
            f"/h/{hotset_name(KEY, 'other')}",
        ]
        clock.ahead = 61
        assert hot.find(OTHER, "default") is None
        assert len(server.requests) == 3 and server.connections == 1


@pytest.mark.parametrize(
    "action",
    [
        Status(200, {"Content-Type": "text/html; charset=utf-8"}, b"<html>log in</html>"),
        Status(403),
        Status(416, {"Content-Range": "bytes */0"}),
        Status(429),
        Status(500),
        Status(206, {"Content-Range": f"bytes 0-{FIRST_BYTES - 1}/*"}, LONG[:FIRST_BYTES]),
        IgnoreRange(chunked=True),
        WrongRange(7),
        Hold(-1),
        Truncate(-1),
        Reset(-1),
        redirect("ftp://x/"),
    ],
)
def test_trouble_is_none_in_time_and_one_warning(action: object, caplog: pytest.LogCaptureFixture) -> None:
    with directory(behaviour=lambda request: action) as (server, hot, clock):  # type: ignore[arg-type,return-value]
        started = time.monotonic()
        for _ in range(3):
            assert hot.find(KEY, "default") is None
            clock.ahead += 20
        assert time.monotonic() - started < 3 * 2 * 0.3 + 1.0
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert server.url in caplog.text
        caplog.clear()
        server.behaviour = None
        clock.ahead += 100
        assert first(found(hot)) == LONG[:FIRST_BYTES]


def test_a_directory_that_timed_out_is_left_alone_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    with directory(behaviour=in_order([Hold(-1)])) as (server, hot, clock):
        assert hot.find(KEY, "default") is None
        assert hot.find(OTHER, "default") is None and len(server.requests) == 1
        clock.ahead = 11
        found(hot).first.close()
        caplog.clear()


def test_without_ranges_everything_comes_at_once() -> None:
    with directory(behaviour=lambda _: IgnoreRange()) as (server, hot, _):
        file = found(hot)
        assert file.first.end == file.size == len(LONG)
        assert first(file) == LONG
        assert read(file, 1000, 2000) == LONG[1000:2000], "the rest of an answer that broke off"
        assert len(server.requests) == 2


@pytest.mark.parametrize("action", [Hold(1000), Truncate(1000), Reset(1000), ShortRange(1000)])
def test_a_body_that_stops_is_transient(action: object) -> None:
    with directory(behaviour=in_order([action])) as (_, hot, _clock):  # type: ignore[list-item]
        file = found(hot)
        got = bytearray()
        with contextlib.closing(file.first) as stream, pytest.raises(Transient):
            for chunk in stream:
                got += chunk
        assert len(got) <= 1000 and LONG.startswith(bytes(got))
        assert read(file, 1000, 3000) == LONG[1000:3000]


@pytest.mark.parametrize(
    ("action", "error"),
    [(Status(404), NotFound), (Status(503), Transient), (Status(403), SnapshotterError), (WrongRange(9), Transient)],
)
def test_a_later_request_may_fail(action: object, error: type[SnapshotterError]) -> None:
    with directory(behaviour=in_order([None, action])) as (_, hot, _clock):  # type: ignore[list-item]
        file = found(hot)
        first(file)
        with pytest.raises(error):
            file.stream(1000, 2000)


def test_a_file_that_has_shrunk_meanwhile_is_not_read_beyond_its_end() -> None:
    with directory() as (server, hot, _):
        file = found(hot)
        first(file)
        server.blobs[f"/h/{NAME}"] = SHORT
        with pytest.raises(InvalidArgument):
            file.stream(300_000, 400_000)


def test_a_stream_that_nobody_reads_gives_its_place_back() -> None:
    with directory() as (_, hot, _clock):
        for _ in range(20):  # more than there are connections
            found(hot).first.close()


@pytest.mark.parametrize("prefix", ["", "file://", "file://localhost"])
def test_a_local_directory(tmp_path: Path, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    hot = HotDirectory(f"{prefix}{tmp_path}", 1.0, clock=(clock := Clock()))
    assert hot.find(KEY, "default") is None
    path = tmp_path / NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(LONG)
    assert hot.find(KEY, "default") is None, "remembered"
    clock.ahead = 61
    file = found(hot)
    assert file.first.end == len(LONG) and first(file) == LONG
    assert read(file, 5, 1 << 30) == LONG[5:]
    assert not caplog.records
    stream = file.stream(0, len(LONG))
    path.write_bytes(SHORT)
    with pytest.raises(Transient):
        list(stream)
    stream.close()


def test_a_local_directory_in_the_place_of_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    hot = HotDirectory(str(tmp_path), 1.0)
    assert hot.find(KEY, "default") is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    caplog.clear()


@pytest.mark.parametrize("location", ["nonsense://x/", "http://", "file://host/x"])
def test_unusable_location(location: str) -> None:
    with pytest.raises(InvalidArgument, match=r"directory .*(expected an http|Protocol not known)"):
        HotDirectory(location, 1.0)


def test_it_shows_what_it_knows() -> None:
    with directory() as (server, hot, _):
        hot.find(OTHER, "default")
        assert repr(hot) == f"<HotDirectory {server.url}/h up, 1 known absent>"
        file = found(hot)
        assert repr(file) == f"<HotFile {server.url}/h/{NAME}, {len(LONG)} bytes>"
        assert repr(file.first) == f"<HotStream [0, {FIRST_BYTES})>"
        file.first.close()
