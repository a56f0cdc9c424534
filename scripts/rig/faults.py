"""A server that can misbehave: the faults, one class each, and the HTTP server that commits them.

A `FaultyServer` gives the right answer (`right`) unless `action` names a fault for the request. What is right is up to
whoever derives from it: blobs in memory (`RangeServer` of the tests), or what a registry behind it says (`ask`: `Front`
of the tests, the proxy of the chaos bench). Answers are held in memory whole. Connections are kept alive. With `tls` it
speaks HTTPS. Leaving the `with` ends all threads, also those that a fault holds.
"""

import contextlib
import http.client
import re
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

__all__ = [
    "Action",
    "Answer",
    "Behaviour",
    "Drip",
    "Falsify",
    "FaultyServer",
    "Hold",
    "IgnoreRange",
    "Lose",
    "Range",
    "Request",
    "Reset",
    "ShortRange",
    "Status",
    "Truncate",
    "WrongRange",
    "ask",
    "redirect",
]

Range = tuple[int, int | None]
"""Half-open; the end is None when open."""

_CHUNK = 16 * 1024
_HOP = frozenset({"connection", "transfer-encoding", "content-length", "keep-alive"})


@dataclass(frozen=True)
class Request:
    """One request as it came."""

    number: int
    method: str
    path: str
    headers: Mapping[str, str]
    range: Range | None
    body: bytes = b""


@dataclass(frozen=True)
class Answer:
    """What is right. `length`: what is said of it where the body is not there, as for HEAD."""

    status: int
    headers: Sequence[tuple[str, str]] = ()
    body: bytes = b""
    length: int | None = None


@dataclass(frozen=True)
class Status:
    """Answer with this status, headers and body instead."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True)
class Hold:
    """The right answer, but after `after` body bytes wait for `until` (for ever when None). `after=-1`: before the
    status line."""

    after: int
    until: threading.Event | None = None


@dataclass(frozen=True)
class Truncate:
    """The right headers, then close the connection in order after `after` body bytes (-1: before the status line, and
    before anything is done about the request)."""

    after: int


@dataclass(frozen=True)
class Reset:
    """The same, but reset the connection."""

    after: int


@dataclass(frozen=True)
class Lose:
    """Do what is asked for, then reset the connection instead of an answer."""


@dataclass(frozen=True)
class IgnoreRange:
    """200 and the whole blob whatever range was asked for; without Content-Length when `chunked`."""

    chunked: bool = False


@dataclass(frozen=True)
class WrongRange:
    """206 for the range asked for, moved by `shift` bytes."""

    shift: int


@dataclass(frozen=True)
class ShortRange:
    """206 that says and gives only the first `length` bytes of the range."""

    length: int


@dataclass(frozen=True)
class Falsify:
    """The right answer, but for one bit of byte `at` of the body."""

    at: int


@dataclass(frozen=True)
class Drip:
    """The right headers, then `size` bytes every `pause_s`."""

    pause_s: float
    size: int = 1


Action = Status | Hold | Truncate | Reset | Lose | IgnoreRange | WrongRange | ShortRange | Falsify | Drip
Behaviour = Callable[[Request], Action | None]


def redirect(url: str, status: int = 307) -> Status:
    """A redirect to `url`."""
    return Status(status, {"Location": url})


def ask(backend: str, request: Request, asked: Range | None) -> Answer:
    """What the server at `backend` (host:port) answers to the request, with the range `asked` instead of its own."""
    headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
    if asked != request.range:
        headers = {name: value for name, value in headers.items() if name.lower() != "range"}
        if asked is not None:
            headers["Range"] = f"bytes={asked[0]}-{'' if asked[1] is None else asked[1] - 1}"
    body = request.body if request.body or request.method in ("POST", "PUT") else None
    with contextlib.closing(http.client.HTTPConnection(backend, timeout=60)) as connection:
        connection.request(request.method, request.path, body, headers)
        answer = connection.getresponse()
        data = answer.read()
    kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in _HOP]
    length = int(answer.getheader("Content-Length", "0")) if request.method == "HEAD" else None
    return Answer(answer.status, kept, data, length)


class FaultyServer:
    """See the module; a context manager, which serves from its construction on."""

    def __init__(
        self, address: tuple[str, int] = ("127.0.0.1", 0), tls: ssl.SSLContext | None = None, kept: int = 1 << 30
    ) -> None:
        """`kept`: bytes of a request's body that stay in `requests`."""
        self.requests: list[Request] = []
        self.connections = 0
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self.tls = tls
        self._kept = kept
        self._sockets: set[socket.socket] = set()
        self._http = _Http(address, _Handler)
        self._http.owner = self
        self.host = f"{address[0]}:{self._http.server_address[1]}"
        self.url = f"{'https' if tls else 'http'}://{self.host}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), name=type(self).__name__)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, end every connection, wait for all threads."""
        self.closing.set()
        self._http.shutdown()
        self.drop_connections()
        self._http.server_close()
        self._thread.join()

    def drop_connections(self) -> None:
        """End every connection that is open now, as a server does with idle ones."""
        with self.lock:
            sockets = list(self._sockets)
        for sock in sockets:
            with contextlib.suppress(OSError):  # its thread was faster
                sock.shutdown(socket.SHUT_RDWR)

    def action(self, request: Request) -> Action | None:
        """What is done instead of the right answer."""
        raise NotImplementedError

    def right(self, request: Request, asked: Range | None) -> Answer:
        """The right answer for this range; None: for all."""
        raise NotImplementedError

    def knows(self, request: Request) -> bool:
        """Whether there is what is asked for. If not, the answer meets no fault but Status."""
        return True

    def track(self, sock: socket.socket, is_open: bool) -> None:
        """A connection has come, or gone."""
        with self.lock:
            if is_open:
                self.connections += 1
                self._sockets.add(sock)
            else:
                self._sockets.discard(sock)

    def record(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Request:
        """A request has come."""
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("Range", ""))
        asked = (int(match[1]), int(match[2]) + 1 if match[2] else None) if match else None
        with self.lock:
            request = Request(len(self.requests), method, path, headers, asked, body)
            self.requests.append(request if len(body) <= self._kept else replace(request, body=body[: self._kept]))
        return request


