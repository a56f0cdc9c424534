"""What is kept of recordings: files of them, and the sets they are made into."""

from dataclasses import replace
from pathlib import Path

import pytest

from blockindex.hotset import HotSet
from snapshotter.config import WorkloadConfig
from snapshotter.hotstore import HotStore
from snapshotter.record.records import Records
from tests.blockindex.hotsets import hotset

BLOCKS = (100,)
KEY = hotset(BLOCKS).image_key
ARGV = "sha256:" + "ab" * 32


def record(block: int, workload: str) -> HotSet:
    return replace(hotset(BLOCKS, (0, block, block + 1, 0), workload=workload), argvs=(ARGV,))


@pytest.fixture
def store(tmp_path: Path) -> HotStore:
    return HotStore(tmp_path)


@pytest.fixture
def records(tmp_path: Path, store: HotStore) -> Records:
    return Records(tmp_path, store, WorkloadConfig(records=3))


def hot(store: HotStore, workload: str) -> list[int] | None:
    """The blocks of a set in the store."""
    pack = store.load(KEY, workload)
    if pack is None:
        return None
    return sorted(block for it in pack.hotset.extents for block in range(it.start, it.end))


def test_a_workload_has_its_own_set_and_default_has_all(records: Records, store: HotStore) -> None:
    kept = records.keep(record(1, "train"), commanded=False)
    assert (kept.hotset.workload, kept.path) == ("train", store.path(KEY, "train"))
    records.keep(record(50, "serve"), commanded=False)
    assert (hot(store, "train"), hot(store, "serve"), hot(store, "default")) == ([1], [50], [1, 50])
    train, default = store.load(KEY, "train"), store.load(KEY, "default")
    assert train is not None and train.hotset.argvs == (ARGV,)
    assert default is not None and default.hotset.argvs == () and default.hotset.records == 2
    assert records.mixes_default(KEY)


def test_only_the_last_count(records: Records, store: HotStore, tmp_path: Path) -> None:
    for block in range(5):
        records.keep(record(block, "train"), commanded=False)
    assert hot(store, "train") == [2, 3, 4]
    assert len(list(tmp_path.glob("records/*/train/*"))) == 3, "and no more are on the disk"
    records.keep(record(9, "serve"), commanded=False)
    assert hot(store, "default") == [3, 4, 9], "the oldest falls out"


def test_a_command_replaces_what_there_was(records: Records, store: HotStore) -> None:
    records.keep(record(1, "train"), commanded=False)
    records.keep(record(2, "train"), commanded=True)
    assert (hot(store, "train"), hot(store, "default")) == ([2], [2])


def test_a_default_that_somebody_chose_stays(records: Records, store: HotStore) -> None:
    records.keep(record(7, "default"), commanded=True)
    records.keep(record(1, "train"), commanded=False)
    assert (hot(store, "train"), hot(store, "default")) == ([1], [7])
    assert not records.mixes_default(KEY)
    store.remove(KEY, "default")
    records.keep(record(2, "train"), commanded=False)
    assert hot(store, "default") == [1, 2] and records.mixes_default(KEY)
    store.save(record(42, "default"))  # imported
    records.keep(record(3, "train"), commanded=False)
    assert hot(store, "default") == [42]


def test_a_default_that_was_carried_over_is_a_guess(records: Records, store: HotStore) -> None:
    store.save(replace(record(42, "default"), carried_from="sha256:" + "0" * 64))
    records.keep(record(1, "train"), commanded=False)
    assert hot(store, "default") == [1] and records.mixes_default(KEY)


def test_a_recording_of_an_unknown_container_is_part_of_default_only(records: Records, store: HotStore) -> None:
    records.keep(record(1, "train"), commanded=False)
    kept = records.keep(record(5, "default"), commanded=False)
    assert kept.path == store.path(KEY, "default") and kept.hotset.records == 2
    assert (hot(store, "default"), hot(store, "train")) == ([1, 5], [1])


def test_what_was_removed_does_not_come_back(records: Records, store: HotStore) -> None:
    for block, workload in ((1, "train"), (2, "serve"), (3, "default")):
        records.keep(record(block, workload), commanded=False)
    for workload in ("train", "default"):
        store.remove(KEY, workload)
    records.keep(record(4, "train"), commanded=False)
    assert (hot(store, "train"), hot(store, "default")) == ([4], [2, 4])


def test_a_mark_asks_for_one_recording(records: Records) -> None:
    assert records.stale(KEY, "train") is None
    records.mark_stale(KEY, "train", 0.25)
    records.keep(record(2, "serve"), commanded=False)
    assert records.stale(KEY, "train") == 0.25
    records.keep(record(1, "train"), commanded=False)
    assert records.stale(KEY, "train") is None


def test_a_damaged_recording_is_passed_over(
    records: Records, store: HotStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records.keep(record(1, "train"), commanded=False)
    [path] = tmp_path.glob("records/*/train/*.bsh")
    path.write_bytes(b"")
    records.keep(record(2, "train"), commanded=False)
    assert hot(store, "train") == [2] and "record.damaged" in caplog.text
    caplog.clear()
