"""HTTP to registries and directories: warm connections, time-outs, redirects; network trouble becomes our errors.

Built on requests' HTTPAdapter (its pools, TLS and proxies, see `connections`) without its Session, whose cookies, netrc
look-ups and own redirect rules we do not want. Knows nothing of images, tokens or ranges: any answer is returned,
whatever its status.

Invariants: at most `connections` requests are under way per host (a slot is held from `open` until `Reply.close`);
private headers (Authorization, and what an operator configured) never reach another origin than the one they were
given for, nor does a body; no message holds the path or query of a URL, which may be signed; only a request on a
kept-alive connection that died before any byte of the answer is repeated, and silently, unless its body is an `Upload`;
nothing else is retried here.
"""

import http.client
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol, cast
from urllib.parse import urljoin, urlsplit

import requests
import urllib3

from snapshotter.errors import InvalidArgument, Precondition, SnapshotterError, Transient
from snapshotter.registry.connections import Adapter, StaleConnection
from snapshotter.registry.endpoint import DIRECT, Line, is_loopback
from snapshotter.registry.trust import TlsContexts

__all__ = ["CHUNK_BYTES", "PIECE_BYTES", "Reply", "Transport", "Upload", "origin"]

CHUNK_BYTES = 256 * 1024
"""Most bytes of one chunk: a chunk is what one recv yields, so that a decoder gets its bytes early."""

PIECE_BYTES = 64 * 1024
"""Most bytes that are sent by one call: a call gets the connect time-out for all of it, which a slow link must keep."""

_LEAST_BYTES_S = 1024
"""A body that comes slower than this, over a whole time-out, counts as stalled: with a byte now and then a server could
hold a reader for as long as it likes. Only time spent waiting for bytes counts."""

_MAX_HOPS = 5
_REDIRECTS = (301, 302, 303, 307, 308)


class _Slots(Protocol):
    """What `Reply` gives back when it is closed."""

    def release(self) -> None: ...


class Reply:
    """One answer whose body is read on demand. One thread reads; any thread may cancel. Always close it."""

    __slots__ = (
        "_came",
        "_closed",
        "_lock",
        "_patience_s",
        "_raw",
        "_slot",
        "_waited_s",
        "headers",
        "redirected",
        "status",
        "url",
        "what",
    )

    def __init__(self, response: requests.Response, slot: _Slots, what: str, patience_s: float) -> None:
        """`patience_s`: the time-out over which a body must not be slower than `_LEAST_BYTES_S`."""
        self.status = response.status_code
        self.headers: Mapping[str, str] = response.headers
        self.url = response.url
        self.redirected = False
        self.what = what
        self._raw = cast(urllib3.HTTPResponse, response.raw)
        self._slot = slot
        self._lock = threading.Lock()
        self._closed = False
        self._patience_s = patience_s
        self._waited_s, self._came = 0.0, 0  # since the pace was looked at last

    def __repr__(self) -> str:
        return f"<Reply {self.status} {self.what}{' closed' if self._closed else ''}>"

    def __enter__(self) -> "Reply":
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.close()

    def read1(self) -> bytes:
        """Whatever has arrived, at most CHUNK_BYTES; b"" at the end. Transient on a reset, a stall, a short body, or a
        body that hardly comes."""
        asked = time.monotonic()
        with _translated(self.what):
            chunk = self._raw.read1(CHUNK_BYTES, decode_content=False) or b""
        self._waited_s += time.monotonic() - asked
        self._came += len(chunk)
        if self._waited_s >= self._patience_s:
            if chunk and self._came < self._waited_s * _LEAST_BYTES_S:
                raise Transient(f"{self.what}: stalled: {self._came} bytes in {self._waited_s:.1f} s")
            self._waited_s, self._came = 0.0, 0
        return chunk

    def read_all(self, limit: int) -> bytes:
        """The whole body; InvalidArgument when it is longer than `limit` bytes."""
        chunks: list[bytes] = []
        size = 0
        while chunk := self.read1():
            chunks.append(chunk)
            size += len(chunk)
            if size > limit:
                raise InvalidArgument(f"{self.what}: the answer is longer than {limit} bytes")
        return b"".join(chunks)

    def cancel(self) -> None:
        """Wake a thread that is blocked in `read1`; it meets the end of the body or Transient."""
        try:
            self._raw.shutdown()
        except (ValueError, RuntimeError, OSError):
            return  # the connection is already closed or back in its pool: nobody is blocked on it

    def finish(self) -> None:
        """Close an answer that is not wanted; a short rest of its body is read so that the connection stays warm."""
        length = self.headers.get("Content-Length", "")
        try:
            if self._raw.length_remaining == 0 or (length.isdigit() and int(length) <= CHUNK_BYTES):
                while self.read1():
                    pass
        except SnapshotterError:
            pass  # what was wanted of it is here already; only the connection is lost
        finally:
            self.close()

    def close(self) -> None:
        """Give the connection back if the body was read whole, else drop it; frees the slot once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._raw.close()
        self._raw.release_conn()
        self._slot.release()


class Upload:
    """A request's body of `size` bytes that is made while it is sent, by a call of `open` for each time."""

    def __init__(self, size: int, open: Callable[[], Iterator[bytes]], what: str) -> None:
        self._size = size
        self._open = open
        self._what = what

    def __repr__(self) -> str:
        return f"<Upload of {self._size} bytes, {self._what}>"

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[bytes]:
        """Never more or less than was announced: the other side would wait for it, or take it for the next request."""
        left = self._size
        for chunk in self._open():
            left -= len(chunk)
            if left < 0:
                break
            view = memoryview(chunk)
            yield from (bytes(view[start : start + PIECE_BYTES]) for start in range(0, len(chunk), PIECE_BYTES))
        if left:
            raise InvalidArgument(f"{self._what}: has {'more' if left < 0 else 'less'} than its {self._size} bytes")


