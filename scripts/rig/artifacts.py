"""What is made of an image before it is started, by the product's own commands: layer indexes, and a hot set."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from scripts.rig.errors import RigError
from scripts.rig.image import Recipe
from scripts.rig.link import Link
from scripts.rig.namespace import Ends
from scripts.rig.node import BOOTSEER, Node
from scripts.rig.peer import Peer
from scripts.rig.process import run
from scripts.rig.registry import ADDRESS
from scripts.rig.workspace import Workspace

__all__ = ["build_indexes", "convert", "record_hot_set"]

Progress = Callable[[str], None]
_BUILD_S = 1800.0
_RECORDING = "[record]\nquiet_s = 2\n"
"""The workload's end is its ready line; nothing new for 2 s after it is the end of the recording."""


def build_indexes(workspace: Workspace, ends: Ends, reference: str, out: Path, progress: Progress) -> None:
    """Build the image's indexes into the directory `out` as its publisher would, beside the registry."""
    argv = [str(BOOTSEER), "index", "build", reference, "--plain-http", "--out", str(out)]
    started = time.monotonic()
    run(ends.far.command(argv), workspace.env, "building the indexes", timeout_s=_BUILD_S)
    _tell(out, "*.bsi", "indexes", "bootseer index build", started, progress)


def record_hot_set(
    workspace: Workspace, link: Link, recipe: Recipe, reference: str, indexes: Path, out: Path, progress: Progress
) -> None:
    """Record the image's workload on a node of its own that has the indexes, and export its hot pack into `out`."""
    started = time.monotonic()
    node = Node(workspace, link, f"record-{recipe.name}", (str(indexes), ADDRESS), _RECORDING)
    try:
        _record(node, workspace.env, recipe, reference, out)
    except RigError as error:
        raise RigError(f"{error}\n{node.logs()}") from None
    finally:
        node.close()
    _tell(out, "*.bsh", "hot set", "bootseer hotset export", started, progress)


def _record(node: Node, env: Mapping[str, str], recipe: Recipe, reference: str, out: Path) -> None:
    words = ["--ready-regex", "^ready", "--plain-http", reference, "--", *recipe.command]
    run(node.bootseer("record", *words), env, "recording the workload", _BUILD_S)
    run(node.bootseer("hotset", "export", "--to", str(out), reference), env, "exporting the hot set", _BUILD_S)


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
