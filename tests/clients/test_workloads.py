"""The operator's rules with real clients: what a container is labelled or annotated with says which workload it is.

All containers run the same program on other files, so their sets differ. Each is recorded as the workload that its rule
names; when the image is fetched anew, that workload's set is what is fetched before the container starts.
"""

import random
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from snapshotter.hotstore import HotStore
from tests.clients.cases import CASES, CONTAINERDS
from tests.clients.conftest import Images
from tests.clients.guide import Guide
from tests.clients.node import BOOTSEER, REGISTRY, Containerd, Node
from tests.clients.ready import ready_node
from tests.clients.test_clients import Pod
from tests.snapshotter.images import gzip_layer, write_layout

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]  # the first time the clients are built

_IMAGE = f"{REGISTRY}/data:1"
_SIZE = 1 << 20
_SOURCE = random.Random(11)
_FILES = {f"data/{name}": _SOURCE.randbytes(_SIZE) for name in ("label", "own", "container", "pod", "nobody")}
"""What the container of that name reads."""
_GUIDE = Guide("operations.md")
_DAEMON = """
[workload]
rules = [
  'label label io.kubernetes.container.name=train*',
  'label label com.example.role=train*',
  'own annotation io.kubernetes.cri.container-name=own-[0-9]',
  'container annotation example.com/role=serve',
  'pod annotation example.com/queue=night',
]
default_mib = 1
[record]
quiet_s = 60
[fetch]
background = false
"""


def _is_ours(image: str) -> bool:
    """Of nerdctl's pulls our daemon knows the image by its digest."""
    return image.startswith(f"{REGISTRY}/data")


def _argv(name: str) -> list[str]:
    """It lives long enough for its end to be seen."""
    return ["/bin/busybox", "sh", "-c", f"md5sum /data/{name}; sleep 1"]


class Site:
    """A node with the rules, and the image."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._hotsets = HotStore(node.home / "b")

    def recorded(self, name: str, count: int) -> None:
        """The container has been recorded, as the workload of this name, and no other."""
        _until(lambda: self.node.status()["recordings"]["kept"] == count)
        self.chosen(name, recorded=True)
        [pack] = [self._hotsets.load(key, workload) for key, workload, _ in self._hotsets.entries() if workload == name]
        assert pack is not None
        (data,) = (row for row, layer in enumerate(pack.hotset.layers) if layer.blocks == len(_FILES) * _SIZE // 4096)
        blocks = {b for it in pack.hotset.extents if it.layer == data for b in range(it.start, it.end)}
        first = list(_FILES).index(f"data/{name}") * _SIZE // 4096
        assert blocks == set(range(first, first + _SIZE // 4096))

    def chosen(self, name: str, recorded: bool) -> None:
        """What status says of the newest container."""
        start = [row for row in self.node.status()["workloads"] if _is_ours(row["image"])][-1]
        assert (start["workload"], start["why"], start["recorded"]) == (name, "rule", recorded)

    def forget(self) -> None:
        """Nothing of the image is on the node but its hot sets."""
        _until(lambda: not any(row["mount"] for row in self.rows()))
        config = ("--config", f"{self.node.home}/b.toml")
        self.node.run(str(BOOTSEER), "cache", "rm", *(row["name"] for row in self.rows()), *config)
        self.node.kill("fetch")  # it would not look again so soon after the last pull

    def rows(self) -> list[dict[str, Any]]:
        return [row for row in self.node.status()["layers"] if _is_ours(row["image"])]

    def until_fetched(self, name: str) -> None:
        """The workload's set has been fetched."""
        _until(lambda: (name, "over") in self._prefetches() and ("default", "over") in self._prefetches())

    def _prefetches(self) -> list[tuple[str, str]]:
        return [(row["workload"], row["state"]) for row in self.node.status()["prefetches"]]

    def nothing_on_demand(self, name: str) -> None:
        """All that the container has read had been fetched before; what others read has not."""
        assert sum(row["demand_fetches"] for row in self.rows()) == 0
        present = max(row["blocks_present"] for row in self.rows()) * 4096
        assert _SIZE <= present <= 4 * _SIZE, "the file, at most 1 MiB of default, and what their spans hold besides"
        self.chosen(name, recorded=False)