class Transport:
    """A set of warm connections with one set of limits. Thread-safe."""

    def __init__(
        self,
        *,
        connections: int,
        connect_timeout_s: float,
        read_timeout_s: float,
    ) -> None:
        self._connections = connections
        self._timeout = (connect_timeout_s, read_timeout_s)
        self._adapter = Adapter(connections)
        self._tls = TlsContexts()
        self._lock = threading.Lock()
        self._slots: dict[str, threading.BoundedSemaphore] = {}
        self._proxies: dict[str, dict[str, str]] = {}

    def __repr__(self) -> str:
        return f"<Transport {self._connections} connections to each of {len(self._slots)} hosts>"

    def close(self) -> None:
        """Close the idle connections."""
        self._adapter.close()

    def open(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        what: str,
        *,
        private: Mapping[str, str] | None = None,
        line: Line = DIRECT,
        body: bytes | Upload | None = None,
    ) -> Reply:
        """Send one request, follow up to five redirects, return the answer once its headers are here.

        `private` headers go to the origin of `url` only; a request with a `body` follows no redirect at all.
        """
        hop = url
        for hops in range(_MAX_HOPS + 1):
            if private is not None and origin(hop) != origin(url):
                private = None  # once another host was asked they never come back
            reply = self._send(method, hop, {**(private or {}), **headers}, body, line, what)
            reply.redirected = hops > 0
            location = reply.headers.get("Location") if reply.status in _REDIRECTS and body is None else None
            if location is None:
                return reply
            reply.finish()
            hop = _next_hop(hop, location, what)
        raise Transient(f"{what}: more than {_MAX_HOPS} redirects, the last to {_host(hop)}")

    def expect(self, url: str, requests_at_once: int, line: Line = DIRECT) -> None:
        """So many requests to the host of `url` are about to be made at once. If it is far, connections for them are
        opened now, or as soon as that is known; no more than may be under way. Does no I/O itself, and never raises."""
        host = _host(url)
        with suppress(SnapshotterError), _translated(f"connecting ahead to {host}"):
            if self._proxies_for(url, host):
                return
            context = self._tls.get(line.tls) if url.startswith("https:") else None
            request = requests.Request("GET", url).prepare()
            timeout_s = line.connect_timeout_s or self._timeout[0]
            self._adapter.expect(request, context, min(requests_at_once, self._connections), timeout_s)

    def round_trip_s(self, url: str) -> float:
        """The round trip to the host of `url`, in seconds; 0.0 while that is not known."""
        return self._adapter.distances.round_trip_s(origin(url))

    def _send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | Upload | None,
        line: Line,
        what: str,
    ) -> Reply:
        host = _host(url)
        what = f"{what} at {host}"
        with _translated(what):
            all_headers = {"User-Agent": _USER_AGENT, "Accept-Encoding": "identity", **headers}
            data = cast("bytes | None", body)  # an Upload is, as requests sees it, an iterable with a length
            prepared = requests.Request(method, url, headers=all_headers, data=data).prepare()
        context = self._tls.get(line.tls) if url.startswith("https:") else None
        timeout = (line.connect_timeout_s or self._timeout[0], self._timeout[1])
        slot = self._slot(host)
        if not slot.acquire(timeout=sum(timeout)):
            raise Transient(f"{what}: all {self._connections} connections to {host} are busy")
        try:
            with _translated(what):
                return Reply(self._answer(prepared, host, context, timeout), slot, what, timeout[1])
        except BaseException:
            slot.release()
            raise

    def _answer(
        self,
        prepared: requests.PreparedRequest,
        host: str,
        context: ssl.SSLContext | None,
        timeout: tuple[float, float],
    ) -> requests.Response:
        proxies = self._proxies_for(prepared.url or "", host)
        # Each stale connection leaves the pool when it is met, so a live or new one comes at the latest after all.
        for _ in range(self._connections + 1):
            try:
                return self._adapter.send(
                    prepared,
                    stream=True,
                    timeout=timeout,
                    verify=context,  # type: ignore[arg-type]  # our adapter hands it on as it is
                    proxies=proxies,
                )
            except StaleConnection:
                if isinstance(prepared.body, Upload):  # some of it may have got there: whoever sends it begins anew
                    raise ConnectionResetError("the connection was closed during the upload") from None
        raise ConnectionResetError("kept-alive connections keep closing")

    def _slot(self, host: str) -> threading.BoundedSemaphore:
        with self._lock:
            return self._slots.setdefault(host, threading.BoundedSemaphore(self._connections))

    def _proxies_for(self, url: str, host: str) -> dict[str, str]:
        """The proxies that HTTP_PROXY, HTTPS_PROXY and NO_PROXY ask for, read once per host; none to this machine."""
        with self._lock:
            if host not in self._proxies:
                self._proxies[host] = {} if is_loopback(host) else requests.utils.get_environ_proxies(url)
            return self._proxies[host]


