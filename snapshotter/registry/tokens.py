"""One token from a token server: the request that a Bearer challenge asks for, and the answer.

A password goes as basic authentication with a GET, an identity token as an OAuth2 form with a POST; without either the
GET is anonymous. Secrets are shown to the server that the challenge names and to nobody else, and never without TLS
unless the registry itself is spoken to like that. Keeps nothing.
"""

import json
from base64 import b64encode
from dataclasses import dataclass, field
from urllib.parse import urlencode, urlsplit

from snapshotter.errors import Denied, Transient
from snapshotter.registry.answers import status_error
from snapshotter.registry.challenge import Challenge
from snapshotter.registry.credentials import Credential
from snapshotter.registry.endpoint import Endpoint, is_loopback
from snapshotter.registry.transport import Reply, Transport

__all__ = ["Token", "basic", "fetch_token"]

_ANSWER_BYTES = 1 << 20
_DEFAULT_LIFE_S = 60.0  # what the protocol says when `expires_in` is missing
_MARGIN = 0.15  # share of a token's life at whose end it is no longer used: clocks and long requests
_CLIENT = "bootseer"
_FORM = "application/x-www-form-urlencoded"


@dataclass(frozen=True, slots=True)
class Token:
    """`header`: the value of Authorization. `life_s`: how long after the request it may be used. `refresh`: the
    identity token to show from now on, if the server has replaced it."""

    header: str = field(repr=False)
    life_s: float
    refresh: str = field(default="", repr=False)


def basic(credential: Credential) -> str:
    """The Authorization header of a user and password."""
    return f"Basic {b64encode(f'{credential.user}:{credential.password}'.encode()).decode()}"


def fetch_token(
    transport: Transport, endpoint: Endpoint, challenge: Challenge, scope: str, credential: Credential | None, what: str
) -> Token:
    """A token for `scope` (one or more, with blanks between), as `challenge` of `endpoint` asks. Denied when the token
    server refuses us or cannot be trusted with the credential."""
    realm = challenge.params.get("realm", "")
    _check_realm(realm, endpoint, credential, what)
    service = challenge.params.get("service", "")
    with _ask(transport, endpoint, realm, service, scope, credential, what) as reply:
        if reply.status != 200:
            raise _refusal(reply, credential)
        return _parse(reply.read_all(_ANSWER_BYTES), what)


def _check_realm(realm: str, endpoint: Endpoint, credential: Credential | None, what: str) -> None:
    try:
        parts = urlsplit(realm)
        scheme, host, _ = parts.scheme, parts.hostname, parts.port
    except ValueError:
        scheme, host = "", None
    if scheme not in ("http", "https") or not host:
        raise Denied(f"{what}: the challenge names no token server: realm {realm!r}")
    if credential is not None and scheme == "http" and endpoint.url.startswith("https:") and not is_loopback(host):
        raise Denied(f"{what}: the registry wants the credentials sent to {host} without TLS; they are not")


def _ask(
    transport: Transport,
    endpoint: Endpoint,
    realm: str,
    service: str,
    scope: str,
    credential: Credential | None,
    what: str,
) -> Reply:
    headers = {"Accept": "application/json"}
    # As containerd: what is configured for the host goes to its token server too, but a fixed Authorization does not.
    private = {name: value for name, value in endpoint.headers if name.lower() != "authorization"}
    if credential is not None and credential.identity_token:
        form = {
            "grant_type": "refresh_token",
            "service": service,
            "client_id": _CLIENT,
            "scope": scope,
            "refresh_token": credential.identity_token,
        }
        return transport.open(
            "POST",
            realm,
            {**headers, "Content-Type": _FORM},
            what,
            private=private,
            line=endpoint.line,
            body=urlencode(form).encode(),
        )
    if credential is not None:
        private["Authorization"] = basic(credential)
    query = ([("service", service)] if service else []) + [("scope", one) for one in scope.split()]
    url = f"{realm}{'&' if urlsplit(realm).query else '?'}{urlencode(query)}"
    return transport.open("GET", url, headers, what, private=private, line=endpoint.line)


def _refusal(reply: Reply, credential: Credential | None) -> Exception:
    """400 is how OAuth2 says that a refresh token is no longer valid."""
    if credential is not None and reply.status in (400, 401, 403):
        kind = "identity token" if credential.identity_token else f"password of {credential.user!r}"
        return Denied(f"{reply.what}: HTTP status {reply.status}: the {kind} is not accepted; log in again")
    return status_error(reply.status, reply.headers, reply.what)


def _parse(body: bytes, what: str) -> Token:
    try:
        answer = json.loads(body)
        text = answer.get("token") or answer.get("access_token")
        refresh = answer.get("refresh_token") or ""
        life_s = float(answer.get("expires_in") or _DEFAULT_LIFE_S)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as exc:
        raise Transient(f"{what}: the token server's answer is not the JSON it should be") from exc
    if not isinstance(text, str) or not text or not text.isprintable():
        raise Transient(f"{what}: the token server's answer holds no token")
    if not 0 <= life_s < float("inf"):
        life_s = _DEFAULT_LIFE_S
    return Token(f"Bearer {text}", life_s * (1 - _MARGIN), refresh if isinstance(refresh, str) else "")
