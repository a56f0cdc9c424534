"""What stands before a registry: a proxy with TLS, with tokens, with faults. It passes on what it does not answer.

`behaviour(request)` is asked for each request that has the right token and gives an action of `scripts.rig.faults`, or
None to pass it on. `requests` holds all that came, without their bodies but for 1 KiB.
"""

import json
import ssl
from base64 import b64decode, b64encode
from collections.abc import Mapping
from urllib.parse import parse_qs, urlsplit

from scripts.rig.faults import Action, Answer, Behaviour, FaultyServer, Range, Request, Status, ask

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


class Front(FaultyServer):
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
        super().__init__(tls=tls, kept=1024)

    def asked(self, *methods: str) -> list[str]:
        """`METHOD path` of the requests so far, of these methods (all when none is given), without their queries."""
        with self.lock:
            return [
                f"{one.method} {urlsplit(one.path).path}"
                for one in self.requests
                if not methods or one.method in methods
            ]

    def action(self, request: Request) -> Action | None:
        if self.tokens is not None:
            if urlsplit(request.path).path == "/token":
                return self.tokens.token(request)
            refusal = self.tokens.refusal(request, f"{self.url}/token")
            if refusal is not None:
                return refusal
        return self.behaviour(request) if self.behaviour is not None else None

    def right(self, request: Request, asked: Range | None) -> Answer:
        return ask(self.backend, request, asked)