@contextmanager
def _site(client: str, containerd: Containerd, images: Images, more: str, tmp_path: Path) -> Iterator[Site]:
    base = images.app.path / "blobs" / "sha256" / images.app.layers[0].removeprefix("sha256:")
    write_layout(tmp_path / "data", [base.read_bytes(), gzip_layer(_FILES)])
    argv = [str(BOOTSEER), "index", "build", str(tmp_path / "data"), "--out", str(images.indexes)]
    subprocess.run(argv, check=True, capture_output=True)
    found = (it for it in CASES if (it.client, it.containerd) == (client, containerd.name))
    case = next(it for it in found if it.plugin == "bootseer")
    with ready_node(case, containerd, images) as node:
        for name, text in (("b.toml", _DAEMON), ("c.toml", more)):
            path = node.home / name
            path.write_text(path.read_text() + text)
        for name in ("bootseer", "containerd"):
            node.restart(name)
        node.push(tmp_path / "data", "data:1")
        yield Site(node)


def _until(holds: Callable[[], bool], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("name", CONTAINERDS)
def test_pods(name: str, containerds: Mapping[str, Containerd], images: Images, tmp_path: Path) -> None:
    with _site("crictl", containerds[name], images, _annotations(name), tmp_path) as site:
        node = site.node

        def start(workload: str, fetched: bool = False) -> None:
            pods = {"pod": Pod(node, "night", {"example.com/queue": "night"})} if workload == "pod" else {}
            pod = pods.get(workload) or Pod(node, "plain")
            more: dict[str, dict[str, str]] = {
                "label": {"labels": {"io.kubernetes.container.name": "trainer"}},
                "container": {"annotations": {"example.com/role": "serve"}},
            }.get(workload, {})
            container = pod.create(*_argv(workload), image=_IMAGE, name=f"{workload}-1", **more)
            if fetched:
                site.until_fetched(workload)
            node.run("crictl", "start", container)
            _until(lambda: '"CONTAINER_EXITED"' in node.run("crictl", "inspect", container))
            assert f"/data/{workload}" in node.run("crictl", "logs", container)
            if fetched:
                site.nothing_on_demand(workload)
            else:
                site.recorded(workload, len(done) + 1)
            pod.remove()
            _until(lambda: not _listed(node))

        done: list[str] = []
        for workload in ("label", "own", "container", "pod"):
            node.run("crictl", "pull", _IMAGE)
            start(workload)
            done.append(workload)
        for workload in done:
            site.forget()
            node.run("crictl", "pull", _IMAGE)
            start(workload, fetched=True)


def _listed(node: Node) -> list[str]:
    return node.snapshots("bootseer")


def _annotations(containerd: str) -> str:
    """The document's lines that have containerd pass annotations on."""
    one, two = (text for text in _GUIDE.blocks("Workloads", "toml") if "pod_annotations" in text)
    return {"1.6": one, "2.4": two}[containerd]


_OPTIONS = {
    "label": ("--label", "com.example.role=trainer"),
    "container": ("--annotation", "example.com/role=serve"),
}
"""Of nerdctl and ctr, where there are no pods, and no names of containers in annotations."""


@pytest.mark.usefixtures("nerdctl")
@pytest.mark.parametrize("name", CONTAINERDS)
def test_nerdctl(name: str, containerds: Mapping[str, Containerd], images: Images, tmp_path: Path) -> None:
    with _site("nerdctl", containerds[name], images, "", tmp_path) as site:
        node = site.node

        def nerdctl(*words: str) -> str:
            return node.run("nerdctl", "--snapshotter", "bootseer", *words)

        where = ["--network", "none", "--cgroup-parent", node.cgroup]
        for count, (workload, option) in enumerate(_OPTIONS.items(), 1):
            assert f"/data/{workload}" in nerdctl("run", "--rm", *where, *option, _IMAGE, *_argv(workload))
            site.recorded(workload, count)
        for workload, option in _OPTIONS.items():
            nerdctl("rmi", _IMAGE)
            _until(lambda: not _listed(node))
            site.forget()
            nerdctl("pull", _IMAGE)
            nerdctl("create", "--name", workload, *where, *option, _IMAGE, *_argv(workload))
            site.until_fetched(workload)
            assert f"/data/{workload}" in nerdctl("start", "--attach", workload)
            site.nothing_on_demand(workload)
            nerdctl("rm", workload)
        nerdctl("rmi", _IMAGE)


@pytest.mark.parametrize("name", CONTAINERDS)
def test_ctr(name: str, containerds: Mapping[str, Containerd], images: Images, tmp_path: Path) -> None:
    with _site("ctr-remote", containerds[name], images, "", tmp_path) as site:
        site.node.type(f"ctr-remote images rpull --snapshotter bootseer {_IMAGE}")
        where = ["--rm", "--cgroup", "", "--snapshotter", "bootseer"]
        for count, (workload, option) in enumerate(_OPTIONS.items(), 1):
            site.node.run("ctr", "run", *where, *option, _IMAGE, workload, *_argv(workload))
            site.recorded(workload, count)
        site.node.run("ctr", "images", "rm", "--sync", _IMAGE)
