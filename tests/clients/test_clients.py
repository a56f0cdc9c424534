"""Real clients against the real daemon: is the pull lazy, does the container run, is everything gone afterwards.

Commands are those of docs/clients.md, configurations those of docs/node-setup.md. What a test adds: the registry has no
TLS, containers get a cgroup that can be removed, and this machine may forbid what CRI wants of the OOM score.
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from scripts.rig.errors import RigError
from scripts.rig.image import RECIPES
from tests.clients.cases import CASES, INCOMPLETE, Case
from tests.clients.conftest import Cells, Images
from tests.clients.node import REGISTRY, Containerd, Node
from tests.clients.ready import ready_node
from tests.snapshotter.daemon import drop_caches
from tests.snapshotter.images import gzip_layer, write_layout

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]  # the first time the clients are built

_IMAGE = f"{REGISTRY}/app:1"
_READY = RECIPES["tiny"].ready


@pytest.mark.parametrize("case", CASES, ids=str)
def test_client(
    case: Case,
    containerds: Mapping[str, Containerd],
    images: Images,
    cells: Cells,
    request: pytest.FixtureRequest,
) -> None:
    if case.client == "nerdctl":
        request.getfixturevalue("nerdctl")
    seen = _try(case, containerds[case.containerd], images)
    cells.append((case.row, case.containerd, seen))
    assert seen == case.outcome


@pytest.mark.parametrize("case", INCOMPLETE, ids=str)
def test_without_a_part_of_the_configuration(case: Case, containerds: Mapping[str, Containerd], images: Images) -> None:
    assert _try(case, containerds[case.containerd], images) == case.outcome


def test_a_pod_outlives_daemon_and_containerd(containerds: Mapping[str, Containerd], images: Images) -> None:
    case = next(case for case in CASES if case.client == "crictl" and case.containerd == "2.4")
    with ready_node(case, containerds["2.4"], images) as node:
        pod = Pod(node)
        node.type(case.command)
        container = pod.start("/bin/busybox", "sleep", "1000")
        # What it runs is in memory then: a read that finds no daemon fails, see the README's limits.
        assert _READY in node.run("crictl", "exec", container, "/bin/app")
        for service in ("bootseer", "containerd"):
            node.restart(service)
            drop_caches()
            _until(lambda: "CONTAINER_RUNNING" in _said(node, "crictl", "inspect", container))
            assert _READY in node.run("crictl", "exec", container, "/bin/app")
        assert f'"mountpoint": "{node.home}/b"' in node.run("crictl", "imagefsinfo")
        pod.remove()
        _until(lambda: _clean(node, case.plugin))


def test_an_image_of_130_layers(containerds: Mapping[str, Containerd], images: Images, tmp_path: Path) -> None:
    """Longer mount options than a page, were it not for short paths; no layer but the first describes directories."""
    base = images.app.path / "blobs" / "sha256" / images.app.layers[0].removeprefix("sha256:")
    tops = [gzip_layer({f"d/{n % 7}/{n}": b"%d" % n, "d/last": b"%d" % n}) for n in range(1, 130)]
    write_layout(tmp_path / "many", [base.read_bytes(), *tops])
    case = next(case for case in CASES if case.client == "ctr-remote" and case.containerd == "2.4")
    with ready_node(case, containerds["2.4"], images) as node:
        node.push(tmp_path / "many", "app:1")
        node.type(case.command)
        assert node.status()["prepares"]["lazy"] == 130
        shell = "cat /d/last; echo; for each in /d/*/*; do cat $each >/dev/null || exit; done; ls -d /d/*/* | wc -l"
        run = ["ctr", "run", "--cgroup", "", "--rm", "--snapshotter", "bootseer", _IMAGE, "app"]
        assert node.run(*run, "/bin/sh", "-c", shell).split() == ["129", "129"]
        node.run("ctr", "images", "rm", "--sync", _IMAGE)
        _until(lambda: _clean(node, case.plugin))


def _try(case: Case, containerd: Containerd, images: Images) -> str:
    """Pull, run and remove on a new node; returns what the pull was."""
    assert shutil.which(case.client, path=containerd.path), f"{case.client} is missing"
    cri = case.client == "crictl"
    layers = {*images.app.layers, *(images.pause.layers if cri else ())}
    with ready_node(case, containerd, images) as node:
        try:
            printed, outcome = (_pod if cri else _container)(node, case, layers)
        except RigError as error:
            if case.says and case.says in str(error):
                return "fails"
            raise
        assert _READY in printed
        _until(lambda: _clean(node, case.plugin))
        return outcome


def _clean(node: Node, plugin: str) -> bool:
    """Whether nothing is left of images and containers but the block store."""
    mounted = any(layer["mount"] for layer in node.status()["layers"])
    return not mounted and node.snapshots(plugin) == [] and node.leftovers() == []


def _container(node: Node, case: Case, layers: set[str]) -> tuple[str, str]:
    """Pull with `ctr` or nerdctl, run, remove; returns the container's output and what the pull was."""
    printed = node.type(case.command)
    outcome = _outcome(node, layers)
    if case.client == "nerdctl":
        if " run " not in case.command:
            run = f"sudo nerdctl --snapshotter {case.plugin} run --rm --network none {_IMAGE}"
            printed = node.type(run)
        node.run("nerdctl", "--snapshotter", case.plugin, "rmi", _IMAGE)
    else:
        printed = node.run("ctr", "run", "--cgroup", "", "--rm", "--snapshotter", case.plugin, _IMAGE, "app")
        node.run("ctr", "images", "rm", "--sync", _IMAGE)
    return printed, outcome


