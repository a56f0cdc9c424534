"""Authorization for all endpoints: which header a request carries, and what to do when it is refused.

An endpoint refuses with a challenge. Basic: the user and password are shown to it. Bearer: a token for one repository
and for what is to be done there (PULL, PUSH, DELETE) is fetched from the server that the challenge names, and kept
until shortly before it expires. Credentials are looked up anew for each token, so that a login takes effect with the
next one; where there are several, one that is refused is followed by the next. The rest of the package only sees
`header` and `renew`.

Shared state: `_lock` guards the tables and is never held over the network. One fetch runs per (endpoint, repository,
actions); who comes meanwhile waits for its outcome, good or bad, so that an expired token never causes a burst of
requests.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import islice

from snapshotter.errors import Denied, SnapshotterError, Transient
from snapshotter.registry.challenge import Challenge, parse_challenges
from snapshotter.registry.credentials import Credential
from snapshotter.registry.endpoint import Endpoint
from snapshotter.registry.keyring import Keyring
from snapshotter.registry.reference import ImageRef
from snapshotter.registry.tokens import Token, basic, fetch_token
from snapshotter.registry.transport import Transport

__all__ = ["DELETE", "PULL", "PUSH", "Authenticator"]

PULL, PUSH, DELETE = "pull", "pull,push", "delete"
"""Actions, as the scope of a token names them."""

_Key = tuple[str, str, str, str]
"""Endpoint, registry, repository, actions: one mirror may serve a repository of the same name for two registries."""


@dataclass(frozen=True, slots=True)
class _Grant:
    """A header that worked or should work, until this time."""

    header: str = field(repr=False)
    until: float


class Authenticator:
    """Hands out Authorization headers. Thread-safe."""

    def __init__(self, transport: Transport, keyring: Keyring, clock: Callable[[], float] = time.monotonic) -> None:
        self._transport = transport
        self._keyring = keyring
        self._clock = clock
        self._lock = threading.Lock()
        self._grants: dict[_Key, _Grant] = {}
        self._known: dict[str, Challenge] = {}  # an endpoint's last challenge: saves the 401 for its next repository
        self._replaced: dict[tuple[str, str], str] = {}  # (endpoint, identity token of the file) -> the one it became
        self._flights: dict[tuple[_Key, int], Future[str]] = {}

    def __repr__(self) -> str:
        return f"<Authenticator {len(self._grants)} tokens, {len(self._flights)} being fetched>"

    def header(self, endpoint: Endpoint, image: ImageRef, actions: str = PULL) -> str | None:
        """What to send with a first request for `actions` in the image's repository: a valid header, fetched if the
        endpoint is known to want one, else None."""
        with self._lock:
            grant = self._grants.get(_key(endpoint, image, actions))
            if grant is not None and grant.until > self._clock():
                return grant.header
            known = self._known.get(endpoint.url)
        return None if known is None else self._fetch_once(endpoint, image, actions, known, None, 0, True)

    def renew(
        self,
        endpoint: Endpoint,
        image: ImageRef,
        www_authenticate: str,
        refused: str | None,
        attempt: int = 0,
        actions: str = PULL,
    ) -> str:
        """A header other than `refused`, after a 401 or 403 with this challenge (maybe empty). `attempt` counts the
        headers that this very request got here and that were refused too: as many credentials are passed over. Denied
        when there is no (further) way that we can go; Transient when the token server cannot be asked now."""
        key = _key(endpoint, image, actions)
        offered = {challenge.scheme: challenge for challenge in reversed(parse_challenges(www_authenticate))}
        challenge = offered.get("bearer") or offered.get("basic")
        with self._lock:
            if challenge is not None:
                self._known[endpoint.url] = challenge
            grant = self._grants.get(key)
            if grant is not None and grant.header != refused and grant.until > self._clock():
                return grant.header  # another thread was faster
            self._grants.pop(key, None)
            fresh_scope = challenge is None
            challenge = challenge or self._known.get(endpoint.url)
        if challenge is None:
            raise Denied(f"{_name(endpoint, image)}: the registry refuses us and does not say what it wants")
        return self._fetch_once(endpoint, image, actions, challenge, refused, attempt, fresh_scope)

    def _fetch_once(
        self,
        endpoint: Endpoint,
        image: ImageRef,
        actions: str,
        challenge: Challenge,
        refused: str | None,
        attempt: int,
        fresh_scope: bool,
    ) -> str:
        """One fetch per key and attempt at a time; the others get its result or its error."""
        key = _key(endpoint, image, actions)
        with self._lock:
            flight = self._flights.get((key, attempt))
            mine = flight is None
            if flight is None:
                flight = self._flights[key, attempt] = Future()
        if not mine:
            return flight.result()
        try:
            scope = _scope(challenge, image, actions, fresh_scope)
            grant = self._grant(endpoint, image, challenge, refused, attempt, scope)
        except BaseException as exc:
            with self._lock:
                del self._flights[key, attempt]
            known = isinstance(exc, SnapshotterError)
            flight.set_exception(exc if known else Transient(f"{endpoint.host}: {type(exc).__name__}"))
            raise
        with self._lock:
            self._grants[key] = grant
            del self._flights[key, attempt]
        flight.set_result(grant.header)
        return grant.header

    def _grant(
        self,
        endpoint: Endpoint,
        image: ImageRef,
        challenge: Challenge,
        refused: str | None,
        attempt: int,
        scope: str,
    ) -> _Grant:
        """By the first credential that gets one; the first refusal where none does."""
        refusals: list[Denied] = []
        for credential in islice(self._keyring.candidates(endpoint, image), attempt, None):
            try:
                if challenge.scheme == "basic":
                    return self._basic(endpoint, image, credential, refused)
                return self._bearer(endpoint, image, challenge, credential, refused, scope)
            except Denied as exc:
                refusals.append(exc)
        raise refusals[0] if refusals else Denied(f"{_name(endpoint, image)}: there are no other credentials for it")

    def _basic(self, endpoint: Endpoint, image: ImageRef, credential: Credential | None, refused: str | None) -> _Grant:
        what = _name(endpoint, image)
        if credential is None or not credential.password:
            problem = self._keyring.problem(endpoint.host)
            raise Denied(f"{what}: the registry wants a user and password; {problem}")
        header = basic(credential)
        if header == refused:
            raise Denied(f"{what}: the registry does not accept the password of {credential.user!r}")
        return _Grant(header, float("inf"))

    def _bearer(
        self,
        endpoint: Endpoint,
        image: ImageRef,
        challenge: Challenge,
        credential: Credential | None,
        refused: str | None,
        scope: str,
    ) -> _Grant:
        if credential is not None and credential.registry_token:
            header = f"Bearer {credential.registry_token}"
            if header == refused:
                raise Denied(
                    f"{_name(endpoint, image)}: the registry does not accept the token that came with the pull"
                )
            return _Grant(header, float("inf"))
        asked = self._clock()
        token = self._token(endpoint, challenge, scope, credential, f"token for {_name(endpoint, image)}")
        return _Grant(token.header, asked + token.life_s)

    def _token(
        self, endpoint: Endpoint, challenge: Challenge, scope: str, credential: Credential | None, what: str
    ) -> Token:
        """A token; minds that a token server may replace the identity token with each use."""
        if credential is None or not credential.identity_token:
            return fetch_token(self._transport, endpoint, challenge, scope, credential, what)
        key = (endpoint.url, credential.identity_token)
        with self._lock:
            replaced = self._replaced.get(key)
        if replaced is not None:
            try:
                return self._use_identity(key, endpoint, challenge, scope, Credential(identity_token=replaced), what)
            except Denied:
                with self._lock:
                    self._replaced.pop(key, None)  # perhaps the one in the file is still good
        return self._use_identity(key, endpoint, challenge, scope, credential, what)

    def _use_identity(
        self,
        key: tuple[str, str],
        endpoint: Endpoint,
        challenge: Challenge,
        scope: str,
        credential: Credential,
        what: str,
    ) -> Token:
        token = fetch_token(self._transport, endpoint, challenge, scope, credential, what)
        if token.refresh and token.refresh != credential.identity_token:
            with self._lock:
                self._replaced[key] = token.refresh
        return replace(token, refresh="")


def _key(endpoint: Endpoint, image: ImageRef, actions: str) -> _Key:
    return endpoint.url, image.host, image.repository, actions


def _scope(challenge: Challenge, image: ImageRef, actions: str, fresh: bool) -> str:
    """What a token is asked for. A challenge's own scope is taken as it is, unless it is `fresh` (of another request);
    but a challenge for less than is to be done, as of a request to look first, would cost a second token."""
    own = f"repository:{image.repository}:{actions}"
    asked = [] if fresh else challenge.params.get("scope", "").split()
    if not asked or (actions == PULL):
        return " ".join(asked) or own
    less = f"repository:{image.repository}:pull"
    kept = [one for one in asked if one != less]
    return " ".join(kept if any(_covers(one, own) for one in kept) else [own, *kept])


def _covers(scope: str, own: str) -> bool:
    """Whether `scope` grants all actions of `own` to the same resource."""
    resource, _, granted = scope.rpartition(":")
    wanted_resource, _, wanted = own.rpartition(":")
    return resource == wanted_resource and (granted == "*" or set(wanted.split(",")) <= set(granted.split(",")))


def _name(endpoint: Endpoint, image: ImageRef) -> str:
    return f"{endpoint.host}/{image.repository}"
