"""The oracle: a system that knows what will be read, and has only that to fetch.

The image is on its node before the clock starts, and its container has run once. A cold start is then one GET of as
many bytes as the working set has when it is compressed, over a new connection, and after it a warm start.
"""

import http.client
import time
from collections.abc import Mapping

from scripts.rig.delayline import FAR
from scripts.rig.errors import RigError
from scripts.rig.fileserver import PORT, FileServer
from scripts.rig.image import Recipe
from scripts.rig.link import Link
from scripts.rig.namespace import inside_network
from scripts.rig.node import Node
from scripts.rig.process import run

__all__ = ["fetch", "offer", "prepare"]

_NAME = "working-set"
_PREPARE_S = 3600.0


def offer(server: FileServer, size: int) -> None:
    """Put a file of `size` bytes on the file server: what is in it is of no account."""
    with (server.directory / _NAME).open("wb") as out:
        out.truncate(size)


def prepare(node: Node, env: Mapping[str, str], reference: str, recipe: Recipe) -> None:
    """Bring the image to the node and run its container once."""
    words = ["--plain-http", "--snapshotter", "overlayfs", reference]
    run(node.ctr("images", "pull", *words), env, "pulling the image before the clock starts", _PREPARE_S)
    command = recipe.command if recipe.layers_of else ()
    argv = node.ctr("run", "--rm", "--cgroup", "", "--snapshotter", "overlayfs", reference, "before", *command)
    run(argv, env, "running the container before the clock starts", _PREPARE_S)


def fetch(link: Link, deadline: float) -> None:
    """Get the working set over a new connection; RigError if it is not there before `deadline` (monotonic)."""
    try:
        inside_network(link.near.pid, lambda: _get(deadline))
    except (OSError, http.client.HTTPException) as error:
        raise RigError(f"fetching the working set: {error}") from None


def _get(deadline: float) -> None:
    connection = http.client.HTTPConnection(FAR, PORT, timeout=30)
    try:
        connection.request("GET", f"/{_NAME}")
        answer = connection.getresponse()
        if answer.status != 200:
            raise RigError(f"fetching the working set: HTTP status {answer.status}")
        while answer.read(1 << 20):
            if time.monotonic() > deadline:
                raise RigError("fetching the working set: not there in time")
    finally:
        connection.close()
