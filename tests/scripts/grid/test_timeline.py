"""Timelines: moments of bench, link, servers and daemon in one order."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from scripts.rig.errors import RigError
from scripts.rig.grid.report import main
from scripts.rig.grid.timeline import milestones, read_timeline, render

STARTED = datetime(2026, 11, 30, 21, 0, 0, tzinfo=UTC).timestamp()
DIGEST = "ab" * 32


def _write(path: Path, lines: list[dict[str, object]]) -> None:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A run that pulls until 1 s and is ready at 2 s; the daemon lands twenty frames."""
    directory = tmp_path / "numpy-metro-bootseer-hot-1"
    directory.mkdir()
    _write(directory / "events.jsonl", [{"t": t, "event": e} for t, e in
                                        ((0.0, "pull started"), (1.0, "pull returned"), (2.0, "ready"))])  # fmt: skip
    _write(directory / "link.jsonl", [{"t": 0.1 * n, "to_node": n * 1_000_000} for n in range(31)])
    registry = f'10.77.0.1 - - [30/Nov/2026:21:00:00 +0000] "GET /v2/a/blobs/sha256:{DIGEST} HTTP/1.1" 206 4096 "" "x"'
    _write(directory / "requests.jsonl", [
        {"t": 0.2, "server": "registry", "line": registry},
        {"t": 0.3, "server": "files", "line": f"GET /sha256/{DIGEST}.bsi 200 77"},
        {"t": 0.3, "server": "files", "line": "Traceback of something"},
    ])  # fmt: skip
    (directory / "clock.json").write_text(json.dumps({"started": STARTED}))
    stamp = "time=2026-11-30T{}Z level=info logger=snapshotter.x {}"
    log = [stamp.format("20:59:59.000", "service.ready pid=7"), stamp.format("21:00:00.400", "hotset.found bytes=9")]
    log += [stamp.format(f"21:00:01.{n:02}0", f"frame.landed frame={n}") for n in range(20)]
    (directory / "bootseer.log").write_text("\n".join([*log, "Traceback: no event"]))
    return directory


def test_moments_of_all_sources_in_one_order(kept: Path) -> None:
    timeline = read_timeline(kept)
    assert timeline.ready_s == 2.0
    assert [moment.t for moment in timeline.moments] == sorted(moment.t for moment in timeline.moments)
    found = {(moment.source, moment.text): moment.t for moment in timeline.moments}
    assert found["registry", "GET /v2/a/blobs/sha256:abababababab 206, 4096 bytes"] == 0.2
    assert found["files", "GET /sha256/abababababab.bsi 200, 77 bytes"] == 0.3
    assert found["daemon", "hotset.found bytes=9"] == pytest.approx(0.4)
    assert found["link", "50 % of the 20.00 MB that were received until ready"] == pytest.approx(1.0)
    assert found["daemon", "frame.landed: the first of 20: frame.landed frame=0"] == pytest.approx(1.0)
    assert found["daemon", "frame.landed: 10 % of 20"] == pytest.approx(1.01)
    assert found["daemon", "frame.landed: 100 % of 20"] == pytest.approx(1.19)
    assert not [text for _, text in found if "service.ready" in text], "before the order to pull"


def test_it_is_shown_until_a_second_after_ready(kept: Path) -> None:
    text = render(read_timeline(kept))
    assert text.splitlines()[:2] == ["numpy-metro-bootseer-hot-1", "   0.000 s  bench     pull started"]
    assert "(2 later ones left out)" in render(read_timeline(kept), until_s=1.99)
    assert "left out" not in text


def test_few_are_shown_each() -> None:
    happened = [(0.1 * n, f"number {n}") for n in range(6)]
    assert [moment.text for moment in milestones("daemon", "kind", happened)] == [text for _, text in happened]


def test_the_command_shows_it_or_says_what_is_wrong(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--timeline", str(kept)]) == 0
    assert "pull returned" in capsys.readouterr().out
    (kept / "clock.json").unlink()
    assert main(["--timeline", str(kept)]) == 1
    assert "holds no timeline" in capsys.readouterr().err
    with pytest.raises(RigError, match="holds no timeline"):
        read_timeline(kept.parent)
