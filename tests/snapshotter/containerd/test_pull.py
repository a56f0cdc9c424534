"""`bootseer pull` against a real containerd and a real daemon: what it leaves, that it runs, that GC spares it."""

import gzip
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from snapshotter.cli import main
from snapshotter.containerd.pull import image_name
from snapshotter.lazyswitch import LazySwitch
from snapshotter.registry import parse_reference
from tests.snapshotter.containerd.containerd_node import NEEDED, SNAPSHOTTER, Node, runnable_layer, tar_of
from tests.snapshotter.daemon import Daemon
from tests.snapshotter.rangeserver import Action, Behaviour, RangeServer, Request, Truncate

Out = pytest.CaptureFixture[str]
OCI = "application/vnd.oci.image"


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def image_files(tars: Sequence[bytes], indexed: bool, tag: str) -> dict[str, bytes]:
    """What a registry serves for an image of these layers; behind an image index of two platforms if `indexed`."""
    files: dict[str, bytes] = {}

    def put(kind: str, data: bytes, media_type: str) -> dict[str, object]:
        files[f"/v2/app/{kind}/{_digest(data)}"] = data
        return {"mediaType": f"{OCI}.{media_type}", "digest": _digest(data), "size": len(data)}

    rootfs = {"type": "layers", "diff_ids": [_digest(tar) for tar in tars]}
    config = {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": rootfs}
    manifest: dict[str, object] = {
        "schemaVersion": 2,
        "mediaType": f"{OCI}.manifest.v1+json",
        "config": put("blobs", json.dumps(config).encode(), "config.v1+json"),
        "layers": [put("blobs", gzip.compress(tar, mtime=0), "layer.v1.tar+gzip") for tar in tars],
    }
    body = json.dumps(manifest).encode()
    entry = put("manifests", body, "manifest.v1+json")
    if indexed:
        here = {**entry, "platform": {"os": "linux", "architecture": "amd64"}}
        other = {**entry, "digest": _digest(b"?"), "platform": {"os": "linux", "architecture": "s390x"}}
        body = json.dumps({"schemaVersion": 2, "manifests": [other, here]}).encode()
    files[f"/v2/app/manifests/{tag}"] = body
    return files


class Site:
    """A node with a daemon whose pulls come from the served files."""

    def __init__(self, node: Node, daemon: Daemon, host: str) -> None:
        self.node, self.daemon, self.host = node, daemon, host

    def pull(self, tag: str, *more: str) -> int:
        where = ["--containerd-address", f"{self.node.root}/c.sock", "--config", str(self.daemon.home / "config.toml")]
        return main(["pull", f"{self.host}/app:{tag}", *where, *more])

    def fetch(self, tag: str, *more: str) -> int:
        where = ["--containerd-address", f"{self.node.root}/c.sock", "--config", str(self.daemon.home / "config.toml")]
        return main(["fetch", f"{self.host}/app:{tag}", *where, *more])

    def run(self, tag: str, container: str) -> str:
        words = ["run", "--rm", "--snapshotter", SNAPSHOTTER, f"{self.host}/app:{tag}", container]
        return self.node.ctr(*words, "/bin/sh", "-c", "cat /etc/marker")


@contextmanager
def site(files: Mapping[str, bytes], behaviour: Behaviour | None = None) -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="bp", dir="/tmp") as directory, RangeServer(files, behaviour) as server:
        root = Path(directory)
        node = Node(root, root / "run" / "bootseer.sock")
        try:
            with Daemon(root, server) as daemon:
                node.start()
                yield Site(node, daemon, server.host)
                node.stop()
        finally:
            node.stop()


def _images(made: Site) -> str:
    return made.node.ctr("images", "ls", "-q")