def _host(url: str) -> str:
    """Host and port, as messages name them: without the password that a URL may hold."""
    return urlsplit(url).netloc.rpartition("@")[2]


def origin(url: str) -> tuple[str, str | None, int]:
    """Scheme, host and port: to whom private headers are shown."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def _next_hop(url: str, location: str, what: str) -> str:
    """Where a redirect leads; only http and https are followed."""
    try:
        hop = urljoin(url, location)
        parts = urlsplit(hop)
        if parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) > 0:
            return hop
    except ValueError:
        pass  # not a URL at all: refused below
    scheme = location.partition(":")[0][:20]
    raise InvalidArgument(f"{what}: redirected to a {scheme!r} URL, which is neither http nor https to a host")


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """requests', urllib3's and socket errors as ours: the one border between HTTP and the daemon."""
    try:
        yield
    except (
        requests.exceptions.InvalidURL,
        requests.exceptions.InvalidSchema,
        requests.exceptions.MissingSchema,
    ) as exc:
        raise InvalidArgument(f"{what}: not a URL that can be asked ({type(exc).__name__})") from exc
    except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError) as exc:
        cause = _root(exc)
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise Precondition(f"{what}: certificate not trusted: {cause.verify_message}") from exc
        raise Transient(f"{what}: {_explain(exc, cause)}") from exc


def _root(exc: BaseException) -> BaseException:
    """The innermost cause: the one that says what happened in the fewest words."""
    seen: set[int] = set()
    while id(exc) not in seen:
        seen.add(id(exc))
        inner = exc.__cause__ or exc.__context__ or getattr(exc, "reason", None)
        if not isinstance(inner, BaseException):
            break
        exc = inner
    return exc


def _explain(exc: BaseException, cause: BaseException) -> str:
    if isinstance(exc, requests.exceptions.ConnectTimeout):
        return "no connection within the time-out"
    if isinstance(exc, (requests.exceptions.Timeout, urllib3.exceptions.TimeoutError, TimeoutError)):
        return "stalled: nothing received within the time-out"
    if isinstance(cause, (http.client.IncompleteRead, urllib3.exceptions.IncompleteRead)):
        return "short body: the connection closed early"
    return str(cause) or type(cause).__name__


def _user_agent() -> str:
    try:
        return f"bootseer/{version('bootseer')}"
    except PackageNotFoundError:
        return "bootseer"


_USER_AGENT = _user_agent()
