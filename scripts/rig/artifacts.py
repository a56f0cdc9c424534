"""What is made of an image before it is started, by the product's own commands: layer indexes, and a hot set."""

import time
from collections.abc import Callable
from pathlib import Path

from scripts.rig.containers import Containers, run_words
from scripts.rig.errors import RigError
from scripts.rig.image import Recipe
from scripts.rig.link import Link
from scripts.rig.namespace import Ends
from scripts.rig.node import BOOTSEER, SNAPSHOTTER, Node
from scripts.rig.peer import Peer
from scripts.rig.process import run, wait_for
from scripts.rig.registry import ADDRESS
from scripts.rig.workspace import Workspace

__all__ = ["build_indexes", "convert", "record_hot_set"]

Progress = Callable[[str], None]
_BUILD_S = 1800.0
_RECORDED_S = 60.0
"""Time from the container's end until its hot set is there; a recording ends with its container."""


def build_indexes(workspace: Workspace, ends: Ends, reference: str, out: Path, progress: Progress) -> None:
    """Build the image's indexes into the directory `out` as its publisher would, beside the registry."""
    argv = [str(BOOTSEER), "index", "build", reference, "--plain-http", "--out", str(out)]
    started = time.monotonic()
    run(ends.far.command(argv), workspace.env, "building the indexes", timeout_s=_BUILD_S)
    _tell(out, "*.bsi", "indexes", "bootseer index build", started, progress)


def record_hot_set(
    workspace: Workspace, link: Link, recipe: Recipe, reference: str, indexes: Path, out: Path, progress: Progress
) -> None:
    """Run the image's container once on a node of its own, which records it, and export the hot set into `out`."""
    started = time.monotonic()
    name = f"record-{recipe.name}"
    node = Node(workspace, link, name, (str(indexes), ADDRESS))
    try:
        _start_once(workspace, node, recipe, reference, name)
        _export(workspace, node, reference, out)
    except RigError as error:
        raise RigError(f"recording {recipe.name}: {error}\n{node.logs()}") from None
    finally:
        node.close()
    _tell(out, "*.bsh", "hot set", "bootseer hotset export", started, progress)


def _start_once(workspace: Workspace, node: Node, recipe: Recipe, reference: str, name: str) -> None:
    pull = node.ctr("images", "rpull", "--plain-http", "--snapshotter", SNAPSHOTTER, reference, tool="ctr-remote")
    run(pull, workspace.env, "pulling the image", _BUILD_S)
    with Containers(workspace, node, name, run_words(recipe, SNAPSHOTTER, reference), 1) as containers:
        (line,) = containers.first_lines(time.monotonic() + _BUILD_S)
        containers.wait()
    if not recipe.is_ready(line.text):
        raise RigError(f"the container said {line.text!r}")


def _export(workspace: Workspace, node: Node, reference: str, out: Path) -> None:
    hot = node.daemon_root / "hot"
    wait_for(lambda: any(hot.rglob("*.bsh")), "waiting for the hot set", None, _RECORDED_S)
    argv = node.bootseer("hotset", "export", "--to", str(out), reference)
    run(argv, workspace.env, "exporting the hot set", _BUILD_S)


def convert(workspace: Workspace, link: Link, peer: Peer, reference: str) -> str:
    """Convert and push the image as the peer wants it, on a node of its own; its reference."""
    wanted = reference.replace("/bench/", "/peer/") + peer.suffix
    node = Node(workspace, link, f"convert-{peer.name}")
    try:
        pull = node.ctr("images", "pull", "--plain-http", reference)
        run(pull, workspace.env, "pulling the image to convert it", _BUILD_S)
        for words in peer.convert(reference, wanted):
            run(node.ctr(*words, tool="ctr-remote"), workspace.env, f"converting the image for {peer.name}", _BUILD_S)
    finally:
        node.close()
    return wanted


def _tell(out: Path, pattern: str, what: str, command: str, started: float, progress: Progress) -> None:
    files = list(out.rglob(pattern))
    if not files:
        raise RigError(f"`{command}` wrote no {pattern} file into {out}")
    size = sum(file.stat().st_size for file in files) / 1e6
    progress(f"{what}: {len(files)} files, {size:.1f} MB, made in {time.monotonic() - started:.1f} s")
