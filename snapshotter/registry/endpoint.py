"""One host that serves a registry's images: where it is, what it may be asked for, and how to reach it. Values only.

registry = the host that an image's name names; endpoint = a host that is asked for it: the registry itself, another
server in its place, or a mirror.
"""

from dataclasses import dataclass, field
from urllib.parse import urlencode, urlsplit

from snapshotter.registry.reference import DOCKER, DOCKER_API
from snapshotter.registry.trust import TlsFiles

__all__ = ["DIRECT", "Endpoint", "Line", "is_loopback"]


@dataclass(frozen=True, slots=True)
class Line:
    """How a connection is made. `tls` None: the system's trust; `connect_timeout_s` None: the configured one."""

    tls: TlsFiles | None = None
    connect_timeout_s: float | None = None


DIRECT = Line()
"""A connection without anything special."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`url` is the root of the registry API: scheme, host[:port] and path (`/v2` as a rule), no slash at the end.

    `pulls`: may be asked for contents by digest; `resolves`: also what a tag means; `pushes`: takes what is pushed.
    `headers` go with each request to this host; they may be secret, so they are in no repr.
    """

    url: str
    pulls: bool = True
    resolves: bool = True
    line: Line = DIRECT
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    pushes: bool = True

    @property
    def host(self) -> str:
        """host[:port]."""
        return urlsplit(self.url).netloc

    def address(self, registry: str, repository: str, path: str) -> str:
        """The URL of `path` (perhaps with a query) in the repository of `registry`; other hosts are told whose
        repository is meant."""
        url = f"{self.url}/{repository}/{path}"
        own = self.host == registry or (registry == DOCKER and self.host == DOCKER_API)
        return url if own else f"{url}{'&' if '?' in path else '?'}{urlencode({'ns': registry})}"


def is_loopback(host: str) -> bool:
    """Whether host[:port] is this machine."""
    name = urlsplit(f"//{host}").hostname or ""
    return name in ("localhost", "::1") or name.startswith("127.")
