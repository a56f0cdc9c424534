"""Real clients against the real daemon: is the pull lazy, does the container run, is everything gone afterwards.

Configuration and commands are those of docs/clients.md. What a test adds to them: the registry has no TLS, containers
get a cgroup that can be removed, and this machine may forbid what CRI wants of the OOM score.
"""

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from scripts.rig.errors import RigError
from scripts.rig.image import RECIPES
from scripts.rig.workspace import Workspace
from tests.clients.cases import CASES, INCOMPLETE, Case
from tests.clients.conftest import Cells, Images
from tests.clients.document import configuration
from tests.clients.node import REGISTRY, Containerd, Node
from tests.snapshotter.daemon import drop_caches
from tests.snapshotter.images import gzip_layer, write_layout

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]  # the first time the clients are built

_IMAGE = f"{REGISTRY}/app:1"
_TRANSFER = next(case for case in CASES if case.client == "ctr" and case.outcome == "lazy")
_READY = RECIPES["tiny"].ready
_CRI_HERE = {
    "1.6": (
        '[plugins."io.containerd.grpc.v1.cri"]\n',
        '[plugins."io.containerd.grpc.v1.cri".cni]\nconf_dir = "/nonexistent"\n{head}restrict_oom_score_adj = true\n',
    ),
    "2.4": (
        '[plugins."io.containerd.cri.v1.images"]\n',
        '[plugins."io.containerd.cri.v1.runtime".cni]\nconf_dir = "/nonexistent"\n'
        '[plugins."io.containerd.cri.v1.runtime"]\nrestrict_oom_score_adj = true\n{head}',
    ),
}


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
    with _node(case, containerds["2.4"], images) as node:
        pod = Pod(node)
        node.run(*_words(case.command, node))
        container = pod.start("/bin/busybox", "sleep", "1000")
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
    with _node(case, containerds["2.4"], images) as node:
        node.push(tmp_path / "many", "app:1")
        node.run(*_words(case.command, node))
        assert node.status()["prepares"]["lazy"] == 130
        shell = "cat /d/last; echo; for each in /d/*/*; do cat $each >/dev/null || exit; done; ls -d /d/*/* | wc -l"
        run = ["ctr", "run", "--cgroup", "", "--rm", "--snapshotter", "bootseer", _IMAGE, "app"]
        assert node.run(*run, "/bin/sh", "-c", shell).split() == ["129", "129"]
        node.run("ctr", "images", "rm", "--sync", _IMAGE)
        _until(lambda: _clean(node, case.plugin))


def test_ctr_after_a_lazy_pull(containerds: Mapping[str, Containerd], images: Images) -> None:
    """What the document's last table says of it."""
    with _node(_TRANSFER, containerds["2.4"], images) as node:
        other = _pull_again(node, images)
        export = ("ctr", "images", "export", f"{node.home}/image.tar", _IMAGE)
        with pytest.raises(RigError, match=r"content digest sha256:[0-9a-f]{64}: not found"):
            node.run(*export)
        node.run("ctr", "images", "push", "--plain-http", other)
        node.run("ctr", "content", "fetch", "--plain-http", _IMAGE)
        node.run(*export)


@pytest.mark.usefixtures("nerdctl")
def test_nerdctl_after_a_lazy_pull(containerds: Mapping[str, Containerd], images: Images) -> None:
    """What the document's last table says of it."""
    with _node(_TRANSFER, containerds["2.4"], images) as node:
        nerdctl = ("nerdctl", "--snapshotter", "bootseer")
        detached = (*nerdctl, "run", "-d", "--name", "container", "--network", "none", "--cgroup-parent", node.cgroup)
        new = f"{REGISTRY}/new:1"
        save = ["save", "-o", f"{node.home}/image.tar", _IMAGE]
        for argv in (save, ["tag", _IMAGE, new], ["commit", "container", new]):
            other = _pull_again(node, images)
            node.run(*detached, _IMAGE, "/bin/busybox", "sleep", "1000")
            with pytest.raises(RigError, match=f"failed to resolve reference .*{other}: not found"):
                node.run(*nerdctl, "push", other)
            node.run(*nerdctl, *argv)
            assert set(images.app.layers) <= node.blobs()
            if new in argv:
                node.run(*nerdctl, "push", new)
            node.run(*nerdctl, "rm", "--force", "container")
            node.run("ctr", "images", "rm", "--sync", *node.run("ctr", "images", "ls", "-q").split())


def _pull_again(node: Node, images: Images) -> str:
    """Pull lazily with `ctr`; returns another name of the image."""
    other = f"{REGISTRY}/other:1"
    node.run(*_words(_TRANSFER.command, node))
    node.run("ctr", "images", "tag", "--force", _IMAGE, other)
    assert not node.blobs() & set(images.app.layers)
    return other


