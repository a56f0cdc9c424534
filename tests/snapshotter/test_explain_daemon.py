"""`bootseer explain` against a running daemon."""

import json
import subprocess
from pathlib import Path

import pytest

from proto import snapshots_pb2
from tests.snapshotter.daemon import (
    BOOTSEER,
    Daemon,
    drop_caches,
    expected,
    make_layer,
    origin,
    reader,
    write_index,
)

pytestmark = pytest.mark.system


def _bootseer(daemon: Daemon, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [BOOTSEER, *words, "--config", str(daemon.home / "config.toml")]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60)


def test_explain_tells_who_waited(tmp_path: Path) -> None:
    layer = make_layer(files=4, size=1 << 20)
    toml = f'[fetch]\nbackground = false\n[index]\nurl = "{tmp_path}/index"\n[record]\nauto = false\n'
    write_index(tmp_path / "index", layer)
    with origin(layer) as registry, Daemon(tmp_path, registry, toml) as daemon:
        mount = daemon.prepare(layer)
        with daemon.snapshots() as snapshots:
            answers = snapshots.List(snapshots_pb2.ListSnapshotsRequest())
            [parent] = [info.name for answer in answers for info in answer.info]
            for key in ("default/9/app-1", "default/10/app-2"):
                snapshots.Prepare(snapshots_pb2.PrepareSnapshotRequest(snapshotter="b", key=key, parent=parent))
        name = min(layer.contents)
        drop_caches()
        assert reader("read", mount / name).communicate(timeout=60)[0].split() == expected(layer, name)
        text = _bootseer(daemon, "explain", "app-1").stdout
        assert "reads missed their blocks" in text and "demand" in text
        answer = json.loads(_bootseer(daemon, "explain", "app-1", "--json").stdout)
        [share] = answer["layers"]
        assert share["digest"] == layer.digest and share["waits"] > 0 and share["ready_s"] > 0
        assert share["bytes"]["demand"] > 0 and share["brought_by"]["demand"] == share["waits"]
        assert answer["whole"] and answer["waited_s"] > 0
        for words, problem in (("app", "2 match"), ("nobody", "no container nobody")):
            refused = _bootseer(daemon, "explain", words)
            assert refused.returncode == 1 and problem in refused.stderr and refused.stderr.count("\n") == 1