class _Http(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True
    request_queue_size = 64
    owner: FaultyServer

    def get_request(self) -> tuple[socket.socket, Any]:
        """The handshake is left to the connection's own thread: a client that never answers holds up nobody else."""
        sock, address = super().get_request()
        if self.owner.tls is not None:
            sock = self.owner.tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return sock, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are part of it."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.1"  # so that who greets in TLS gets an answer that is HTTP, as from real servers
    disable_nagle_algorithm = True
    server: _Http

    def setup(self) -> None:
        super().setup()
        self.server.owner.track(self.connection, True)

    def finish(self) -> None:
        self.server.owner.track(self.connection, False)
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def handle_one(self) -> None:
        owner = self.server.owner
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        request = owner.record(self.command, self.path, dict(self.headers), body)
        action = owner.action(request)
        if isinstance(action, Status):
            self._answer(Answer(action.status, list(action.headers.items()), action.body), None)
            return
        if not owner.knows(request):
            action = None
        if isinstance(action, (Hold, Truncate, Reset)) and action.after < 0:
            if isinstance(action, Hold):
                self._wait(action)
            else:
                self._end(isinstance(action, Reset))
                return
        answer = owner.right(request, _instead(request.range, action))
        if isinstance(action, Lose):
            self._end(True)
            return
        self._answer(answer, action)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = handle_one

    def _answer(self, answer: Answer, action: Action | None) -> None:
        chunked = isinstance(action, IgnoreRange) and action.chunked
        body = answer.body
        if isinstance(action, Falsify):
            body = body[: action.at] + bytes(it ^ 1 for it in body[action.at : action.at + 1]) + body[action.at + 1 :]
        length = len(body) if answer.length is None else answer.length
        self.send_response(answer.status)
        for name, value in answer.headers:
            if name.lower() not in _HOP:
                self.send_header(name, value)
        self.send_header(*(("Transfer-Encoding", "chunked") if chunked else ("Content-Length", str(length))))
        self.end_headers()
        if self.command == "HEAD":
            return
        if isinstance(action, Drip):
            self._drip(body, action)
            return
        stop = len(body)
        if isinstance(action, (Hold, Truncate, Reset)) and action.after >= 0:
            stop = action.after
        self._send(body[:stop], chunked)
        if isinstance(action, (Truncate, Reset)):
            self._end(isinstance(action, Reset))
            return
        if isinstance(action, Hold) and action.after >= 0:
            self._wait(action)
            self._send(body[stop:], chunked)
        if chunked:
            self.wfile.write(b"0\r\n\r\n")

    def _send(self, body: bytes, chunked: bool) -> None:
        for at in range(0, len(body), _CHUNK):
            piece = body[at : at + _CHUNK]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)

    def _drip(self, body: bytes, action: Drip) -> None:
        for at in range(0, len(body), action.size):
            if self.server.owner.closing.wait(action.pause_s):
                break
            self.wfile.write(body[at : at + action.size])

    def _wait(self, action: Hold) -> None:
        while not self.server.owner.closing.is_set() and not (action.until and action.until.wait(0.005)):
            self.server.owner.closing.wait(0.005)

    def _end(self, reset: bool) -> None:
        self.close_connection = True
        if reset:  # SO_LINGER with time 0 turns the close into a RST
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.rfile.close()
            self.connection.close()


def _instead(asked: Range | None, action: Action | None) -> Range | None:
    """The range of the answer."""
    if asked is None or isinstance(action, IgnoreRange):
        return None
    start, end = asked
    if isinstance(action, WrongRange):
        return start + action.shift, None if end is None else end + action.shift
    if isinstance(action, ShortRange):
        return start, start + action.length if end is None else min(end, start + action.length)
    return asked
