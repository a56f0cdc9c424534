"""One cold start: from the order to pull until the container's first line says that it is ready.

The clock runs from the start of the pull command to the arrival of the line (a blocking read, no poll). `size` counts
what the link delivered to the node until that moment, headers included. Requests (registry and index server) are
counted until the node has stopped, so that one still open at the ready line counts too. A start that is not ready
within `DEADLINE_S` is an error, not a sample.
"""

import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from scripts.rig.errors import RigError
from scripts.rig.image import Recipe
from scripts.rig.indexserver import IndexServer
from scripts.rig.link import Link
from scripts.rig.node import SNAPSHOTTER, Node
from scripts.rig.process import end, spawn
from scripts.rig.registry import ADDRESS, Registry
from scripts.rig.workspace import Workspace

__all__ = ["DEADLINE_S", "Bench", "ColdStart", "System", "cold_start"]

DEADLINE_S = 120.0


class System(Enum):
    """What starts the container: containerd's own snapshotter; ours finding no index anywhere; ours finding one."""

    OVERLAYFS = "overlayfs"
    BOOTSEER_FIRST = "bootseer-first"
    BOOTSEER = "bootseer"


@dataclass(frozen=True, slots=True)
class ColdStart:
    """What one cold start took: seconds until the pull command returned and until ready, bytes, requests."""

    system: System
    pull_s: float
    ready_s: float
    size: int
    requests: int
    output_ok: bool


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything that cold starts share. `indexes` is the directory of indexes for `System.BOOTSEER`."""

    workspace: Workspace
    link: Link
    registry: Registry
    index_server: IndexServer
    recipe: Recipe
    reference: str
    indexes: Path | None


def cold_start(bench: Bench, system: System, name: str) -> ColdStart:
    """Make a cold node, start the image's container on it once, and take the node away again."""
    if system is System.BOOTSEER and bench.indexes is None:
        raise RigError("no indexes were built for the system `bootseer`")
    bench.index_server.offer(bench.indexes if system is System.BOOTSEER else None)
    daemon = None if system is System.OVERLAYFS else (bench.index_server.url, ADDRESS)
    node = Node(bench.workspace, bench.link, name, daemon)
    try:
        bench.registry.warm()
        bench.index_server.warm()
        requests = bench.registry.requests() + bench.index_server.requests()
        pull_s, ready_s, size, line = _measure(bench, system, node, name)
    except RigError as error:
        raise RigError(f"cold start with {system.value}: {error}\n{node.logs()}") from None
    finally:
        node.close()
    if node.left_mounted:
        raise RigError(f"cold start with {system.value}: still mounted after the stop: {node.left_mounted}")
    requests = bench.registry.settled_requests() + bench.index_server.requests() - requests
    return ColdStart(system, pull_s, ready_s, size, requests, line == bench.recipe.ready)


def _measure(bench: Bench, system: System, node: Node, name: str) -> tuple[float, float, int, str]:
    """Pull and run: seconds of both moments, bytes until ready, and the container's first line."""
    pull, start = _commands(bench, system, node, name)
    before = bench.link.traffic().to_near
    started = time.monotonic()
    deadline = started + DEADLINE_S
    _pull(pull, bench.workspace.env, deadline)
    pull_s = time.monotonic() - started
    errors = bench.workspace.root / f"{name}.errors"
    with errors.open("wb") as log:
        process = spawn(start, bench.workspace.env, stdout=subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None
        line = _first_line(process.stdout.fileno(), deadline)
        ready_s = time.monotonic() - started
        size = bench.link.traffic().to_near - before
        if line is None:
            raise RigError(f"no line from the container within {DEADLINE_S:.0f} s; {errors.read_text().strip()}")
        try:
            code = process.wait(30)
        except subprocess.TimeoutExpired:
            raise RigError("the container was ready, but did not end within 30 s") from None
        if code != 0:
            raise RigError(f"the container ended with exit code {code}: {errors.read_text().strip()}")
    finally:
        if process.stdout is not None:
            process.stdout.close()
        end(process, grace_s=0)
    return pull_s, ready_s, size, line


def _commands(bench: Bench, system: System, node: Node, name: str) -> tuple[list[str], list[str]]:
    """The command lines that pull the image and start its container."""
    if system is System.OVERLAYFS:
        snapshotter = "overlayfs"
        options = ["--plain-http", "--snapshotter", snapshotter, bench.reference]
        pull = node.ctr("images", "pull", *options)
    else:
        snapshotter = SNAPSHOTTER
        options = ["--snapshotter", snapshotter, "--plain-http", bench.reference]
        pull = node.ctr("images", "rpull", *options, tool="ctr-remote")
    # No cgroup of its own: a new parent group named after the namespace would stay on the machine.
    return pull, node.ctr("run", "--rm", "--cgroup", "", "--snapshotter", snapshotter, bench.reference, name)


def _pull(argv: Sequence[str], env: Mapping[str, str], deadline: float) -> None:
    process = spawn(argv, env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        out, _ = process.communicate(timeout=deadline - time.monotonic())
    except subprocess.TimeoutExpired:
        raise RigError(f"the pull did not end within {DEADLINE_S:.0f} s") from None
    finally:
        end(process, grace_s=0)
        if process.stdout is not None:
            process.stdout.close()
    if process.returncode != 0:
        raise RigError(f"the pull failed with exit code {process.returncode}: {out.decode(errors='replace')[-1500:]}")


def _first_line(descriptor: int, deadline: float) -> str | None:
    """The first line that arrives before `deadline`, without its end; None when none does."""
    data = b""
    while b"\n" not in data:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        chunk = os.read(descriptor, 4096) if ready else b""
        if not chunk:
            return None
        data += chunk
    return data.split(b"\n", 1)[0].decode(errors="replace").rstrip("\r")
