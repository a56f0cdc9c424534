"""TLS of a connection: which certificates to believe and which to show, as one SSLContext for each set of files.

Knows files and OpenSSL, nothing of hosts. The certificates named here come on top of the system's own. Files are looked
at before each use (one stat each), so that a renewed certificate needs no restart.

Shared state: `_lock` guards the table of contexts; loading happens under it, so that nothing is loaded twice.
"""

import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import certifi

from snapshotter.errors import Precondition

__all__ = ["TlsContexts", "TlsFiles"]

_MOST = 64  # contexts kept: a node has a few registries; this bounds what renewed certificates leave behind

_Stamp = tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """What one host wants of TLS. `client` are pairs of certificate and key; None: the key is in the same file."""

    ca: tuple[Path, ...] = ()
    client: tuple[tuple[Path, Path | None], ...] = ()
    skip_verify: bool = False

    def paths(self) -> Iterator[Path]:
        """Every file that is read."""
        yield from self.ca
        for pair in self.client:
            yield from (path for path in pair if path is not None)


class TlsContexts:
    """SSL contexts by what they were made of; None stands for the system's trust and no certificate of our own.

    Making one takes 10-20 ms, before the first byte: hence kept. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[TlsFiles | None, tuple[_Stamp, ...]], ssl.SSLContext] = {}

    def get(self, files: TlsFiles | None) -> ssl.SSLContext:
        """The context for `files`; Precondition when one of them cannot be used."""
        key = (files, tuple(_stamp(path) for path in files.paths()) if files is not None else ())
        with self._lock:
            context = self._known.get(key)
            if context is None:
                while len(self._known) >= _MOST:
                    del self._known[next(iter(self._known))]
                context = self._known[key] = _make(files)
            return context


def _stamp(path: Path) -> _Stamp:
    """Changes when the file does."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _make(files: TlsFiles | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if ssl.get_default_verify_paths().cafile is None and not context.cert_store_stats()["x509_ca"]:
        context.load_verify_locations(certifi.where())
    if files is None:
        return context
    for ca in files.ca:
        try:
            context.load_verify_locations(ca)
        except (OSError, ValueError) as exc:
            raise Precondition(f"{ca}: cannot be used as a CA certificate: {_reason(exc)}") from exc
    # OpenSSL keeps one certificate for each type of key, the last: so the first of the list goes last.
    for certificate, key in reversed(files.client):
        try:
            # Without a password OpenSSL would ask for one on the terminal; an empty one makes it refuse instead.
            context.load_cert_chain(certificate, key, password="")
        except (OSError, ValueError) as exc:
            where = certificate if key is None else f"{certificate} with {key}"
            raise Precondition(f"{where}: cannot be used as a client certificate: {_reason(exc)}") from exc
    if files.skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _reason(exc: OSError | ValueError) -> str:
    return (exc.strerror or str(exc)) if isinstance(exc, OSError) else str(exc)
