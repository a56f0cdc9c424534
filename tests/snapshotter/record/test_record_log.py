"""The log of a slot: what is noted when, what a killed block server leaves, and that no trouble reaches a reader."""

import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotter.blockstore import node_id
from snapshotter.record import log as record_log
from snapshotter.record.log import CLOSED, FAILED, LogReader, Logs, Notes, create

NAME = "00112233445566"
NODE = node_id(NAME, 7)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = record_log.directory(tmp_path)
    create(made)
    return made


@pytest.fixture
def logs(directory: Path) -> Iterator[Logs]:
    made = Logs(directory)
    yield made
    made.close()


@pytest.fixture
def notes(directory: Path) -> Iterator[Notes]:
    made = Notes(directory)
    yield made
    made.close()


def _blocks(reader: LogReader) -> list[tuple[int, int]]:
    return [(touch.start, touch.end) for touch in reader.read()]


def test_reads_are_noted_while_the_log_is_open(logs: Logs, notes: Notes) -> None:
    notes.note(NODE, 0, 1)
    logs.open(7)
    reader = logs.reader(7)
    assert _blocks(reader) == []
    before = time.monotonic()
    notes.note(NODE, 1, 2)
    notes.note(node_id(NAME, 8), 5, 6)  # another slot's log is closed
    notes.note(NODE, 3, 1 << 40)
    touches = list(reader.read())
    assert [(touch.name, touch.start, touch.end) for touch in touches] == [(NAME, 1, 2), (NAME, 3, 1 << 40)]
    assert before <= touches[0].time_s <= touches[1].time_s <= time.monotonic()
    logs.stop(7)
    notes.note(NODE, 4, 5)
    assert _blocks(reader) == [] and not logs.failed(7)
    reader.close()
    logs.delete(7)
    logs.delete(7)


def test_a_slot_that_is_opened_again_has_a_new_log(logs: Logs, notes: Notes) -> None:
    """Also where the block server has never seen it closed."""
    for turn in range(600):  # the numbers of openings begin anew after 254
        logs.open(7)
        notes.note(NODE, turn, turn + 1)
        reader = logs.reader(7)
        assert _blocks(reader) == [(turn, turn + 1)]
        reader.close()
        logs.stop(7)


def test_a_successor_of_the_service_gives_no_number_twice(logs: Logs, notes: Notes, directory: Path) -> None:
    logs.open(7)
    notes.note(NODE, 0, 1)
    logs.stop(7)
    successor = Logs(directory)
    successor.open(7)
    notes.note(NODE, 1, 2)
    reader = successor.reader(7)
    assert _blocks(reader) == [(1, 2)]
    reader.close()
    successor.close()


def test_a_killed_block_server_has_noted_what_it_served(logs: Logs, directory: Path) -> None:
    logs.open(7)
    reader = logs.reader(7)
    served, serving = os.pipe()
    for turn in range(5):
        child = os.fork()
        if child == 0:
            notes = Notes(directory)
            for block in range(turn << 20, 1 << 60):
                notes.note(NODE, block, block + 1)
                os.write(serving, b".")
        count = len(os.read(served, 4096))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.set_blocking(served, False)
        try:
            while more := os.read(served, 1 << 16):
                count += len(more)
        except BlockingIOError:
            pass
        os.set_blocking(served, True)
        found = _blocks(reader)
        assert found == [(block, block + 1) for block in range(turn << 20, (turn << 20) + len(found))]
        assert count <= len(found) <= count + 1
    reader.close()
    os.close(served)
    os.close(serving)


def test_a_full_log_fails_and_stays_small(
    logs: Logs, notes: Notes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(record_log, "LIMIT", 100)
    logs.open(7)
    reader = logs.reader(7)
    for block in range(9):
        notes.note(NODE, block, block + 1)
    assert _blocks(reader) == [(0, 1), (1, 2), (2, 3)]
    assert logs.failed(7) and not logs.is_open(7)
    assert "full" in caplog.text and len(caplog.records) == 1
    reader.close()


@pytest.mark.parametrize("trouble", ["no space", "short", "gone"])
def test_trouble_with_the_log_reaches_no_reader(
    logs: Logs, notes: Notes, directory: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    logs.open(7)
    if trouble == "gone":
        (directory / "07.log").unlink()

    def write(fd: int, data: bytes) -> int:
        if trouble == "no space":
            raise OSError(errno.ENOSPC, "no space left on device")
        return len(data) - 1

    monkeypatch.setattr(record_log.os, "write", write)
    notes.note(NODE, 0, 1)
    notes.note(NODE, 1, 2)
    assert logs.failed(7)
    monkeypatch.undo()
    logs.open(7)
    notes.note(NODE, 2, 3)
    reader = logs.reader(7)
    assert _blocks(reader) == [(2, 3)]
    reader.close()


def test_where_not_even_a_byte_can_be_written_nobody_notices(
    logs: Logs, notes: Notes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full btrfs. The recording fails as soon as that can be said."""
    logs.open(7)

    def refuse(*words: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(record_log.os, "write", refuse)
        full.setattr(record_log.os, "pwrite", refuse)
        for block in range(3):
            notes.note(NODE, block, block + 1)
        with pytest.raises(OSError, match="No space"):
            logs.open(8)
        logs.stop(7)
        assert logs.is_open(7) and not logs.is_open(8)
    assert len(caplog.records) == 1 and "record.log_failed" in caplog.text
    notes.note(NODE, 3, 4)
    assert logs.failed(7)
    logs.open(7)
    notes.note(NODE, 5, 6)
    reader = logs.reader(7)
    assert _blocks(reader) == [(5, 6)]
    reader.close()


def test_a_torn_record_is_no_record(logs: Logs, notes: Notes, directory: Path) -> None:
    logs.open(7)
    reader = logs.reader(7)
    notes.note(NODE, 0, 1)
    with (directory / "07.log").open("ab") as file:
        file.write(b"torn")
    assert _blocks(reader) == [(0, 1)] and _blocks(reader) == []
    reader.close()


def test_the_map_is_made_once(directory: Path, logs: Logs) -> None:
    logs.open(7)
    create(directory)
    assert logs.is_open(7)
    (directory / "slots").write_bytes(b"short")
    create(directory)
    fresh = Logs(directory)
    assert not fresh.is_open(7) and (CLOSED, FAILED) == (0, 255)
    fresh.close()


def test_the_space_of_a_deleted_log_is_free_at_once(logs: Logs, notes: Notes, directory: Path) -> None:
    logs.open(7)
    for block in range(1000):
        notes.note(NODE, block, block + 1)
    kept = os.open(directory / "07.log", os.O_RDONLY)
    logs.stop(7)
    logs.delete(7)
    assert os.fstat(kept).st_size == 0
    os.close(kept)


def test_the_log_of_a_recording_that_is_over_is_not_held_open(logs: Logs, notes: Notes) -> None:
    before = len(os.listdir("/proc/self/fd"))
    logs.open(7)
    notes.note(NODE, 0, 1)
    notes.forget(NODE)
    assert len(os.listdir("/proc/self/fd")) == before + 1, "another file of the slot is in use"
    logs.stop(7)
    notes.forget(node_id(NAME, 8))
    assert len(os.listdir("/proc/self/fd")) == before + 1
    notes.forget(NODE)
    assert len(os.listdir("/proc/self/fd")) == before
