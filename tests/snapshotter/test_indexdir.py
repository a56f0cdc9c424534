"""IndexDirectory: an index or None within its time, whatever the directory does."""

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockindex.codec import index_name
from snapshotter.errors import InvalidArgument
from snapshotter.model import Digest
from snapshotter.registry import IndexDirectory
from tests.snapshotter.rangeserver import Behaviour, Hold, RangeServer, Reset, Status, Truncate, in_order, redirect

DIGEST = Digest("sha256:" + "ab" * 32)
OTHER = Digest("sha256:" + "cd" * 32)
BODY = b"index" * 1000


class Clock:
    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


@contextlib.contextmanager
def directory(
    behaviour: Behaviour | None = None, timeout_s: float = 0.3
) -> Iterator[tuple[RangeServer, IndexDirectory, Clock]]:
    clock = Clock()
    with (
        RangeServer({f"/i/{index_name(DIGEST)}": BODY}, behaviour) as server,
        contextlib.closing(IndexDirectory(f"{server.url}/i/", timeout_s, clock=clock)) as found,
    ):
        yield server, found, clock


def test_found_and_absent_and_absence_is_remembered_briefly() -> None:
    with directory() as (server, found, clock):
        assert found.get(DIGEST) == BODY
        assert found.get(OTHER) is None
        assert found.get(OTHER) is None
        assert [r.path for r in server.requests] == [f"/i/{index_name(DIGEST)}", f"/i/{index_name(OTHER)}"]
        assert server.connections == 1
        clock.ahead = 100
        assert found.get(OTHER) is None and len(server.requests) == 3
        assert "2 known" not in repr(found)


TROUBLE = [
    Status(200, {"Content-Type": "text/html; charset=utf-8"}, b"<html>log in</html>"),
    Status(403),
    Status(429),
    Status(500),
    Hold(-1),
    Hold(100),
    Truncate(100),
    Reset(100),
    redirect("ftp://x/"),
]


@pytest.mark.parametrize("action", TROUBLE)
def test_trouble_is_none_in_time_and_one_warning(action: object, caplog: pytest.LogCaptureFixture) -> None:
    with directory(lambda request: action) as (server, found, clock):  # type: ignore[arg-type,return-value]  # mixed
        started = time.monotonic()
        for _ in range(3):
            assert found.get(DIGEST) is None
            clock.ahead += 20
        assert time.monotonic() - started < 3 * 2 * 0.3 + 0.5
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert server.url in caplog.text
        server.behaviour = None
        clock.ahead += 100
        assert found.get(DIGEST) == BODY


def test_directory_that_timed_out_is_left_alone_for_a_while() -> None:
    with directory(in_order([Hold(-1)])) as (server, found, clock):
        assert found.get(DIGEST) is None
        assert found.get(DIGEST) is None and len(server.requests) == 1
        clock.ahead = 11
        assert found.get(DIGEST) == BODY


def test_slow_body_is_cut_at_the_deadline() -> None:
    with directory() as (server, found, clock):
        server.behaviour = lambda request: setattr(clock, "ahead", 1.0)  # the clock runs on while the body comes
        assert found.get(DIGEST) is None


def test_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshotter.registry.indexdir.MAX_INDEX_BYTES", 100)
    with directory() as (_, found, _clock):
        assert found.get(DIGEST) is None


@pytest.mark.parametrize(
    ("location", "authentic"),
    [
        ("/srv/i", True),
        ("https://h.test/i", True),
        ("HTTP://h.test/i", False),
        ("ftp://h.test/i", False),
        ("simplecache::ftp://h.test/i", False),
        ("memory://i", True),
    ],
)
def test_what_anybody_on_the_way_could_have_written(location: str, authentic: bool) -> None:
    with contextlib.closing(IndexDirectory(location, 1.0)) as found:
        assert found.is_authentic is authentic


@pytest.mark.parametrize("prefix", ["", "file://", "file://localhost"])
def test_local_directory(tmp_path: Path, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / index_name(DIGEST)
    found = IndexDirectory(f"{prefix}{tmp_path}", 1.0)
    assert found.get(OTHER) is None
    path.parent.mkdir()
    path.write_bytes(BODY)
    assert found.get(DIGEST) == BODY and not caplog.records
    path.unlink()
    path.mkdir()
    assert found.get(DIGEST) is None and len(caplog.records) == 1


@pytest.mark.parametrize("location", ["nonsense://x/", "http://", "file://host/x"])
def test_unusable_location(location: str) -> None:
    with pytest.raises(InvalidArgument, match=r"directory .*(expected an http|Protocol not known)"):
        IndexDirectory(location, 1.0)
