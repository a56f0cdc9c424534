"""What the measurements share: a workspace, a link (mostly without distance), a registry with an image, made-up layers.

Everything is opened at its first use and ends with the site. Indexes of made-up layers are kept in a cache: the same
layers have the same digests, and building the index of one of 8 GB takes longer than all else. `bootseer index build`
itself decides whether a kept one is still valid.
"""

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from scripts.rig import blobserver, registry
from scripts.rig.blobserver import BlobServer
from scripts.rig.errors import RigError
from scripts.rig.grid.network import Network
from scripts.rig.image import CACHE, Recipe, build
from scripts.rig.link import Link
from scripts.rig.loopback import Loopback
from scripts.rig.node import BOOTSEER, SNAPSHOTTER, Node
from scripts.rig.oci import Layout
from scripts.rig.process import run
from scripts.rig.registry import Registry
from scripts.rig.synthetic import SyntheticLayer
from scripts.rig.workspace import Workspace

__all__ = ["Image", "Site", "drop_caches", "in_store"]

_INDEXES = CACHE.parent / "bench-indexes"
_BUILD_S = 900.0
_LOOK_S = 0.2  # a look takes as long: it starts an interpreter


@dataclass(frozen=True, slots=True)
class Image:
    """A real image in the registry: its recipe, its layout, and the reference to pull."""

    recipe: Recipe
    layout: Layout
    reference: str


class Site:
    """Opened with `with`; see the module."""

    def __init__(
        self,
        recipe: Recipe,
        progress: Callable[[str], None],
        network: Network | None = None,
        any_link: bool = False,
        indexes: Path = _INDEXES,
    ) -> None:
        """`recipe`: the image of the measurements that run containers; `network`: what lies between node and servers,
        None for no distance; with `any_link`, one that fails its test will do; `indexes`: the cache of indexes."""
        self.progress = progress
        self._recipe = recipe
        self._network = network
        self._any_link = any_link
        self._index_cache = indexes
        self._closing = ExitStack()
        self._serial = 0

    def __enter__(self) -> "Site":
        self._closing.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._closing.__exit__(*failure)

    @cached_property
    def workspace(self) -> Workspace:
        """The directory of this run."""
        return self._closing.enter_context(Workspace())

    @cached_property
    def ends(self) -> Loopback | Link:
        """The network of node and servers; a link is tested first."""
        if self._network is None:
            ends = Loopback(self.workspace)
            self._closing.callback(ends.close)
            return ends
        link = Link(self.workspace, self._network.mbit, self._network.rtt_ms)
        self._closing.callback(link.close)
        self.progress(f"{self._network.name}: {link.tested(self._any_link)}")
        return link

    @cached_property
    def registry(self) -> Registry:
        """The registry of the real image."""
        opened = Registry(self.workspace, self.ends)
        self._closing.callback(opened.close)
        return opened

    @cached_property
    def image(self) -> Image:
        """The real image, pushed."""
        layout = build(self._recipe, self.workspace.env, self.progress)
        reference = self.registry.push(layout, f"bench/{self._recipe.name}")
        self.registry.warm()
        return Image(self._recipe, layout, reference)

    @cached_property
    def image_indexes(self) -> Path:
        """A directory with the indexes of the real image's layers."""
        directory = self.workspace.directory("image-indexes")
        argv = [str(BOOTSEER), "index", "build", str(self.image.layout.path), "--out", str(directory)]
        self.run(argv, "building the image's indexes", _BUILD_S)
        return directory

    @contextmanager
    def node(self, toml: str = "") -> Iterator[Node]:
        """A cold node with both snapshotters for the real image; `toml`: more of the daemon's configuration."""
        with self._node((str(self.image_indexes), registry.ADDRESS), toml) as node:
            yield node

    @contextmanager
    def layers(self, layers: Sequence[SyntheticLayer], toml: str = "") -> Iterator[Node]:
        """A cold node, and a server of made-up layers as one image, `made_up`, with all indexes on the node's disk."""
        server = BlobServer(self.workspace, self.ends, {"made-up": layers})
        try:
            argv = [str(BOOTSEER), "index", "build", self.made_up, "--plain-http", "--out", str(self._index_cache)]
            self.run(self.ends.far.command(argv), "building the indexes of made-up layers", _BUILD_S)
            with self._node((str(self._index_cache), blobserver.ADDRESS), toml) as node:
                yield node
        finally:
            server.close()

    made_up = f"{blobserver.ADDRESS}/made-up:{blobserver.TAG}"
    """The reference of the image of made-up layers."""

    def run(self, argv: Sequence[str], what: str, timeout_s: float = 300.0) -> str:
        """Run a command of the bench, and return what it prints; RigError if it fails."""
        return run(argv, self.workspace.env, what, timeout_s)

    def status(self, node: Node) -> Mapping[str, Any]:
        """What `bootseer status --json` says on the node."""
        document: Mapping[str, Any] = json.loads(self.run(node.bootseer("status", "--json"), "asking for the status"))
        return document

    def directory(self, name: str) -> Path:
        """A new directory of this run."""
        self._serial += 1
        return self.workspace.directory(f"{name}-{self._serial}")

    def pull(self, node: Node, *snapshotters: str) -> None:
        """Pull the real image for these snapshotters, ours first: it must not find layers that are unpacked."""
        for snapshotter in sorted(snapshotters):
            words = ["--plain-http", "--snapshotter", snapshotter, self.image.reference]
            argv = node.ctr("images", "pull", *words)
            if snapshotter == SNAPSHOTTER:
                argv = node.ctr("images", "rpull", *words, tool="ctr-remote")
            self.run(argv, f"pulling the image with {snapshotter}")
        if SNAPSHOTTER in snapshotters and self.status(node)["ordinary"]:
            raise RigError("a layer was left to containerd; the daemon's log says why")

    def complete(self, node: Node, timeout_s: float = 120) -> None:
        """Wait until every block of every layer is on the node."""
        give_up = time.monotonic() + timeout_s
        while any(layer["state"] != "complete" for layer in self.status(node)["layers"]):
            if time.monotonic() > give_up:
                raise RigError(f"not all layers are complete after {timeout_s:.0f} s")
            time.sleep(_LOOK_S)

    @contextmanager
    def _node(self, daemon: tuple[str, str], toml: str) -> Iterator[Node]:
        self._serial += 1
        node = Node(self.workspace, self.ends, f"n{self._serial}", daemon, toml)
        try:
            yield node
        except RigError as error:
            raise RigError(f"{error}\n{node.logs()}") from None
        finally:
            node.close()
        if node.left_mounted:
            raise RigError(f"still mounted after the node has stopped: {node.left_mounted}")


def in_store(digest: str) -> str:
    """The file name of a layer on the FUSE mount, as docs/design.md says: the digest's first 14 hex digits."""
    return digest.removeprefix("sha256:")[:14]


def drop_caches() -> None:
    """Empty the machine's page cache."""
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3")
