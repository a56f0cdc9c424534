"""A link without distance: node and servers in one network namespace, on its loopback device, at the usual address."""

from scripts.rig.delayline import FAR
from scripts.rig.namespace import Namespace, network_namespace
from scripts.rig.process import run
from scripts.rig.workspace import Workspace

__all__ = ["Loopback"]


class Loopback:
    """Both `Ends` in one namespace, where `FAR` is an address of the loopback device. Ends with `close`."""

    def __init__(self, workspace: Workspace) -> None:
        self._namespace = network_namespace(workspace.env)
        try:
            for words in (("link", "set", "lo", "up"), ("addr", "add", f"{FAR}/32", "dev", "lo")):
                run(self._namespace.command(["ip", *words]), workspace.env, "setting up a loopback device", 10)
        except BaseException:
            self.close()
            raise

    @property
    def near(self) -> Namespace:
        """Where the node is."""
        return self._namespace

    @property
    def far(self) -> Namespace:
        """Where the servers are."""
        return self._namespace

    def close(self) -> None:
        """End the namespace. Safe to call twice."""
        self._namespace.close()

    def __repr__(self) -> str:
        return f"<Loopback {self._namespace!r}>"