def _try(case: Case, containerd: Containerd, images: Images) -> str:
    """Pull, run and remove on a new node; returns what the pull was."""
    assert shutil.which(case.client, path=containerd.path), f"{case.client} is missing"
    cri = case.client == "crictl"
    layers = {*images.app.layers, *(images.pause.layers if cri else ())}
    with _node(case, containerd, images) as node:
        try:
            printed, outcome = (_pod if cri else _container)(node, case, layers)
        except RigError as error:
            if case.says and case.says in str(error):
                return "fails"
            raise
        assert _READY in printed
        _until(lambda: _clean(node, case.plugin))
        return outcome


@contextmanager
def _node(case: Case, containerd: Containerd, images: Images) -> Iterator[Node]:
    """A node with the case's configuration, and both images in its registry."""
    cri = case.client == "crictl"
    configuration = _configuration(case, cri)
    with Workspace() as workspace, closing(Node(workspace, containerd, configuration, images.indexes, cri)) as node:
        node.push(images.app.path, "app:1")
        node.push(images.pause.path, "pause:1")
        yield node


def _clean(node: Node, plugin: str) -> bool:
    """Whether nothing is left of images and containers but the block store."""
    mounted = any(layer["mount"] for layer in node.status()["layers"])
    return not mounted and node.snapshots(plugin) == [] and node.leftovers() == []


def _configuration(case: Case, cri: bool) -> str:
    """The document's configuration for the case."""
    text = configuration(case.containerd, cri).replace("registry.example", REGISTRY)
    if case.without:
        assert case.without in text
        text = text.replace(case.without, "")
    if cri:
        head, replacement = _CRI_HERE[case.containerd]
        assert head in text
        text = text.replace(head, replacement.format(head=head))
    return text.replace("[proxy_plugins.bootseer]", f"[proxy_plugins.{case.plugin}]")


def _container(node: Node, case: Case, layers: set[str]) -> tuple[str, str]:
    """Pull with `ctr` or nerdctl, run, remove; returns the container's output and what the pull was."""
    printed = node.run(*_words(case.command, node))
    outcome = _outcome(node, layers)
    if case.client == "nerdctl":
        if " run " not in case.command:
            run = f"sudo nerdctl --snapshotter {case.plugin} run --rm --network none {_IMAGE}"
            printed = node.run(*_words(run, node))
        node.run("nerdctl", "--snapshotter", case.plugin, "rmi", _IMAGE)
    else:
        printed = node.run("ctr", "run", "--cgroup", "", "--rm", "--snapshotter", case.plugin, _IMAGE, "app")
        node.run("ctr", "images", "rm", "--sync", _IMAGE)
    return printed, outcome


def _pod(node: Node, case: Case, layers: set[str]) -> tuple[str, str]:
    """A pod on the host's network and a container in it, as the kubelet makes them; then all is removed."""
    pod = Pod(node)
    node.run(*_words(case.command, node))
    outcome = _outcome(node, layers)
    container = pod.start()
    _until(lambda: '"CONTAINER_EXITED"' in node.run("crictl", "inspect", container))
    printed = node.run("crictl", "logs", container)
    pod.remove()
    return printed, outcome


class Pod:
    """A pod of its own on the node's network."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._config = node.home / "pod.json"
        network = {"namespace_options": {"network": 2}}
        config = {
            "metadata": {"name": "pod", "namespace": "default", "uid": "1", "attempt": 1},
            "log_directory": f"{node.home}/logs",
            "linux": {"cgroup_parent": f"/{node.cgroup}", "security_context": network},
        }
        self._config.write_text(json.dumps(config))
        self._id = node.run("crictl", "runp", str(self._config)).strip()

    def start(self, *command: str) -> str:
        """Start a container of the image (its own command by default), and return its name."""
        config = {"metadata": {"name": "app"}, "image": {"image": _IMAGE}, "command": command, "log_path": "app.log"}
        path = self._node.home / "container.json"
        path.write_text(json.dumps({**config, "linux": {}}))
        name = self._node.run("crictl", "create", self._id, str(path), str(self._config)).strip()
        self._node.run("crictl", "start", name)
        return name

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


def _words(command: str, node: Node) -> list[str]:
    """The document's command as it is run here."""
    command = command.removeprefix("sudo ").replace("registry.example", REGISTRY)
    if command.startswith("ctr"):
        command = re.sub(r" r?pull ", lambda found: f"{found[0]}--plain-http ", command)
    return command.replace(" run ", f" run --cgroup-parent {node.cgroup} ").split()


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
