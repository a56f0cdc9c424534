"""`bootseer lazy`, and what it does to a real daemon: the next pull is ordinary, the mounted layer lives."""

import json
import os
from pathlib import Path

import pytest

from proto import snapshots_pb2
from snapshotter.cli import main
from snapshotter.cli.status import render
from snapshotter.lazyswitch import LazySwitch
from tests.snapshotter.daemon import Daemon, make_layer, origin

Out = pytest.CaptureFixture[str]


def test_the_commands(tmp_path: Path, capsys: Out) -> None:
    (tmp_path / "c.toml").write_text(f'root = "{tmp_path}/root"\nrun = "{tmp_path}"\n')
    where = ["--config", str(tmp_path / "c.toml")]
    said = []
    for verb in ("status", "off", "off", "status", "on", "on"):
        assert main(["lazy", verb, *where]) == 0
        said.append(capsys.readouterr().out.split()[0])
    assert said == ["on:", "off", "off", "off", "on:", "on:"]
    main(["lazy", "off", "--json", *where])
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"lazy": False, "off_since": LazySwitch(tmp_path / "root").off_since()}


def test_a_marker_without_a_time_counts(tmp_path: Path) -> None:
    (tmp_path / "lazy-off").touch()
    assert LazySwitch(tmp_path).off_since() == "an unknown time"


def test_a_marker_that_cannot_be_written(tmp_path: Path, capsys: Out) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "c.toml").write_text(f'root = "{tmp_path}/file"\n')
    assert main(["lazy", "on", "--config", str(tmp_path / "c.toml")]) == 1
    assert "file/lazy-off" in capsys.readouterr().err


def test_what_status_says_of_it() -> None:
    row = {"reason": "no-labels", "layers": 3, "image": "r.io/a:1", "detail": "none came", "last_s": 1.0}
    text = render({"version": "1", "lazy_off_since": "noon", "ordinary": [row]})
    assert "off since noon" in text
    assert "3  no-labels" in text and text.count("r.io/a:1") == 1 and "none came" in text and "last_s" not in text
    assert "lazy" not in render({"version": "1", "lazy_off_since": "", "ordinary": []})


@pytest.mark.system
def test_a_running_daemon(tmp_path: Path) -> None:
    first, second = make_layer(files=2, size=5000), make_layer(files=2, size=5000, seed=1)
    toml = '[lazy]\nexclude = ["*/banned:*"]\n'
    with origin(first, second) as registry, Daemon(tmp_path, registry, toml) as daemon:
        mount = daemon.prepare(first)
        LazySwitch(daemon.root).turn_off()
        with pytest.raises(AssertionError, match="fell back"):
            daemon.prepare(second)
        assert (mount / "f0001").read_bytes() == first.contents["f0001"]
        status = daemon.status()
        assert status["lazy_off_since"] and status["prepares"]["refused"] == 1
        assert [(row["reason"], row["layers"]) for row in status["ordinary"]] == [("switched-off", 1)]
        daemon.stop()
        daemon.start()
        with pytest.raises(AssertionError, match="fell back"):
            daemon.prepare(second)
        LazySwitch(daemon.root).turn_on()
        labels = {
            "containerd.io/snapshot.ref": "sha256:x",
            "containerd.io/snapshot/cri.image-ref": "r.io/banned:1",
            "containerd.io/snapshot/cri.layer-digest": second.digest,
        }
        with daemon.snapshots() as stub:
            stub.Prepare(snapshots_pb2.PrepareSnapshotRequest(snapshotter="b", key="k", labels=labels))
        assert daemon.status()["ordinary"][-1]["reason"] == "excluded"
        path = daemon.prepare(second) / "f0000"
        assert os.stat(path).st_size == 5000 and path.read_bytes() == second.contents["f0000"]
