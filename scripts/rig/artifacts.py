"""What is made of an image before it is started, by the product's own commands, and published in its registry.

The image as it was pushed stays without artifacts. Beside it are two copies in repositories of their own: one with
layer indexes, and one with a hot set too. What is published is signed; a node trusts nothing else.
"""

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

__all__ = ["convert", "key_of", "node_toml", "publish_hot_set", "publish_indexes"]

Progress = Callable[[str], None]
_BUILD_S = 1800.0
_RECORDED_S = 60.0
"""Time from the container's end until its hot set is there; a recording ends with its container."""


def key_of(workspace: Workspace) -> Path:
    """The secret key of this run, made when it is first asked for; its public half is beside it."""
    key = workspace.root / "keys" / "bench"
    if not key.exists():
        key.parent.mkdir()
        run([str(BOOTSEER), "key", "generate", "--out", str(key)], workspace.env, "making a key")
    return key


def node_toml(workspace: Workspace) -> str:
    """What a node's configuration has to say so that it uses what is published here."""
    return f'[trust]\nkeys = ["{key_of(workspace)}.pub"]\n'


def _indexed(reference: str) -> str:
    """The reference of the image's copy that has layer indexes."""
    return reference.replace("/bench/", "/indexed/")


def _hot(reference: str) -> str:
    return reference.replace("/bench/", "/hot/")


def publish_indexes(workspace: Workspace, ends: Ends, reference: str, progress: Progress) -> str:
    """Copy the image, build its indexes as its publisher would, beside the registry; the copy's reference."""
    started = time.monotonic()
    copy = _indexed(reference)
    _far(workspace, ends, "copying the image", "copy", "--plain-http", reference, copy)
    words = ("index", "publish", "--plain-http", "--key", str(key_of(workspace)), copy)
    _far(workspace, ends, "publishing the indexes", *words)
    progress(f"indexes: published in {time.monotonic() - started:.1f} s")
    return copy


def publish_hot_set(workspace: Workspace, link: Link, recipe: Recipe, reference: str, progress: Progress) -> str:
    """Copy the image with its indexes, run its container once on a node of its own, which records it, and publish what
    it has recorded; the copy's reference."""
    started = time.monotonic()
    copy = _hot(reference)
    _far(workspace, link, "copying the image", "copy", "--plain-http", _indexed(reference), copy)
    name = f"record-{recipe.name}"
    node = Node(workspace, link, name, ("", ADDRESS), node_toml(workspace))
    try:
        _start_once(workspace, node, recipe, copy, name)
        hot = node.daemon_root / "hot"
        wait_for(lambda: any(hot.rglob("*.bsh")), "waiting for the hot set", None, _RECORDED_S)
        words = ("hotset", "publish", "--key", str(key_of(workspace)), copy)
        run(node.bootseer(*words), workspace.env, "publishing the hot set", _BUILD_S)
    except RigError as error:
        raise RigError(f"recording {recipe.name}: {error}\n{node.logs()}") from None
    finally:
        node.close()
    progress(f"hot set: recorded and published in {time.monotonic() - started:.1f} s")
    return copy


def _far(workspace: Workspace, ends: Ends, what: str, *words: str) -> None:
    """Run a command of the product beside the registry."""
    run(ends.far.command([str(BOOTSEER), *words]), workspace.env, what, timeout_s=_BUILD_S)


def _start_once(workspace: Workspace, node: Node, recipe: Recipe, reference: str, name: str) -> None:
    pull = node.ctr("images", "rpull", "--plain-http", "--snapshotter", SNAPSHOTTER, reference, tool="ctr-remote")
    run(pull, workspace.env, "pulling the image", _BUILD_S)
    with Containers(workspace, node, name, run_words(recipe, SNAPSHOTTER, reference), 1) as containers:
        (line,) = containers.first_lines(time.monotonic() + _BUILD_S)
        containers.wait()
    if not recipe.is_ready(line.text):
        raise RigError(f"the container said {line.text!r}")


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
