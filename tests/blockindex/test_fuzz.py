"""The fuzz targets: the kept corpus always, a bounded run with fresh inputs in full test runs; the fuzzer itself."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockindex.errors import Corrupt
from tests.blockindex import fuzz
from tests.blockindex.fuzz import TARGETS, Fuzzer, Target

SECONDS = 12.0
"""A target; together with the replays about a minute."""


@pytest.mark.parametrize("name", TARGETS)
def test_kept_inputs(name: str) -> None:
    fuzzer = Fuzzer(name, seed=0)
    fuzzer.replay()
    assert len(fuzz.kept(name)) > 5 and fuzzer.runs > 10


@pytest.mark.system  # needs no root: the mark keeps it out of the quick runs
@pytest.mark.parametrize("name", TARGETS)
def test_fresh_inputs(name: str) -> None:
    """Every run tries other inputs; a finding's message names the file that holds it."""
    seed = int(time.time())
    fuzzer = Fuzzer(name, seed)
    fuzzer.replay()
    replayed = fuzzer.runs
    fuzzer.run(SECONDS)
    print(f"{name}: seed {seed}, {fuzzer.runs - replayed} inputs, {len(fuzzer.seen)} ends")
    assert fuzzer.runs > replayed + 100


def _planted(data: bytes) -> object:
    if b"\xde" in data:
        raise KeyError("a bug")
    if data.startswith(b"c"):
        raise Corrupt("field", "problem")
    return len(data).bit_length()


def _seeds() -> Iterator[bytes]:
    yield bytes(64)


def test_it_finds_what_is_planted_and_writes_it_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "planted", Target(_seeds, lambda data, rng: bytes(data), _planted))
    monkeypatch.setattr(fuzz, "HERE", tmp_path)
    fuzzer = Fuzzer("planted", seed=1)
    fuzzer.replay()
    with pytest.raises(AssertionError, match=r"findings/planted-.* raises KeyError: 'a bug'"):
        fuzzer.run(20)
    (found,) = (tmp_path / "findings").iterdir()
    assert b"\xde" in found.read_bytes()


def test_slow_inputs_are_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "planted", Target(_seeds, lambda data, rng: bytes(data), _planted))
    monkeypatch.setattr(fuzz, "HERE", tmp_path)
    monkeypatch.setattr(fuzz, "LIMIT_S", -1.0)
    with pytest.raises(AssertionError, match="takes"):
        Fuzzer("planted", seed=1).replay()


def test_inputs_are_told_apart_by_how_they_end() -> None:
    TARGETS["planted"] = Target(_seeds, lambda data, rng: bytes(data), _planted)
    try:
        fuzzer = Fuzzer("planted", seed=1)
        assert [fuzzer.try_one(data) for data in (b"a", b"b", b"aaaa", b"c", b"cc")] == [True, False, True, True, False]
    finally:
        del TARGETS["planted"]
