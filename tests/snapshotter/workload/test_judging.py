"""What nobody had foreseen."""

from pathlib import Path

from snapshotter.workload.judging import blocks_read, unforeseen
from tests.blockindex.hotsets import hotset


def _wait(name: str, start: int, end: int, by: str = "demand") -> dict[str, object]:
    return {"name": name, "start": start, "end": end, "brought_by": by}


def test_blocks_count_once_and_only_those_outside_the_set() -> None:
    waits = [_wait("a", 0, 4), _wait("a", 2, 6), _wait("b", 0, 4), _wait("a", 8, 9, "hot"), _wait("other", 0, 9)]
    assert unforeseen(waits, ["a", "b"], None) == 10
    assert unforeseen(waits, ["a", "b"], hotset((10, 10), (0, 0, 3, 0), (1, 3, 10, 0))) == 3 + 3
    assert unforeseen([], ["a", "b"], hotset((10, 10), (0, 0, 3, 0))) == 0


def test_only_block_devices_are_counted(tmp_path: Path) -> None:
    assert blocks_read(tmp_path / "none") is None
    assert blocks_read(Path("/proc")) is None
