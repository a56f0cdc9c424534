"""A small true HTTP server of blobs that can misbehave, for every test that reads from a registry.

    with RangeServer({"/v2/app/blobs/sha256:…": data}, behaviour) as server:
        … server.url, server.host; then look at server.requests and server.connections

`behaviour(request)` is asked for each request and returns an action of `scripts.rig.faults`, or None for the right
answer: single-range GET and HEAD of `blobs` (path -> bytes), 416 beyond the end, 404 for other paths. `in_order` makes
a behaviour out of a list. A POST gets what a GET would, its body is in the request.
"""

import ssl
import threading
from collections.abc import Iterable, Mapping
from urllib.parse import parse_qs, urlsplit

from scripts.rig.faults import (
    Action,
    Answer,
    Behaviour,
    Drip,
    Falsify,
    FaultyServer,
    Hold,
    IgnoreRange,
    Lose,
    Range,
    Request,
    Reset,
    ShortRange,
    Status,
    Truncate,
    WrongRange,
    redirect,
)

__all__ = [
    "Action",
    "Behaviour",
    "Drip",
    "Falsify",
    "Hold",
    "IgnoreRange",
    "Lose",
    "RangeServer",
    "Request",
    "Reset",
    "ShortRange",
    "Status",
    "TokenGate",
    "Truncate",
    "WrongRange",
    "in_order",
    "redirect",
]


def in_order(actions: Iterable[Action | None]) -> Behaviour:
    """The n-th request meets the n-th action, later ones the right answer."""
    left = iter(actions)
    lock = threading.Lock()

    def behaviour(request: Request) -> Action | None:
        with lock:
            return next(left, None)

    return behaviour


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


class RangeServer(FaultyServer):
    """See the module. `blobs` may be changed while it runs."""

    def __init__(
        self, blobs: Mapping[str, bytes], behaviour: Behaviour | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self.blobs = dict(blobs)
        self.behaviour = behaviour
        super().__init__(tls=tls)

    def ranges(self) -> list[Range | None]:
        """The ranges of all GET requests so far."""
        return [request.range for request in self.requests if request.method == "GET"]

    def action(self, request: Request) -> Action | None:
        return self.behaviour(request) if self.behaviour is not None else None

    def knows(self, request: Request) -> bool:
        return urlsplit(request.path).path in self.blobs

    def right(self, request: Request, asked: Range | None) -> Answer:
        blob = self.blobs.get(urlsplit(request.path).path)
        if blob is None:
            return Answer(404, body=b"not here")
        if asked is None:
            return Answer(200, [("Content-Type", "application/octet-stream")], blob)
        start, end = asked[0], len(blob) if asked[1] is None else min(asked[1], len(blob))
        if start >= len(blob):
            return Answer(416, [("Content-Range", f"bytes */{len(blob)}")])
        return Answer(206, [("Content-Range", f"bytes {start}-{end - 1}/{len(blob)}")], blob[start:end])
