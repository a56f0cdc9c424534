"""The fetch process's way to registries, and the calls of the service that concern it: credentials, whose image it is.

Credentials that came with pulls are handed over by the service process, see `cri.pulls`; when this process starts they
are in `supervise.memory`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from snapshotter.config import Config
from snapshotter.model import Digest
from snapshotter.registry import Registry
from snapshotter.registry.locate import locate
from snapshotter.registry.passed import PassedCredentials
from snapshotter.supervise.memory import PassedMemory

__all__ = ["RegistryAccess"]


class RegistryAccess:
    """The registry client, with `ops` for the socket."""

    def __init__(self, config: Config, memory: PassedMemory) -> None:
        self._passed = PassedCredentials()
        self._passed.replace(memory.read())
        self.registry = Registry(config.registry, self._passed)
        self.ops: dict[str, Callable[[Mapping[str, Any]], Any]] = {
            "set-credentials": lambda request: self._passed.replace(request["rows"]),
            "locate": self._locate,
        }

    def __repr__(self) -> str:
        return f"<RegistryAccess {self.registry!r} {self._passed!r}>"

    def _locate(self, request: Mapping[str, Any]) -> str:
        sources = [(name, repository) for name, repository in request["sources"]]
        return locate(self.registry, sources, Digest(request["manifest"]))
