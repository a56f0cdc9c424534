"""One cold start: from the order to pull until the container's first line says that it is ready.

The clock runs from the start of the pull command to the arrival of the line (a blocking read, no poll). `size` counts
what the link delivered to the node until that moment, headers included. Requests are counted until the node has
stopped, so that one still open at the ready line counts too. A start that is not ready within its deadline is an error,
not a sample.

A warm start is a second container of the same image on the same node: from the order to run until its first line.
Several together: the image is pulled once, as a kubelet does, then all containers are started at once; the last line
counts.
"""

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from scripts.rig import artifacts, oracle
from scripts.rig.containers import Containers, run_words
from scripts.rig.errors import RigError
from scripts.rig.fileserver import FileServer
from scripts.rig.image import Recipe
from scripts.rig.link import Link
from scripts.rig.node import SNAPSHOTTER, Node
from scripts.rig.peer import PEERS, Peer
from scripts.rig.process import end, run, spawn
from scripts.rig.registry import ADDRESS, Registry
from scripts.rig.watch import Watch
from scripts.rig.workspace import Workspace

__all__ = ["DEADLINE_S", "Bench", "ColdStart", "Extras", "System", "cold_start"]

DEADLINE_S = 120.0
"""Unless a bench says otherwise."""


class System(Enum):
    """What starts the container: containerd's own snapshotter; ours finding no index anywhere; ours finding one; ours
    finding one and a hot set; the oracle, which knows what will be read (`oracle`); a lazy snapshotter of others."""

    OVERLAYFS = "overlayfs"
    BOOTSEER_FIRST = "bootseer-first"
    BOOTSEER = "bootseer"
    BOOTSEER_HOT = "bootseer-hot"
    ORACLE = "oracle"
    STARGZ = "stargz"

    @property
    def ours(self) -> bool:
        """Whether it is bootseer."""
        return self.value.startswith("bootseer")

    @property
    def peer(self) -> Peer | None:
        """The program of others that it is."""
        return PEERS.get(self.value)


@dataclass(frozen=True, slots=True)
class ColdStart:
    """What one cold start took: seconds until the pull command returned and until ready, bytes, requests.

    `ready_each_s` has one element per container started together. `warm_s` has one per warm start after it.
    `layers` are the sums over the node's layers of what `bootseer status` counts, right after ready; empty if the
    system is not ours.
    """

    system: System
    pull_s: float
    ready_s: float
    size: int
    requests: int
    output_ok: bool
    line: str = ""
    ready_each_s: tuple[float, ...] = ()
    warm_s: tuple[float, ...] = ()
    layers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything that cold starts of one image on one link share.

    `reference` is the image as it is, `references` are those of its copies as systems want it (with artifacts, or
    converted for a peer), by the system's value; `working_set_bytes` is what the oracle fetches, None where it is not
    used. Without `background` our systems bring in only what is read or hot, so that bytes do not depend on time.
    """

    workspace: Workspace
    link: Link
    registry: Registry
    files: FileServer
    recipe: Recipe
    reference: str
    references: Mapping[str, str] = field(default_factory=dict)
    working_set_bytes: int | None = None
    deadline_s: float | None = None
    background: bool = True


@dataclass(frozen=True, slots=True)
class Extras:
    """What is wanted beside the one cold start: so many warm starts after it, several containers at once, a directory
    for what the timeline needs."""

    warm: int = 0
    together: int = 1
    timeline: Path | None = None


def cold_start(bench: Bench, system: System, name: str, extras: Extras | None = None) -> ColdStart:
    """Make a cold node, start the image's container on it, and take the node away again."""
    extras = extras or Extras()
    reference = _reference(bench, system)
    if system is System.ORACLE:
        if bench.working_set_bytes is None:
            raise RigError("the working set of the image was not measured")
        oracle.offer(bench.files, bench.working_set_bytes)
    node = _node(bench, system, name, extras.timeline is not None)
    try:
        bench.registry.warm()
        if system is System.ORACLE:
            oracle.prepare(node, bench.workspace.env, bench.reference, bench.recipe)
        requests = bench.registry.requests() + bench.files.requests()
        with Watch(bench.link, bench.registry.log, bench.files.log, extras.timeline) as watch:
            result = _measure(bench, system, reference, node, name, extras, watch)
        if extras.timeline is not None:
            node.keep_logs(extras.timeline)
    except RigError as error:
        raise RigError(f"cold start with {system.value}: {error}\n{node.logs()}") from None
    finally:
        node.close()
    if node.left_mounted:
        raise RigError(f"cold start with {system.value}: still mounted after the stop: {node.left_mounted}")
    requests = bench.registry.settled_requests() + bench.files.requests() - requests
    return replace(result, requests=requests)


