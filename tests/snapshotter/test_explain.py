"""What a start is said to have waited for: accounting over a journal."""

from typing import Any

import pytest

from snapshotter.cli.explain import render
from snapshotter.explain import explain, time_waited

LAYERS = [
    {"digest": "sha256:" + "a" * 64, "name": "a" * 14, "ready_s": 0.1, "mount_s": 0.01},
    {"digest": "sha256:" + "b" * 64, "name": "b" * 14, "ready_s": None, "mount_s": None},
]


def wait(at: float, seconds: float, name: str, by: str, blocks: int = 4) -> dict[str, Any]:
    return {"at": at, "seconds": seconds, "name": name, "start": 0, "end": blocks, "brought_by": by}


def journal(*waits: dict[str, Any], whole_since: float = 0.0) -> dict[str, Any]:
    arrivals = [
        {"at": 100.0, "name": "a" * 14, "lane": "demand", "size": 1000},
        {"at": 100.0, "name": "a" * 14, "lane": "demand", "size": 500},
        {"at": 100.0, "name": "b" * 14, "lane": "background", "size": 7},
    ]
    return {"whole_since": whole_since, "waits": list(waits), "arrivals": arrivals}


def test_waits_that_overlap_count_once() -> None:
    assert time_waited([(1.0, 2.0), (1.5, 3.0), (5.0, 6.0), (5.1, 5.2)]) == pytest.approx(3.0)
    assert time_waited([]) == 0.0


def test_each_layer_has_its_part() -> None:
    waits = [wait(100, 1.0, "a" * 14, "demand"), wait(100.5, 1.0, "a" * 14, "hot", 2), wait(103, 0.2, "b" * 14, "hot")]
    found = explain("app", "registry.test/app:1", LAYERS, journal(*waits), {"state": "over"}, 99.0, 219.0)
    first, second = found.layers
    assert (first.waits, first.missed_blocks, first.longest_s) == (2, 6, 1.0)
    assert first.waited_s == pytest.approx(1.5) and second.waited_s == pytest.approx(0.2)
    assert found.waited_s == pytest.approx(1.7)
    assert dict(first.brought_by) == {"demand": 1, "hot": 1}
    assert dict(first.bytes) == {"demand": 1500} and dict(second.bytes) == {"background": 7}
    assert found.whole
    assert any("1 of these reads were not in the hot set" in line for line in found.findings)
    assert any("most of the waiting was for layer aaaaaaaaaaaa" in line for line in found.findings)


def test_no_wait_and_no_hot_set_are_said() -> None:
    idle = explain("app", "i", LAYERS, journal(), {}, 99.0, 219.0)
    assert idle.findings == ("no read waited: every block was on the node when it was read",)
    cold = explain("app", "i", LAYERS, journal(wait(100, 1, "a" * 14, "demand")), {"state": "none"}, 99.0, 219.0)
    assert any("bootseer record" in line for line in cold.findings)


def test_a_journal_without_the_beginning_is_said() -> None:
    found = explain("app", "i", LAYERS, journal(whole_since=150.0), {}, 99.0, 219.0)
    assert not found.whole and "beginning is missing" in found.findings[0]


def test_the_workload_is_said_where_it_is_known() -> None:
    found = explain("app", "r.test/app:1", LAYERS, journal(), {}, 99.0, 219.0, "train")
    assert found.workload == "train" and "container app of r.test/app:1, workload train, created" in render(
        found.as_json()
    )
    assert "workload" not in render(explain("app", "i", LAYERS, journal(), {}, 99.0, 219.0).as_json())


def test_the_text_has_a_row_a_layer() -> None:
    waits = [wait(100, 1.0, "a" * 14, "demand"), wait(100, 1.0, "a" * 14, "hot")]
    hot = {"workload": "default", "state": "over", "blocks": 10, "hot_blocks": 12, "requests": 3, "bytes": 4000}
    text = render(explain("app", "registry.test/app:1", LAYERS, journal(*waits), hot, 99.0, 219.0).as_json())
    assert "container app of registry.test/app:1, created 1970-01-01 00:01:39 UTC" in text
    assert "10 of 12 blocks came in 3 requests" in text
    row = next(line for line in text.splitlines() if line.startswith("aaaaaaaaaaaa"))
    assert row.split()[:4] == ["aaaaaaaaaaaa", "0.100", "s", "0.010"] and row.endswith("1 demand, 1 hot")
