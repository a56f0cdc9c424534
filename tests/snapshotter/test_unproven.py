"""The notes of what hot packs brought: what another process finds, and what a power cut may leave of them."""

import errno
from pathlib import Path

import pytest

from snapshotter import unproven as unproven_module
from snapshotter.unproven import Pack, Unproven

PACKS = [Pack(f"sha256:{digit * 64}", f"registry.test/{digit}", digit, "") for digit in "abc"]


@pytest.fixture
def notes(tmp_path: Path) -> Unproven:
    notes = Unproven(tmp_path, 100, writable=True)
    for pack in PACKS:
        notes.number(pack)
    notes.mark(5, 9, 2)
    notes.mark(9, 10, 3)
    return notes


def other(directory: Path) -> Unproven:
    return Unproven(directory, 100)


def test_another_process_finds_the_same(tmp_path: Path, notes: Unproven) -> None:
    found = other(tmp_path)
    assert found.packs == tuple(PACKS) and list(found.runs()) == [(5, 10)]
    assert found.marks(4, 11) == bytes([0, 2, 2, 2, 2, 3, 0]) and found.pack(3) == PACKS[2]
    notes.mark(5, 7, 0)
    assert list(found.runs()) == [(7, 10)], "it sees what changes"
    assert notes.number(PACKS[1]) == 2, "a pack has one number"
    for it in (found, notes):
        it.close()
        it.close()


def test_what_the_notes_say_already_is_not_written_again(notes: Unproven, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, data: bytes, offset: int) -> None:
        raise OSError(errno.ENOSPC, "a full disk")

    monkeypatch.setattr(unproven_module, "write_all", refuse)
    notes.mark(5, 9, 2)
    notes.mark(10, 20, 0)
    with pytest.raises(OSError, match="a full disk"):
        notes.mark(8, 10, 2)
    assert list(notes.runs()) == [(5, 10)]
    notes.close()


def test_a_layer_without_packs_has_no_files(tmp_path: Path) -> None:
    notes = Unproven(tmp_path, 100, writable=True)
    assert notes.marks(0, 3) == bytes(3) and list(notes.runs()) == [] and notes.packs == ()
    notes.mark(0, 3, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_line_that_a_power_cut_broke_keeps_its_number(tmp_path: Path, notes: Unproven) -> None:
    lines = (tmp_path / "packs").read_text().splitlines()
    (tmp_path / "packs").write_text("\n".join([lines[0], "\0" * 40, lines[2]]) + "\n")
    found = other(tmp_path)
    assert found.pack(2).digest == "" and found.pack(3) == PACKS[2]
    assert found.pack(77).digest == "" and "power cut" in found.pack(77).where
    found.close()
    notes.close()


def test_notes_that_a_power_cut_shortened(tmp_path: Path, notes: Unproven) -> None:
    """Whoever writes makes them whole again; whoever looks finds none."""
    notes.close()
    with (tmp_path / "unproven").open("r+b") as file:
        file.truncate(6)
    looked = other(tmp_path)
    assert list(looked.runs()) == []
    again = Unproven(tmp_path, 100, writable=True)
    assert list(again.runs()) == [(5, 6)]
    again.close()
