"""What works after a lazy pull, when containerd has no layer blobs: the last table of docs/clients.md."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from scripts.rig.errors import RigError
from scripts.rig.image import RECIPES
from tests.clients.cases import AFTER, CASES, CONTAINERDS, FETCH, After
from tests.clients.conftest import Images
from tests.clients.node import REGISTRY, Containerd, Node
from tests.clients.ready import ready_node

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800), pytest.mark.usefixtures("nerdctl")]

_PULLS = {
    case.containerd: case
    for case in CASES
    if case.client == "nerdctl" and case.outcome == "lazy" and " pull " in case.command
}
_RUN = "nerdctl --snapshotter {plugin} run {options} --network none registry.example/{image}"


@pytest.mark.parametrize("name", CONTAINERDS)
def test_after_a_lazy_pull(name: str, containerds: Mapping[str, Containerd], images: Images) -> None:
    with ready_node(_PULLS[name], containerds[name], images) as node:
        for after in AFTER:
            with _lazily_pulled(node, name, images):
                _see(after, node, name)


def _see(after: After, node: Node, name: str) -> None:
    """The command does what the table says, before and after the layers are fetched."""
    command = f"{after.command.replace('nerdctl', f'nerdctl --snapshotter {_PULLS[name].plugin}', 1)}"
    command = command.replace(" app.tar", f" {node.home}/app.tar")
    says = after.says.get(name)
    if says is None:
        node.type(command)
    else:
        message = ".*".join(re.escape(part) for part in says.split("…"))
        with pytest.raises(RigError, match=message):
            node.type(command)
        if not after.fetch:
            return
        node.type(FETCH)
        node.type(command)
    if "commit" in command:
        node.type(f"nerdctl push {REGISTRY}/new:1")
        run = _RUN.format(plugin=_PULLS[name].plugin, options="--rm", image="new:1")
        assert RECIPES["tiny"].ready in node.type(run)


@contextmanager
def _lazily_pulled(node: Node, name: str, images: Images) -> Iterator[None]:
    """The image, under a second name too, and a container `app` of it; all is gone afterwards."""
    pull = _PULLS[name]
    node.type(pull.command)
    node.type("ctr images tag registry.example/app:1 registry.example/other:1")
    assert not node.blobs() & set(images.app.layers)
    node.type(_RUN.format(plugin=pull.plugin, options="-d --name app", image="app:1 /bin/busybox sleep 1000"))
    yield
    node.type("nerdctl rm --force app")
    node.run("ctr", "images", "rm", "--sync", *node.run("ctr", "images", "ls", "-q").split())
