"""Real clients against the real daemon: is the pull lazy, does the container run, is everything gone afterwards.

Configuration and commands are those of docs/clients.md. What a test adds to them: the registry has no TLS, containers
get a cgroup that can be removed, and this machine may forbid what CRI wants of the OOM score.
"""

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import closing

import pytest

from scripts.rig.errors import RigError
from scripts.rig.image import RECIPES
from scripts.rig.workspace import Workspace
from tests.clients.cases import CASES, INCOMPLETE, Case
from tests.clients.conftest import Cells, Images
from tests.clients.document import configuration
from tests.clients.node import REGISTRY, Containerd, Node

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]  # the first time the clients are built

_IMAGE = f"{REGISTRY}/app:1"
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
def test_client(case: Case, containerds: Mapping[str, Containerd], images: Images, cells: Cells) -> None:
    seen = _try(case, containerds[case.containerd], images)
    cells.append((case.row, case.containerd, seen))
    assert seen == case.outcome


@pytest.mark.parametrize("case", INCOMPLETE, ids=str)
def test_without_a_part_of_the_configuration(case: Case, containerds: Mapping[str, Containerd], images: Images) -> None:
    assert _try(case, containerds[case.containerd], images) == case.outcome


def _try(case: Case, containerd: Containerd, images: Images) -> str:
    """Pull, run and remove on a new node; returns what the pull was."""
    if shutil.which(case.client, path=containerd.path) is None:
        assert case.client == "nerdctl", f"{case.client} is missing"
        pytest.skip("nerdctl is not installed, and cannot be built from a Go module that is to be had here")
    cri = case.client == "crictl"
    with (
        Workspace() as workspace,
        closing(Node(workspace, containerd, _configuration(case, cri), images.indexes, cri)) as node,
    ):
        node.push(images.app, "app:1")
        layers = set(images.app.layers)
        if cri:
            node.push(images.pause, "pause:1")
            layers |= set(images.pause.layers)
        try:
            printed, outcome = (_pod if cri else _container)(node, case, layers)
        except RigError as error:
            if case.says and case.says in str(error):
                return "fails"
            raise
        assert _READY in printed
        _until(lambda: node.snapshots(case.plugin) == [] and node.leftovers() == [])
        assert [layer["mount"] for layer in node.status()["layers"] if layer["mount"]] == []
        return outcome


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
    pod = {
        "metadata": {"name": "pod", "namespace": "default", "uid": "1", "attempt": 1},
        "log_directory": f"{node.home}/logs",
        "linux": {"cgroup_parent": f"/{node.cgroup}", "security_context": {"namespace_options": {"network": 2}}},
    }
    container = {"metadata": {"name": "app"}, "image": {"image": _IMAGE}, "log_path": "app.log", "linux": {}}
    files = node.home / "pod.json", node.home / "container.json"
    files[0].write_text(json.dumps(pod))
    files[1].write_text(json.dumps(container))
    pod_id = node.run("crictl", "runp", str(files[0])).strip()
    node.run(*_words(case.command, node))
    outcome = _outcome(node, layers)
    container_id = node.run("crictl", "create", pod_id, str(files[1]), str(files[0])).strip()
    node.run("crictl", "start", container_id)
    _until(lambda: '"CONTAINER_EXITED"' in node.run("crictl", "inspect", container_id))
    printed = node.run("crictl", "logs", container_id)
    node.run("crictl", "rmp", "--force", pod_id)
    node.run("crictl", "rmi", "--all")
    return printed, outcome


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
