"""Credentials that came with pulls: the kubelet passes them through CRI, and nobody else on the node has them.

They belong to the repository of the image that was pulled. Of each repository the newest few are kept, since pods in
different namespaces bring different ones, and are tried in turn. In memory only; in no repr, message or log line.
`rows` and `replace` are for handing them to another of our processes, and to `supervise.memory`.
"""

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from snapshotter.log import fields
from snapshotter.registry.credentials import Credential
from snapshotter.registry.endpoint import Endpoint
from snapshotter.registry.reference import DOCKER, DOCKER_API, ImageRef

__all__ = ["Passed", "PassedCredentials", "Row"]

_log = logging.getLogger(__name__)

_A_REPOSITORY = 4  # as many namespaces with secrets of their own; more are tried one after the other for nothing
_REPOSITORIES = 256
_ROW_BYTES = 8 << 10  # tokens of clouds have 3 KiB; all rows together are far from the longest line of `rpc`
_DOCKER_NAMES = (DOCKER, DOCKER_API, "index.docker.io")

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Passed:
    """One credential; `server` is the only host[:port] it is for, empty: whoever serves the repository."""

    credential: Credential
    server: str = ""

    def is_for(self, endpoint: Endpoint) -> bool:
        """Whether the endpoint may see it."""
        same = self.server in _DOCKER_NAMES and endpoint.host in _DOCKER_NAMES
        return not self.server or self.server == endpoint.host or same


class PassedCredentials:
    """By repository. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # (registry, repository) -> newest first; the repositories used longest ago first
        self._kept: OrderedDict[tuple[str, str], list[Passed]] = OrderedDict()

    def __repr__(self) -> str:
        with self._lock:
            return f"<PassedCredentials of {len(self._kept)} repositories>"

    def put(self, image: ImageRef, passed: Passed) -> bool:
        """Keep it as the newest of the image's repository, unless it is far too long. Whether it is kept and new."""
        key = (image.host, image.repository)
        if len(json.dumps(_row(key, passed))) > _ROW_BYTES:
            _log.warning("credentials.too_long %s", fields(image=image, limit=_ROW_BYTES))
            return False
        with self._lock:
            before = self._kept.pop(key, [])
            self._kept[key] = [passed, *(one for one in before if one != passed)][:_A_REPOSITORY]
            while len(self._kept) > _REPOSITORIES:
                self._kept.popitem(last=False)
        return passed not in before

    def forget(self, image: ImageRef, passed: Passed) -> None:
        """It turned out to be of no use."""
        key = (image.host, image.repository)
        with self._lock:
            left = [one for one in self._kept.get(key, []) if one != passed]
            if left:
                self._kept[key] = left
            else:
                self._kept.pop(key, None)

    def keep_only(self, repositories: Iterable[tuple[str, str]]) -> bool:
        """Forget those of other repositories, (registry, name). Whether there were any."""
        wanted = set(repositories)
        with self._lock:
            gone = self._kept.keys() - wanted
            for key in gone:
                del self._kept[key]
        return bool(gone)

    def lookup(self, endpoint: Endpoint, image: ImageRef) -> list[Credential]:
        """What may be shown to `endpoint` for the image's repository, the newest first."""
        with self._lock:
            kept = list(self._kept.get((image.host, image.repository), ()))
        return [one.credential for one in kept if one.is_for(endpoint)]

    def registries(self) -> set[str]:
        """The registries, host[:port], that there are some for."""
        with self._lock:
            return {registry for registry, _ in self._kept}

    def rows(self) -> list[Row]:
        """All of them as JSON values, with the secrets: for our own processes only."""
        with self._lock:
            kept = [(key, one) for key, several in self._kept.items() for one in several]
        return [_row(key, one) for key, one in kept]

    def replace(self, rows: Iterable[Row]) -> None:
        """Have what `rows` gave elsewhere, and nothing else."""
        kept: OrderedDict[tuple[str, str], list[Passed]] = OrderedDict()
        for row in rows:
            secrets = {name: row[name] for name in ("user", "password", "identity_token", "registry_token")}
            one = Passed(Credential(**secrets), row["server"])
            kept.setdefault((row["registry"], row["repository"]), []).append(one)
        with self._lock:
            self._kept = kept


def _row(key: tuple[str, str], one: Passed) -> Row:
    registry, repository = key
    return {
        "registry": registry,
        "repository": repository,
        "server": one.server,
        "user": one.credential.user,
        "password": one.credential.password,
        "identity_token": one.credential.identity_token,
        "registry_token": one.credential.registry_token,
    }
