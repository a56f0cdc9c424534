"""All fuzz targets: the kept corpus always, a bounded run with fresh inputs in full test runs; the fuzzer itself."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from blockindex.errors import BlockIndexError, Corrupt
from tests import fuzzing
from tests.blockindex.fuzz import TARGETS as OF_BLOCKINDEX
from tests.fuzzing import Fuzzer, Target
from tests.snapshotter.fuzz import TARGETS as OF_SNAPSHOTTER

TARGETS: Mapping[str, Target] = {**OF_BLOCKINDEX, **OF_SNAPSHOTTER}
SECONDS = {**dict.fromkeys(OF_BLOCKINDEX, 2.0), **dict.fromkeys(OF_SNAPSHOTTER, 0.6)}
"""A target; together with the replays less than half a minute. What finds more is `scripts/fuzz`, by hand."""


@pytest.mark.parametrize("name", TARGETS)
def test_kept_inputs(name: str) -> None:
    fuzzer = Fuzzer(name, TARGETS[name], seed=0)
    fuzzer.replay()
    assert fuzzer.kept() and fuzzer.runs == len(fuzzer.kept()) + len(list(fuzzer.target.seeds()))


@pytest.mark.system  # needs no root: the mark keeps it out of the quick runs
@pytest.mark.parametrize("name", TARGETS)
def test_fresh_inputs(name: str) -> None:
    """Every run tries other inputs; a finding's message names the file that holds it."""
    seed = int(time.time())
    fuzzer = Fuzzer(name, TARGETS[name], seed)
    fuzzer.corpus = [*TARGETS[name].seeds(), *(path.read_bytes() for path in fuzzer.kept())]
    fuzzer.run(SECONDS[name])
    print(f"{name}: seed {seed}, {fuzzer.runs} inputs, {len(fuzzer.seen)} ends")
    assert fuzzer.runs > 10


def _planted(data: bytes) -> object:
    if b"\xde" in data:
        raise KeyError("a bug")
    if data.startswith(b"c"):
        raise Corrupt("field", "problem")
    return len(data).bit_length()


def _seeds() -> Iterator[bytes]:
    yield bytes(64)


@pytest.fixture
def planted(tmp_path: Path) -> Fuzzer:
    target = Target(tmp_path, BlockIndexError, _seeds, lambda data, rng: bytes(data), _planted)
    return Fuzzer("planted", target, seed=1)


def test_it_finds_what_is_planted_and_writes_it_down(tmp_path: Path, planted: Fuzzer) -> None:
    planted.replay()
    with pytest.raises(AssertionError, match=r"findings/planted-.* raises KeyError: 'a bug'"):
        planted.run(20)
    (found,) = (tmp_path / "findings").iterdir()
    assert b"\xde" in found.read_bytes()


def test_slow_inputs_are_findings(monkeypatch: pytest.MonkeyPatch, planted: Fuzzer) -> None:
    monkeypatch.setattr(fuzzing, "LIMIT_S", -1.0)
    with pytest.raises(AssertionError, match="takes"):
        planted.replay()


def test_inputs_are_told_apart_by_how_they_end(planted: Fuzzer) -> None:
    assert [planted.try_one(data) for data in (b"a", b"b", b"aaaa", b"c", b"cc")] == [True, False, True, True, False]
