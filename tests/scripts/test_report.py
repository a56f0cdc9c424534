"""The demo's table and JSON document."""

import json
from pathlib import Path

from scripts.rig.coldstart import ColdStart, System
from scripts.rig.oci import Layout
from scripts.rig.report import document, table

LAYOUT = Layout(Path("/x"), "sha256:aa", ("sha256:1", "sha256:2", "sha256:3"), 82_000_485)


def _run(system: System, ready_s: float, size: int = 1_000_000, requests: int = 6) -> ColdStart:
    return ColdStart(system, ready_s / 2, ready_s, size, requests, True)


RUNS = [
    _run(System.BOOTSEER, 2.0),
    _run(System.OVERLAYFS, 10.0),
    _run(System.OVERLAYFS, 14.0),
    _run(System.OVERLAYFS, 12.0, 85_000_000, 7),
]


def test_document_has_exactly_the_promised_shape() -> None:
    assert json.loads(document(LAYOUT, 100.0, 20.0, RUNS[:2])) == {
        "image": {"layers": 3, "bytes": 82_000_485},
        "link": {"mbit": 100, "rtt_ms": 20},
        "runs": [
            {"system": "bootseer", "ready_s": 2.0, "bytes": 1_000_000, "requests": 6, "output_ok": True},
            {"system": "overlayfs", "ready_s": 10.0, "bytes": 1_000_000, "requests": 6, "output_ok": True},
        ],
    }


def test_table_shows_medians_spreads_and_ratios() -> None:
    lines = [line.split("  ") for line in table(RUNS).splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert cells[2] == ["overlayfs", "3", "12.00 [10.00-14.00]", "1.00", "1.0 [1.0-85.0]", "6 [6-7]"]
    assert cells[3] == ["bootseer", "1", "2.00", "0.17", "1.0", "6"]


def test_a_hot_start_is_a_row_below_the_others() -> None:
    lines = table([_run(System.BOOTSEER_HOT, 1.2), *RUNS]).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["overlayfs", "bootseer", "bootseer-hot"]
    assert lines[-1].split()[:4] == ["bootseer-hot", "1", "1.20", "0.10"]


def test_table_without_overlayfs_has_no_ratio() -> None:
    assert table(RUNS[:1]).splitlines()[-1].split()[:4] == ["bootseer", "1", "2.00", "-"]
