"""What a run stands on: a network without distance, the registry behind the fault proxy, images, one node.

The node's disk is a few times as large as its images, so that it can be filled. Time-outs are short, so that a run of
a minute sees many of them.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from scripts.rig.chaos.containers import Client
from scripts.rig.chaos.faultproxy import ADDRESS, FaultProxy
from scripts.rig.chaos.images import ChaosImage, make_images
from scripts.rig.chaos.record import Record
from scripts.rig.loopback import Loopback
from scripts.rig.node import BOOTSEER, Node
from scripts.rig.process import run
from scripts.rig.registry import ADDRESS as REGISTRY
from scripts.rig.registry import Registry
from scripts.rig.workspace import Workspace

__all__ = ["Site"]

_TOML = """\
[fetch]
background_delay_s = 2

[record]
quiet_s = 2

[cache]
min_free_percent = 5
"""
_DISK_MIB = 192


class Site:
    """Opened by its constructor; `stack` closes it."""

    def __init__(
        self,
        stack: ExitStack,
        sizes: Mapping[str, Sequence[int]],
        without_index: Sequence[str],
        source: random.Random,
        record: Callable[[Path], Record],
        progress: Callable[[str], None],
        armed: bool = False,
    ) -> None:
        """`sizes`: bytes of the data layers of each image; `without_index`: those that have to be streamed whole.
        `armed`: processes of the daemon can be had to die at named points, by files in the directory `points`."""
        self.workspace = stack.enter_context(Workspace())
        self.points = self.workspace.directory("points")
        self.points.chmod(0o700)
        if armed:
            self.workspace.env = {**self.workspace.env, "BOOTSEER_KILL_AT": str(self.points)}
        self.record = record(self.workspace.directory("record"))
        ends = Loopback(self.workspace)
        stack.callback(ends.close)
        registry = Registry(self.workspace, ends)
        stack.callback(registry.close)
        self.images = {image.name: image for image in make_images(self.workspace.directory("images"), sizes, source)}
        indexes = self.workspace.directory("indexes")
        for image in self.images.values():
            registry.push(image.layout, image.name)
            if image.name not in without_index:
                words = [str(BOOTSEER), "index", "build", str(image.layout.path), "--out", str(indexes)]
                run(words, self.workspace.env, "building indexes")
        progress(f"{len(self.images)} images, {sum(image.layout.size for image in self.images.values()) / 1e6:.0f} MB")
        layers = sorted({layer for image in self.images.values() for layer in image.layers})
        self.proxy = FaultProxy(self.workspace, ends, layers)
        stack.callback(self.proxy.close)
        self.node = Node(self.workspace, ends, "node", (str(indexes), ADDRESS), _TOML, disk_mib=_DISK_MIB)
        stack.callback(self.node.close)
        self.client = Client(self.workspace, self.node, self.record)
        progress("registry, fault proxy, daemon and containerd are up")

    def reference(self, image: ChaosImage) -> str:
        """What to pull."""
        return f"{ADDRESS}/{image.name}:bench"

    def status(self) -> Mapping[str, Any]:
        """What `bootseer status --json` says."""
        document: Mapping[str, Any] = json.loads(self.client.bootseer("status", "--json"))
        return document

    def __repr__(self) -> str:
        return f"<Site {REGISTRY} behind {ADDRESS}, {self.node!r}>"