def _reference(bench: Bench, system: System) -> str:
    """What the system is to pull."""
    found = bench.references.get(system.value)
    if found is None and (system in (System.BOOTSEER, System.BOOTSEER_HOT) or system.peer is not None):
        raise RigError(f"no image was prepared for the system `{system.value}`")
    return found or bench.reference


def _node(bench: Bench, system: System, name: str, verbose: bool) -> Node:
    if not system.ours:
        return Node(bench.workspace, bench.link, name, peer=system.peer)
    toml = artifacts.node_toml(bench.workspace)
    toml += '[log]\nlevel = "debug"\n' if verbose else ""
    toml += "" if bench.background else "[fetch]\nbackground = false\n"
    return Node(bench.workspace, bench.link, name, ("", ADDRESS), toml)


def _measure(
    bench: Bench, system: System, reference: str, node: Node, name: str, extras: Extras, watch: Watch
) -> ColdStart:
    """Pull and run; without the number of requests."""
    env = bench.workspace.env
    snapshotter = _snapshotter(system)
    deadline_s = DEADLINE_S if bench.deadline_s is None else bench.deadline_s
    before = bench.link.traffic().to_near
    started = watch.start()
    deadline = started + deadline_s
    if system is System.ORACLE:
        oracle.fetch(bench.link, deadline)
    else:
        _pull(_pull_command(system, node, reference), env, deadline, deadline_s)
    pull_s = time.monotonic() - started
    watch.note("pull returned")
    words = run_words(bench.recipe, snapshotter, reference)
    with Containers(bench.workspace, node, name, words, extras.together) as containers:
        lines = containers.first_lines(deadline)
        size = bench.link.traffic().to_near - before
        watch.note("ready")
        layers = _layer_sums(node, env) if system.ours else {}
        containers.wait()
    cold, warm = lines, []
    for number in range(extras.warm):
        with Containers(bench.workspace, node, f"{name}-warm-{number}", words, 1) as containers:
            warm += containers.first_lines(time.monotonic() + deadline_s)
            containers.wait()
    return ColdStart(
        system,
        pull_s,
        max(line.at for line in cold) - started,
        size,
        requests=0,
        output_ok=all(bench.recipe.is_ready(line.text) for line in cold + warm),
        line=cold[0].text,
        ready_each_s=tuple(line.at - started for line in cold),
        warm_s=tuple(line.after_s for line in warm),
        layers=layers,
    )


def _snapshotter(system: System) -> str:
    if system.ours:
        return SNAPSHOTTER
    return system.peer.name if system.peer is not None else "overlayfs"


def _pull_command(system: System, node: Node, reference: str) -> list[str]:
    if system is System.OVERLAYFS:
        return node.ctr("images", "pull", "--plain-http", "--snapshotter", "overlayfs", reference)
    words = ["--snapshotter", _snapshotter(system), "--plain-http", reference]
    return node.ctr("images", "rpull", *words, tool="ctr-remote")


def _layer_sums(node: Node, env: Mapping[str, str]) -> dict[str, int]:
    """The sums over all layers of each whole number that `bootseer status --json` gives of a layer, and `relieved` over
    all prefetches."""
    status = json.loads(run(node.bootseer("status", "--json"), env, "asking for the status", 30))
    sums = {"relieved": sum(prefetch["relieved"] for prefetch in status.get("prefetches", []))}
    for layer in status.get("layers", []):
        for key, value in layer.items():
            if isinstance(value, int) and not isinstance(value, bool):
                sums[key] = sums.get(key, 0) + value
    return sums


def _pull(argv: Sequence[str], env: Mapping[str, str], deadline: float, deadline_s: float) -> None:
    process = spawn(argv, env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        out, _ = process.communicate(timeout=deadline - time.monotonic())
    except subprocess.TimeoutExpired:
        raise RigError(f"the pull did not end within {deadline_s:.0f} s") from None
    finally:
        end(process, grace_s=0)
        if process.stdout is not None:
            process.stdout.close()
    if process.returncode != 0:
        raise RigError(f"the pull failed with exit code {process.returncode}: {out.decode(errors='replace')[-1500:]}")
