"""A small true HTTP server of blobs that can misbehave, for every test that reads from a registry.

    with RangeServer({"/v2/app/blobs/sha256:…": data}, behaviour) as server:
        … server.url, server.host; then look at server.requests and server.connections

`behaviour(request)` is asked for each request and returns an action below, or None for the right answer: single-range
GET and HEAD of `blobs` (path -> bytes), 416 beyond the end, 404 for other paths. `in_order` makes a behaviour out of
a list. Connections are kept alive. With `tls` it speaks HTTPS. A POST gets what a GET would, its body is in the
request. Leaving the `with` ends all threads, also those that an action holds.
"""

import contextlib
import re
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

PIECE = 16 * 1024


@dataclass(frozen=True)
class Request:
    """One request as it came; `range` is the half-open range asked for, its end None when open."""

    number: int
    method: str
    path: str
    headers: Mapping[str, str]
    range: tuple[int, int | None] | None
    body: bytes = b""


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
    """The right headers, then close the connection in order after `after` body bytes (-1: before the status line)."""

    after: int


@dataclass(frozen=True)
class Reset:
    """The right headers, then reset the connection after `after` body bytes (-1: before the status line)."""

    after: int


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
    """The right headers, then a byte every `pause_s`."""

    pause_s: float


Action = Status | Hold | Truncate | Reset | IgnoreRange | WrongRange | ShortRange | Falsify | Drip
Behaviour = Callable[[Request], Action | None]


def in_order(actions: Iterable[Action | None]) -> Behaviour:
    """The n-th request meets the n-th action, later ones the right answer."""
    left = iter(actions)
    lock = threading.Lock()

    def behaviour(request: Request) -> Action | None:
        with lock:
            return next(left, None)

    return behaviour


def redirect(url: str, status: int = 307) -> Status:
    """A redirect to `url`."""
    return Status(status, {"Location": url})


class TokenGate:
    """A behaviour that wants a Bearer token from `realm` and answers for that token server as well: path `/token`.

    `revoke()` makes the token in use invalid; tokens are counted in `issued`; scopes asked for are in `scopes`.
    """

    def __init__(self, then: Behaviour | None = None, expires_in: int = 300, refuse: int = 401) -> None:
        self.issued = 0
        self.scopes: list[str] = []
        self.realm = ""
        self.expires_in = expires_in
        self.deny_all = False
        self._then = then
        self._refuse = refuse
        self._lock = threading.Lock()
        self._valid = -1

    def revoke(self) -> None:
        self._valid = -1

    def __call__(self, request: Request) -> Action | None:
        parts = urlsplit(request.path)
        if parts.path == "/token":
            with self._lock:
                self.issued += 1
                self._valid = self.issued
                self.scopes.append(parse_qs(parts.query)["scope"][0])
                body = f'{{"token": "t{self.issued}", "expires_in": {self.expires_in}}}'
            return Status(200, {"Content-Type": "application/json"}, body.encode())
        if not self.deny_all and request.headers.get("Authorization") == f"Bearer t{self._valid}":
            return self._then(request) if self._then is not None else None
        repository = request.path.split("/v2/")[-1].rsplit("/", 2)[0]
        challenge = f'Bearer realm="{self.realm}",service="s, of tests",scope="repository:{repository}:pull"'
        return Status(self._refuse, {"WWW-Authenticate": challenge}, b'{"errors": []}')