def _pod(node: Node, case: Case, layers: set[str]) -> tuple[str, str]:
    """A pod on the host's network and a container in it, as the kubelet makes them; then all is removed."""
    pod = Pod(node)
    node.type(case.command)
    outcome = _outcome(node, layers)
    container = pod.start()
    _until(lambda: '"CONTAINER_EXITED"' in node.run("crictl", "inspect", container))
    printed = node.run("crictl", "logs", container)
    pod.remove()
    return printed, outcome


class Pod:
    """A pod of its own on the node's network."""

    def __init__(self, node: Node, name: str = "pod", annotations: Mapping[str, str] | None = None) -> None:
        self._node = node
        self._config = node.home / f"{name}.json"
        network = {"namespace_options": {"network": 2}}
        config = {
            "metadata": {"name": name, "namespace": "default", "uid": name, "attempt": 1},
            "annotations": annotations or {},
            "log_directory": f"{node.home}/logs",
            "linux": {"cgroup_parent": f"/{node.cgroup}", "security_context": network},
        }
        self._config.write_text(json.dumps(config))
        self._id = node.run("crictl", "runp", str(self._config)).strip()

    def start(self, *command: str, image: str = _IMAGE) -> str:
        """Start a container of the image (its own command by default), and return its name."""
        name = self.create(*command, image=image)
        self._node.run("crictl", "start", name)
        return name

    def create(self, *command: str, image: str = _IMAGE, name: str = "app", **more: Mapping[str, str]) -> str:
        """Create a container, with `more` in its configuration, and return its name."""
        config = {"metadata": {"name": name}, "image": {"image": image}, "command": command, "log_path": f"{name}.log"}
        path = self._node.home / "container.json"
        path.write_text(json.dumps({**config, "linux": {}, **more}))
        return self._node.run("crictl", "create", self._id, str(path), str(self._config)).strip()

    def remove(self) -> None:
        """Remove the pod with its containers, and all images."""
        self._node.run("crictl", "rmp", "--force", self._id)
        self._node.run("crictl", "rmi", "--all")


def _said(node: Node, *argv: str) -> str:
    """What a command prints; nothing while it fails."""
    try:
        return node.run(*argv)
    except RigError:
        return ""


def _outcome(node: Node, layers: set[str]) -> str:
    """What became of the layers, by the daemon's counters and by what containerd has downloaded."""
    prepares: dict[str, int] = node.status()["prepares"]
    downloaded = layers & node.blobs()
    lazy = prepares["lazy"]
    if lazy == len(layers) and not downloaded and not prepares["ordinary"] and not prepares["fallback"]:
        return "lazy"
    if lazy == 0 and downloaded == layers and prepares["ordinary"] == len(layers):
        return "unpacked"
    return f"{len(downloaded)} of {len(layers)} layers downloaded, {prepares}"


def _until(holds: Callable[[], bool], limit_s: float = 20) -> None:
    """containerd collects garbage when it likes."""
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)