@pytest.mark.system
@pytest.mark.timeout(120)
@pytest.mark.skipif(
    any(shutil.which(program) is None for program in NEEDED), reason=f"needs {', '.join(NEEDED)}: run scripts/setup"
)
def test_pull_run_collect_and_refuse(capsys: Out) -> None:
    layers = (runnable_layer(), tar_of({"etc/marker": b"pulled by us"}))
    files = {**image_files(layers, True, "1"), **image_files([*layers, tar_of({"new": b"n"})], False, "2")}
    breaks: list[str] = []  # paths whose next answer stops short

    def behaviour(request: Request) -> Action | None:
        if request.path not in breaks:
            return None
        breaks.remove(request.path)
        return Truncate(1000)

    with site(files, behaviour) as made:
        assert made.pull("1", "--json", "--wait", "complete") == 0
        result = json.loads(capsys.readouterr().out)
        name = f"{made.host}/app:1"
        assert (result["image"], result["snapshotter"], len(result["layers"])) == (name, SNAPSHOTTER, 2)
        assert {row["state"] for row in made.daemon.status()["layers"]} == {"complete"}
        assert made.run("1", "first") == "pulled by us"
        stored = made.node.ctr("content", "ls", "-q").split()
        index, config = files["/v2/app/manifests/1"], json.loads(files[f"/v2/app/manifests/{result['manifest']}"])
        assert set(stored) == {_digest(index), result["manifest"], config["config"]["digest"]}, "no layers"
        assert _digest(index) in made.node.ctr("images", "ls"), "the record names the index, as other clients' do"

        assert made.pull("1") == 0, "once more"
        made.node.ctr("images", "tag", name, "other.test/x:1")
        made.node.ctr("images", "rm", "--sync", "other.test/x:1")  # collects garbage before it returns
        assert made.run("1", "second") == "pulled by us"
        assert made.daemon.status()["prepares"]["lazy"] == 2

        breaks.append(f"/v2/app/blobs/{result['layers'][0]}")
        _see_fetch(made, capsys, result["layers"], files)
        assert not breaks, "one answer was broken off, and taken up again"

        LazySwitch(made.daemon.root).turn_off()
        capsys.readouterr()
        assert made.pull("2") == 1
        assert "cannot be lazy" in capsys.readouterr().err
        assert _images(made).split() == [name] and len(made.node.snapshots()) == 2
        LazySwitch(made.daemon.root).turn_on()
        assert made.pull("2", "--wait", "complete") == 0
        assert made.run("2", "third") == "pulled by us"
        for tag in ("1", "2"):
            made.node.ctr("images", "rm", "--sync", f"{made.host}/app:{tag}")
        assert made.node.snapshots() == [] and made.node.ctr("content", "ls", "-q") == ""

        assert made.pull("3") == 1
        assert "app" in capsys.readouterr().err
        assert made.pull("1", "--snapshotter", "nobody") == 1
        assert "nobody" in capsys.readouterr().err and _images(made) == ""


def _see_fetch(made: Site, capsys: Out, layers: list[str], files: Mapping[str, bytes]) -> None:
    """`bootseer fetch` brings the layers, which then stay, and a second time has nothing to do."""
    capsys.readouterr()
    assert made.fetch("1", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["fetched"] == layers and result["bytes"] == sum(len(files[f"/v2/app/blobs/{it}"]) for it in layers)
    made.node.ctr("images", "tag", f"{made.host}/app:1", "other.test/x:1")
    made.node.ctr("images", "rm", "--sync", "other.test/x:1")  # collects garbage before it returns
    assert set(layers) <= set(made.node.ctr("content", "ls", "-q").split())
    made.node.ctr("images", "export", str(made.node.root / "app.tar"), f"{made.host}/app:1")
    assert made.fetch("1") == 0
    assert "0 of 2 layers fetched" in capsys.readouterr().out
    assert made.fetch("nothing") == 1
    assert "pull it first" in capsys.readouterr().err


# --- values


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("debian", "docker.io/library/debian:latest"),
        ("r.io/a:1", "r.io/a:1"),
        (f"r.io/a@sha256:{'ab' * 32}", f"r.io/a@sha256:{'ab' * 32}"),
    ],
)
def test_names_are_containerds(text: str, name: str) -> None:
    assert image_name(parse_reference(text)) == name


def test_without_a_containerd(tmp_path: Path, capsys: Out) -> None:
    assert main(["pull", "r.io/a:1", "--containerd-address", str(tmp_path / "c.sock")]) == 1
    assert "there is no such socket" in capsys.readouterr().err
