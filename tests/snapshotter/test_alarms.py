"""Alarms: findings about one layer and pack are one alarm; what the disk does to them ends nothing."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotter.alarms import Alarms
from snapshotter.errors import NotFound, SnapshotterError
from snapshotter.unproven import Pack

PACK = Pack("sha256:" + "c" * 64, "registry.test/app", "0123456789abcdef", "sha256:" + "d" * 64)
LAYER, NAME = "sha256:" + "a" * 64, "a" * 14


@pytest.fixture(autouse=True)
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    yield caplog
    caplog.clear()


def found(alarms: Alarms, *runs: tuple[int, int], files: tuple[str, ...] = ("/bin/sh",), served: bool = False) -> None:
    alarms.raise_(LAYER, NAME, ["registry.test/app:1"], PACK, runs, files, served)


def test_later_findings_are_added(tmp_path: Path) -> None:
    alarms = Alarms(tmp_path)
    found(alarms, (5, 9), (20, 21))
    found(alarms, (7, 12), (21, 22), files=("/bin/sh", "/etc/passwd"), served=True)
    found(alarms, (5, 6))
    [alarm] = Alarms(tmp_path).entries()
    assert alarm.runs == ((5, 12), (20, 22)) and alarm.blocks == 9 and alarm.served
    assert alarm.files == ("/bin/sh", "/etc/passwd") and alarm.id == f"{NAME}-{'c' * 12}"
    assert alarms.is_refuted(PACK.digest) and alarm.pack == PACK


def test_who_wants_to_know_hears_of_the_pack(tmp_path: Path) -> None:
    heard, event = [], threading.Event()

    def listen(digest: str) -> None:
        heard.append((digest, threading.current_thread() is threading.main_thread()))
        event.set()

    found(Alarms(tmp_path, listen), (1, 2))
    assert event.wait(20) and heard == [(PACK.digest, False)]


def test_the_line_names_all_that_an_operator_needs(tmp_path: Path, lines: pytest.LogCaptureFixture) -> None:
    found(Alarms(tmp_path), (5, 9), files=("/etc/a\nb",), served=True)
    [record] = lines.records
    text = record.getMessage()
    assert record.levelname == "ERROR" and text.startswith("pack.refuted ") and "\n" not in text
    for word in (LAYER, "registry.test/app:1", "5-9", PACK.digest, PACK.where, PACK.key, "served=true", "alarm clear"):
        assert word in text


def test_what_the_disk_refuses_is_logged_all_the_same(tmp_path: Path, lines: pytest.LogCaptureFixture) -> None:
    (tmp_path / "alarms").write_text("no directory")
    found(Alarms(tmp_path), (1, 2))
    assert [it.getMessage().split()[0] for it in lines.records] == ["pack.refuted", "alarm.not_kept"]
    with pytest.raises(SnapshotterError, match="cannot be read"):
        Alarms(tmp_path).entries()


def test_a_damaged_alarm_hides_no_other(tmp_path: Path) -> None:
    found(Alarms(tmp_path), (1, 2))
    (tmp_path / "alarms" / "broken").write_text('{"id": 3}')
    assert [alarm.id for alarm in Alarms(tmp_path).entries()] == [f"{NAME}-{'c' * 12}"]


@pytest.mark.parametrize("name", ["", "..", "../boot_id", "unknown"])
def test_only_alarms_can_be_cleared(name: str, tmp_path: Path) -> None:
    (tmp_path / "boot_id").write_text("x")
    found(Alarms(tmp_path), (1, 2))
    with pytest.raises(NotFound):
        Alarms(tmp_path).clear(name)
    assert (tmp_path / "boot_id").exists() and len(Alarms(tmp_path).entries()) == 1