class RangeServer:
    """See the module. `blobs` may be changed while it runs."""

    def __init__(
        self, blobs: Mapping[str, bytes], behaviour: Behaviour | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self.blobs = dict(blobs)
        self.behaviour = behaviour
        self.requests: list[Request] = []
        self.connections = 0
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._http = _Http(("127.0.0.1", 0), _Handler)
        self._http.owner = self
        self.host = f"127.0.0.1:{self._http.server_address[1]}"
        self.url = f"{'https' if tls else 'http'}://{self.host}"
        self.tls = tls
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), name="rangeserver")
        self._thread.start()

    def __enter__(self) -> "RangeServer":
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

    def ranges(self) -> list[tuple[int, int | None] | None]:
        """The ranges of all GET requests so far."""
        return [request.range for request in self.requests if request.method == "GET"]

    def track(self, sock: socket.socket, is_open: bool) -> None:
        with self.lock:
            if is_open:
                self.connections += 1
                self._sockets.add(sock)
            else:
                self._sockets.discard(sock)

    def record(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Request:
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("Range", ""))
        asked = (int(match[1]), int(match[2]) + 1 if match[2] else None) if match else None
        with self.lock:
            request = Request(len(self.requests), method, path, headers, asked, body)
            self.requests.append(request)
        return request


class _Http(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True
    owner: RangeServer

    def get_request(self) -> tuple[socket.socket, Any]:
        """The handshake is left to the connection's own thread: a client that never answers holds up nobody else."""
        sock, address = super().get_request()
        if self.owner.tls is not None:
            sock = self.owner.tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return sock, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are part of the tests."""


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

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        owner = self.server.owner
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        request = owner.record(self.command, self.path, dict(self.headers), body)
        action = owner.behaviour(request) if owner.behaviour is not None else None
        if isinstance(action, Status):
            self._answer(action.status, action.headers, action.body)
            return
        blob = owner.blobs.get(urlsplit(self.path).path)
        if blob is None:
            self._answer(404, {}, b"not here")
            return
        if isinstance(action, (Hold, Reset, Truncate)) and action.after < 0:
            self._act(action)
        if self.close_connection and isinstance(action, (Reset, Truncate)):
            return
        self._answer(*_right_answer(blob, request, action), action)

    def _answer(self, status: int, headers: Mapping[str, str], body: bytes, action: Action | None = None) -> None:
        chunked = isinstance(action, IgnoreRange) and action.chunked
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header(*(("Transfer-Encoding", "chunked") if chunked else ("Content-Length", str(len(body)))))
        self.end_headers()
        if self.command == "HEAD":
            return
        if isinstance(action, Drip):
            for at in range(len(body)):
                if self.server.owner.closing.wait(action.pause_s):
                    break
                self.wfile.write(body[at : at + 1])
            return
        stop = action.after if isinstance(action, (Hold, Reset, Truncate)) and action.after >= 0 else len(body)
        self._send(body[:stop], chunked)
        if isinstance(action, (Hold, Reset, Truncate)) and action.after >= 0:
            self._act(action)
            if isinstance(action, Hold):
                self._send(body[stop:], chunked)
        if chunked:
            self.wfile.write(b"0\r\n\r\n")

    def _send(self, body: bytes, chunked: bool) -> None:
        for at in range(0, len(body), PIECE):
            piece = body[at : at + PIECE]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)

    def _act(self, action: Hold | Reset | Truncate) -> None:
        if isinstance(action, Hold):
            while not self.server.owner.closing.is_set() and not (action.until and action.until.wait(0.005)):
                self.server.owner.closing.wait(0.005)
            return
        self.close_connection = True
        if isinstance(action, Reset):  # SO_LINGER with time 0 turns the close into a RST
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.rfile.close()
            self.connection.close()


def _right_answer(blob: bytes, request: Request, action: Action | None) -> tuple[int, dict[str, str], bytes]:
    if request.range is None or isinstance(action, IgnoreRange):
        return 200, {"Content-Type": "application/octet-stream"}, blob
    start, end = request.range
    if start >= len(blob):
        return 416, {"Content-Range": f"bytes */{len(blob)}"}, b""
    end = len(blob) if end is None else min(end, len(blob))
    if isinstance(action, WrongRange):
        start, end = start + action.shift, end + action.shift
    if isinstance(action, ShortRange):
        end = min(end, start + action.length)
    body = bytearray(blob[start:end])
    if isinstance(action, Falsify):
        body[action.at] ^= 1
    return 206, {"Content-Range": f"bytes {start}-{end - 1}/{len(blob)}"}, bytes(body)
