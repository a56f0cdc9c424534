"""The table and the JSON document of `scripts/bench node`."""

import json

from scripts.rig.nodebench.command import document
from scripts.rig.nodebench.memory import Memory, Moment, ProcessMemory
from scripts.rig.nodebench.prepare import Prepare, Prepared
from scripts.rig.nodebench.statistics import PairedRatio
from scripts.rig.nodebench.table import Row, table
from scripts.rig.nodebench.tar import Tar
from scripts.rig.nodebench.warm import Warm

_TAR = Tar(PairedRatio(20, 1.31, 1.2, 1.4), 1.31, 1.0, 220_000_000)


def test_table_is_markdown_with_verdicts() -> None:
    rows = [Row("a", "1", 3), Row("longer", "2 ms", 4, "<= 3 ms", True), Row("c", "5 ms", 1, "<= 3 ms", False)]
    head, rule, *lines = table(rows).splitlines()
    assert {line.count("|") for line in (head, rule, *lines)} == {6}
    assert len({len(line) for line in (head, rule, *lines)}) == 1
    assert [line.split("|")[5].strip() for line in lines] == ["", "met", "MISSED"]


def test_a_goal_is_met_up_to_its_figure() -> None:
    ratio = PairedRatio(20, 1.02, 1.01, 1.03)
    close = PairedRatio(20, 1.021, 1.01, 1.03)
    assert [row.met for row in Warm(ratio, close, ratio, 1.0, 1.0, 1.0).rows()] == [False, True, True]
    assert [row.met for row in _TAR.rows()] == [False]
    layers = tuple(Prepared(files, 10, ms, 1, 99, 1, 1) for files, ms in ((1, 10.0), (100_000, 10.1)))
    rows = Prepare(layers).rows()
    assert [row.met for row in rows] == [True, False] and "100,000 files" in rows[1].what


def test_memory_is_judged_by_the_sum_over_all_processes() -> None:
    processes = tuple(ProcessMemory(name, 30_000_000, 10_000_000) for name in ("supervisor", "block", "fetch"))
    (row,) = Memory((Moment("20 layers", "mounted", 89.0, processes),)).rows()
    assert row.met is False and "RSS 90 MB" in row.figure and "PSS 30 MB" in row.figure


def test_document_has_rows_and_results() -> None:
    found = json.loads(document({"tar": _TAR}, "a machine"))
    assert found["results"]["tar"]["ratio"] == {"n": 20, "median": 1.31, "low": 1.2, "high": 1.4}
    assert found["rows"][0]["goal"] == "<= 1.3" and found["rows"][0]["met"] is False
    assert found["machine"] == "a machine"
