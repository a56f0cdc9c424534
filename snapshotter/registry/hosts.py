"""Which endpoints serve a registry: its directory below `certs.d`, as containerd reads it, else the registry alone.

Looked for: `host_port_`, `host:port`, `_default`, and in the first that exists `hosts.toml`; without a (valid) one the
certificates `*.crt`, `*.cert`, `*.key` that Docker would use. Read again after `_FRESH_S`, so that a change needs no
restart. Does no network.

Shared state: `_lock` guards the table; files are read outside of it, perhaps twice at once, with the same result.
"""

import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from snapshotter.errors import Precondition
from snapshotter.log import fields
from snapshotter.registry.endpoint import Endpoint, Line, is_loopback
from snapshotter.registry.hostsfile import HostsFileError, parse_hosts
from snapshotter.registry.reference import DOCKER, DOCKER_API
from snapshotter.registry.trust import TlsFiles

__all__ = ["Hosts"]

_FRESH_S = 10.0
_PORT_DIRECTORY = re.compile(r"_([0-9]+)_$")

log = logging.getLogger(__name__)


class Hosts:
    """The endpoints of all registries. `directory` None: each registry serves itself. Thread-safe."""

    def __init__(
        self,
        directory: Path | None,
        plain_http: frozenset[str] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`plain_http`: registries, as host or host:port, spoken to without TLS where no file says otherwise."""
        self._directory = directory
        self._plain_http = plain_http
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, tuple[Endpoint, ...]]] = {}
        self._bad: dict[Path, str] = {}

    def __repr__(self) -> str:
        return f"<Hosts {self._directory}, {len(self._known)} registries known>"

    def endpoints(self, registry: str) -> tuple[Endpoint, ...]:
        """Whom to ask for images of `registry` (host[:port]), in this order; at least one.

        What was read before holds on when the directory cannot be read any more; without that it is a Precondition, for
        then nobody knows whether the registry itself may be asked.
        """
        now = self._clock()
        with self._lock:
            until, known = self._known.get(registry, (now, ()))
        if until > now:
            return known
        try:
            found = tuple(one for made in self._read(registry) for one in _with_https_first(made))
        except OSError as exc:
            if not known:
                raise Precondition(f"{exc.filename}: cannot read how {registry} is reached: {exc.strerror}") from exc
            found = known
        with self._lock:
            self._known[registry] = (now + _FRESH_S, found)
        return found

    def named(self) -> set[str]:
        """The registries, host[:port], that the configuration names."""
        try:
            names = {path.name for path in self._directory.iterdir()} if self._directory is not None else set()
        except OSError:
            names = set()
        return {*self._plain_http} | {_PORT_DIRECTORY.sub(r":\1", name) for name in names if name != "_default"}

    def _read(self, registry: str) -> tuple[Endpoint, ...]:
        directory = self._directory_of(registry)
        if directory is None:
            return (self._itself(registry, Endpoint("")),)
        entries = self._parsed(directory / "hosts.toml")
        if entries is None:
            entries = (Endpoint("", line=Line(_docker_files(directory))),)
        return tuple(entry if entry.url else self._itself(registry, entry) for entry in entries)

    def _directory_of(self, registry: str) -> Path | None:
        if self._directory is None:
            return None
        host, colon, port = registry.rpartition(":")
        names = [f"{host}_{port}_"] if colon and host else []
        for name in (*names, registry, "_default"):
            try:
                (self._directory / name).stat()
            except FileNotFoundError:
                continue
            return self._directory / name
        return None

    def _parsed(self, path: Path) -> tuple[Endpoint, ...] | None:
        """The endpoints of the file; None where there is none, or one that containerd too would pass over."""
        try:
            text = path.read_text(encoding="utf-8")
            entries = parse_hosts(text, path.parent) if text else None
        except FileNotFoundError:
            return None
        except (HostsFileError, UnicodeDecodeError) as exc:
            reason = str(exc) if isinstance(exc, HostsFileError) else "it is not UTF-8 text"
            with self._lock:
                told = self._bad.get(path) == reason
                self._bad[path] = reason
            if not told:
                log.error("hosts.refused %s", fields(file=path, error=reason, used="the registry itself"))
            return None
        with self._lock:
            self._bad.pop(path, None)
        return entries

    def _itself(self, registry: str, settings: Endpoint) -> Endpoint:
        """The registry as its own endpoint, with these settings."""
        if registry == DOCKER:
            return replace(settings, url=f"https://{DOCKER_API}/v2")
        name = urlsplit(f"//{registry}").hostname or ""
        plain = is_loopback(registry) or registry in self._plain_http or name in self._plain_http
        return replace(settings, url=f"{'http' if plain else 'https'}://{registry}/v2")


def _with_https_first(endpoint: Endpoint) -> tuple[Endpoint, ...]:
    """As containerd: who sets up TLS for an http URL gets https where it works, unless the port says http."""
    scheme, rest = endpoint.url.split("://", 1)
    if scheme != "http" or endpoint.line.tls is None:
        return (endpoint,)
    plain = replace(endpoint, line=replace(endpoint.line, tls=None))
    return (plain,) if urlsplit(endpoint.url).port == 80 else (replace(endpoint, url=f"https://{rest}"), plain)


def _docker_files(directory: Path) -> TlsFiles | None:
    """Certificates laid out as for Docker; None where there are none."""
    names = sorted(path for path in directory.iterdir() if not path.is_dir())
    clients = []
    for path in names:
        if path.suffix == ".cert":
            key = path.with_suffix(".key")
            clients.append((path, key if key.exists() else None))
    authorities = tuple(path for path in names if path.suffix == ".crt")
    return TlsFiles(authorities, tuple(clients)) if authorities or clients else None
