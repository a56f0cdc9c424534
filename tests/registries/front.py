"""What stands before a registry: a proxy with TLS, with tokens, with faults. It passes on what it does not answer.

`behaviour(request)` is asked for each request that has the right token and gives an action of `rangeserver`, or None to
pass it on: Status (answered here), Reset (the connection is reset, -1: nothing was passed on; 0: it was, and its answer
is lost). `requests` holds all that came, without their bodies but for 1 KiB.
"""

import contextlib
import http.client
import json
import socket
import ssl
import struct
import threading
from base64 import b64decode, b64encode
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.snapshotter.rangeserver import Behaviour, Request, Reset, Status

_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}
_ACTIONS = {"GET": {"pull"}, "HEAD": {"pull"}, "DELETE": {"delete"}}


class Tokens:
    """A token server, and what its tokens allow. `users`: name -> password; `rights`: name ("" for nobody) -> the
    actions that it gets; all who are named may do everything, nobody may pull."""

    def __init__(self, users: Mapping[str, str], rights: Mapping[str, set[str]] | None = None) -> None:
        self.users = dict(users)
        self.rights = {"": {"pull"}, **{name: {"pull", "push", "delete"} for name in users}, **(rights or {})}
        self.scopes: list[str] = []

    def token(self, request: Request) -> Status:
        """The answer to a request for a token."""
        scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
        user = ""
        if scheme:
            user, _, password = b64decode(secret).decode().partition(":")
            if self.users.get(user) != password:
                return Status(401)
        granted: dict[str, list[str]] = {}
        for scope in parse_qs(urlsplit(request.path).query).get("scope", []):
            self.scopes.append(scope)
            _, repository, actions = scope.split(":")
            granted[repository] = sorted(set(actions.split(",")) & self.rights[user])
        token = b64encode(json.dumps(granted).encode()).decode()
        return Status(200, {"Content-Type": "application/json"}, json.dumps({"token": token}).encode())

    def refusal(self, request: Request, realm: str) -> Status | None:
        """The challenge to a request without a token that allows it."""
        path = urlsplit(request.path).path.removeprefix("/v2/")
        repository = next((path.split(f"/{part}/")[0] for part in _PARTS if f"/{part}/" in f"/{path}"), "")
        wanted = _ACTIONS.get(request.method, {"pull", "push"})
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        granted = json.loads(b64decode(token)).get(repository, []) if scheme == "Bearer" else []
        if wanted <= set(granted):
            return None
        scope = f"repository:{repository}:{','.join(sorted(wanted))}"
        problem = ',error="insufficient_scope"' if scheme else ""
        challenge = f'Bearer realm="{realm}",service="tests",scope="{scope}"{problem}'
        return Status(401, {"WWW-Authenticate": challenge}, b'{"errors": [{"code": "UNAUTHORIZED"}]}')


_PARTS = ("manifests", "blobs", "tags", "referrers")


class Front:
    """See the module; a context manager."""

    def __init__(
        self,
        backend: str,
        behaviour: Behaviour | None = None,
        tls: ssl.SSLContext | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        self.backend = backend
        self.behaviour = behaviour
        self.tokens = tokens
        self.tls = tls
        self.requests: list[Request] = []
        self.lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._http = _Http(("127.0.0.1", 0), _Handler)
        self._http.owner = self
        self.host = f"127.0.0.1:{self._http.server_address[1]}"
        self.url = f"{'https' if tls else 'http'}://{self.host}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), name="front")
        self._thread.start()

    def __enter__(self) -> "Front":
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.shutdown()
        with self.lock:
            sockets = list(self._sockets)
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._http.server_close()
        self._thread.join()

    def asked(self, *methods: str) -> list[str]:
        """`METHOD path` of the requests so far, of these methods (all when none is given), without their queries."""
        with self.lock:
            return [
                f"{one.method} {urlsplit(one.path).path}"
                for one in self.requests
                if not methods or one.method in methods
            ]

    def track(self, sock: socket.socket, is_open: bool) -> None:
        with self.lock:
            (self._sockets.add if is_open else self._sockets.discard)(sock)

    def record(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Request:
        with self.lock:
            request = Request(len(self.requests), method, path, headers, None, body[:1024])
            self.requests.append(request)
        return request

    def answer(self, request: Request) -> Status | Reset | None:
        """What is answered here; None: pass it on."""
        if self.tokens is not None:
            if urlsplit(request.path).path == "/token":
                return self.tokens.token(request)
            refusal = self.tokens.refusal(request, f"{self.url}/token")
            if refusal is not None:
                return refusal
        action = self.behaviour(request) if self.behaviour is not None else None
        assert action is None or isinstance(action, (Status, Reset)), action
        return action


class _Http(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True
    request_queue_size = 64
    owner: Front

    def get_request(self) -> tuple[socket.socket, Any]:
        sock, address = super().get_request()
        if self.owner.tls is not None:
            sock = self.owner.tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return sock, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
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
        action = owner.answer(request)
        if isinstance(action, Status):
            self._reply(action.status, action.headers.items(), action.body)
            return
        if isinstance(action, Reset) and action.after < 0:
            self._reset()
            return
        backend = http.client.HTTPConnection(owner.backend, timeout=60)
        with contextlib.closing(backend):
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
            backend.request(self.command, self.path, body if body or self.command in ("POST", "PUT") else None, headers)
            answer = backend.getresponse()
            data = answer.read()
        if isinstance(action, Reset):
            self._reset()
        else:
            self._reply(answer.status, answer.getheaders(), data)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = handle_one

    def _reply(self, status: int, headers: Any, body: bytes) -> None:
        self.send_response(status)
        length = str(len(body))
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            if name.lower() not in _HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.rfile.close()
        self.connection.close()
