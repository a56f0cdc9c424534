"""A node that is set up for a case: configured as docs/node-setup.md says, with images in its registry."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

from scripts.rig.workspace import Workspace
from tests.clients.cases import Case
from tests.clients.conftest import Images
from tests.clients.document import configuration, for_cri_here
from tests.clients.node import REGISTRY, Containerd, Node

__all__ = ["ready_node"]


@contextmanager
def ready_node(case: Case, containerd: Containerd, images: Images) -> Iterator[Node]:
    """A node with the case's configuration, and both images in its registry."""
    cri = case.client == "crictl"
    configuration = _configuration(case, cri)
    with Workspace() as workspace, closing(Node(workspace, containerd, configuration, images.indexes, cri)) as node:
        node.push(images.app.path, "app:1")
        node.push(images.pause.path, "pause:1")
        yield node


def _configuration(case: Case, cri: bool) -> str:
    """The document's configuration for the case."""
    text = configuration(case.containerd, cri).replace("registry.example", REGISTRY)
    if case.without:
        assert case.without in text
        text = text.replace(case.without, "")
    if cri:
        text = for_cri_here(case.containerd, text)
    return text.replace("[proxy_plugins.bootseer]", f"[proxy_plugins.{case.plugin}]")
