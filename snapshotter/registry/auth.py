"""Authorization for one or many registries: the anonymous half of the registry token protocol.

A registry answers 401 with a challenge that names a token server; a token for one repository is fetched there and
kept until shortly before it expires. Credentials (basic authentication, Docker's config file) are not used yet; they
enter here and nowhere else: the rest of the package only sees `header` and `renew`.

Shared state: `_lock` guards the tables and is never held over the network. One fetch runs per (host, repository); who
comes meanwhile waits for its outcome, good or bad, so that an expired token never causes a burst of requests.
"""

import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from urllib.parse import urlencode, urlsplit

from snapshotter.errors import Denied, SnapshotterError, Transient
from snapshotter.registry.answers import status_error
from snapshotter.registry.transport import Transport

__all__ = ["Authenticator", "Challenge", "parse_challenges"]

_TOKEN_ANSWER_BYTES = 1 << 20
_DEFAULT_LIFE_S = 60.0  # what the protocol says when `expires_in` is missing
_MARGIN = 0.15  # share of a token's life at whose end it is no longer used: clocks and long requests
_AUTH_PARAM = re.compile(r'([A-Za-z0-9_.-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))')
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9._-]*)(?=\s|,|$)")


@dataclass(frozen=True, slots=True)
class Challenge:
    """One challenge of a WWW-Authenticate header; `scheme` and the parameters' names are lower case."""

    scheme: str
    params: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Token:
    header: str
    until: float


def parse_challenges(text: str) -> list[Challenge]:
    """The challenges of a WWW-Authenticate header, commas and quotes minded; unreadable parts are skipped."""
    challenges: list[Challenge] = []
    at = 0
    while at < len(text):
        if text[at] in " \t,":
            at += 1
        elif (param := _AUTH_PARAM.match(text, at)) and challenges:
            quoted, plain = param[2], param[3]
            value = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else plain
            challenges[-1].params.setdefault(param[1].lower(), value)
            at = param.end()
        elif scheme := _SCHEME.match(text, at):
            challenges.append(Challenge(scheme[1].lower(), {}))
            at = scheme.end()
        else:
            at += 1
    return challenges


class Authenticator:
    """Hands out Authorization headers. Thread-safe."""

    def __init__(self, transport: Transport, clock: Callable[[], float] = time.monotonic) -> None:
        self._transport = transport
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens: dict[tuple[str, str], _Token] = {}
        self._known: dict[str, Challenge] = {}  # a host's last challenge: saves the 401 for its next repository
        self._flights: dict[tuple[str, str], Future[str]] = {}

    def __repr__(self) -> str:
        return f"<Authenticator {len(self._tokens)} tokens, {len(self._flights)} being fetched>"

    def header(self, host: str, repository: str) -> str | None:
        """What to send with a first request: a valid token, fetched if the host is known to want one, else None."""
        with self._lock:
            token = self._tokens.get((host, repository))
            if token is not None and token.until > self._clock():
                return token.header
            known = self._known.get(host)
        return None if known is None else self._fetch_once(host, repository, known, fresh_scope=True)

    def renew(self, host: str, repository: str, www_authenticate: str, refused: str | None) -> str:
        """A header other than `refused`, after a 401 or 403 with this challenge (maybe empty). Denied when the
        registry offers no way that we can go; Transient when the token server cannot be asked now."""
        bearer = next((c for c in parse_challenges(www_authenticate) if c.scheme == "bearer"), None)
        with self._lock:
            if bearer is not None:
                self._known[host] = bearer
            token = self._tokens.get((host, repository))
            if token is not None and token.header != refused and token.until > self._clock():
                return token.header  # another thread was faster
            self._tokens.pop((host, repository), None)
            challenge = bearer or self._known.get(host)
        if challenge is None:
            raise Denied(f"{host}/{repository}: the registry refuses anonymous access and offers no token server")
        return self._fetch_once(host, repository, challenge, fresh_scope=bearer is None)

    def _fetch_once(self, host: str, repository: str, challenge: Challenge, fresh_scope: bool) -> str:
        """One fetch per (host, repository) at a time; the others get its result or its error."""
        key = (host, repository)
        with self._lock:
            flight = self._flights.get(key)
            mine = flight is None
            if flight is None:
                flight = self._flights[key] = Future()
        if not mine:
            return flight.result()
        try:
            token = self._fetch(host, repository, challenge, fresh_scope)
        except BaseException as exc:
            with self._lock:
                del self._flights[key]
            flight.set_exception(exc if isinstance(exc, SnapshotterError) else Transient(f"{host}: {exc}"))
            raise
        with self._lock:
            self._tokens[key] = token
            del self._flights[key]
        flight.set_result(token.header)
        return token.header

    def _fetch(self, host: str, repository: str, challenge: Challenge, fresh_scope: bool) -> _Token:
        realm = challenge.params.get("realm", "")
        if urlsplit(realm).scheme not in ("http", "https"):
            raise Denied(f"{host}: the challenge names no token server: realm {realm!r}")
        default = f"repository:{repository}:pull"
        scope = default if fresh_scope else challenge.params.get("scope") or default
        query = {"scope": scope}
        if service := challenge.params.get("service"):
            query = {"service": service, **query}
        what = f"token for {host}/{repository}"
        url = f"{realm}{'&' if urlsplit(realm).query else '?'}{urlencode(query)}"
        asked = self._clock()
        with self._transport.open("GET", url, {"Accept": "application/json"}, what) as reply:
            if reply.status != 200:
                raise status_error(reply.status, reply.headers, what)
            return _parse_token(reply.read_all(_TOKEN_ANSWER_BYTES), asked, what)


def _parse_token(body: bytes, asked: float, what: str) -> _Token:
    try:
        answer = json.loads(body)
        text = answer.get("token") or answer.get("access_token")
        life = float(answer.get("expires_in") or _DEFAULT_LIFE_S)
    except (ValueError, TypeError, AttributeError) as exc:
        raise Transient(f"{what}: the token server's answer is not the JSON it should be") from exc
    if not isinstance(text, str) or not text or not text.isprintable():
        raise Transient(f"{what}: the token server's answer holds no token")
    return _Token(f"Bearer {text}", asked + life * (1 - _MARGIN))
