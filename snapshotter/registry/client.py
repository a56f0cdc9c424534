"""Registries as the daemon sees them: resolve an image, open its blobs.

Speaks the pull half of the registry protocol; `write` carries the other half, which is `push`'s. No ping, no HEAD
before a GET, so that the first byte costs as few round trips as possible (one when no token is needed). All requests to
a host share its connections, so that whoever is in a hurry finds one whose window has already grown. Where mirrors are
configured, one that fails is followed by the next; the registry itself, or the server in its place, is the last. What
is written goes to the registry itself, or to whom its hosts.toml names for that: nobody else is tried.
"""

import hashlib
from pathlib import Path
from weakref import WeakValueDictionary

from snapshotter.config import RegistryConfig
from snapshotter.errors import Denied, InvalidArgument, NotFound, Precondition, SnapshotterError, Transient
from snapshotter.model import Digest
from snapshotter.registry.answers import status_error
from snapshotter.registry.auth import PULL, PUSH, Authenticator
from snapshotter.registry.blob import RegistryBlob
from snapshotter.registry.credentials import DockerConfig, docker_config_path
from snapshotter.registry.endpoint import Endpoint
from snapshotter.registry.hosts import Hosts
from snapshotter.registry.keyring import Keyring
from snapshotter.registry.manifest import (
    ACCEPT,
    Document,
    Manifest,
    Platform,
    choose,
    document_type,
    host_platform,
    parse_manifest,
)
from snapshotter.registry.passed import PassedCredentials
from snapshotter.registry.reference import ImageRef, parse_digest, parse_reference
from snapshotter.registry.standing import Standing
from snapshotter.registry.transport import Reply, Transport, Upload, origin

__all__ = ["Registry"]

_MANIFEST_BYTES = 4 << 20  # what registries accept
_INDEX_DEPTH = 3
_ATTEMPTS = 8  # more than there are credentials; other threads may bring headers too, but not for ever


class Registry:
    """All registries, with the warm connections and tokens to them. Thread-safe; `close` when done."""

    def __init__(self, config: RegistryConfig, passed: PassedCredentials | None = None) -> None:
        """`passed`: credentials that come with pulls, beside those of the configuration."""
        self._hosts = Hosts(Path(config.hosts_dir) if config.hosts_dir else None, frozenset(config.plain_http))
        self._standing = Standing()
        self.transport = Transport(
            connections=config.connections_per_host,
            connect_timeout_s=config.connect_timeout_s,
            read_timeout_s=config.read_timeout_s,
        )
        docker_config = DockerConfig(docker_config_path(config.docker_config))
        self._keyring = Keyring(passed or PassedCredentials(), docker_config)
        self._auth = Authenticator(self.transport, self._keyring)
        self._blobs: WeakValueDictionary[tuple[str, str, Digest], RegistryBlob] = WeakValueDictionary()

    def __repr__(self) -> str:
        return f"<Registry {len(self._blobs)} blobs, {self.transport}>"

    def close(self) -> None:
        """Close the idle connections."""
        self.transport.close()

    def named(self) -> set[str]:
        """The registries, host[:port], that configuration and credentials name."""
        return self._hosts.named() | self._keyring.registries()

    def resolve(self, ref: str, platform: Platform | None = None) -> Manifest:
        """The manifest of `ref` for `platform` (this machine's by default), its bytes checked against its digest."""
        return self.documents(ref, platform)[0]

    def documents(self, ref: str, platform: Platform | None = None) -> tuple[Manifest, tuple[Document, ...]]:
        """The same, with the documents as they came: the image index that `ref` names, if it is one, those below it
        that lead to the manifest, and the manifest's own last."""
        image = parse_reference(ref)
        wanted = platform or host_platform()
        target: str = image.target
        came: list[Document] = []
        for _ in range(_INDEX_DEPTH):
            what = f"manifest {target} of {image.host}/{image.repository}"
            digest, body = self._manifest(image, target, what)
            parsed = parse_manifest(body, digest, what)
            came.append(Document(document_type(body), digest, body))
            if isinstance(parsed, Manifest):
                return parsed, tuple(came)
            target = choose(parsed, wanted, what).digest
        raise InvalidArgument(f"{image}: image indexes nested deeper than {_INDEX_DEPTH}")

    def document(self, ref: str, digest: Digest | None = None) -> Document:
        """The manifest or image index that `ref` names, or with `digest` another of its repository, as it came."""
        image = parse_reference(ref)
        target = digest or image.target
        what = f"manifest {target} of {image.host}/{image.repository}"
        got, body = self._manifest(image, target, what)
        try:
            return Document(document_type(body), got, body)
        except (ValueError, RecursionError, AttributeError) as exc:
            raise InvalidArgument(f"{what}: neither a manifest nor an image index") from exc

    def blob(self, image_ref: str, digest: str) -> RegistryBlob:
        """The blob `digest` in the repository of `image_ref`. Does no I/O; the same blob is the same object."""
        image = parse_reference(image_ref)
        key = (image.host, image.repository, parse_digest(digest))
        blob = self._blobs.get(key)
        if blob is None:
            blob = self._blobs[key] = RegistryBlob(self, image, key[2])
        return blob

    def open(
        self, method: str, image: ImageRef, path: str, headers: dict[str, str], what: str, *, optional: bool = False
    ) -> tuple[Reply, Endpoint]:
        """Ask for `path` of `image`'s repository, in turn those who may have it, each with a token if it wants one;
        who answered comes with the answer.

        A 401 or 403 of an endpoint itself gets one fresh token, then Denied. Any other status of a lone endpoint is the
        caller's; of several endpoints the first good answer is given, else the failures are raised as one. What is
        `optional` need not be there: an endpoint without it is asked first for other things all the same.
        """
        by_digest = path.rpartition("/")[2].startswith("sha256:")
        able = self._able(image, by_digest)
        if not able:
            raise NotFound(
                f"{what}: no host is configured that may be asked for {'contents' if by_digest else 'a tag'}"
            )
        if len(able) == 1:
            return self._get(able[0], method, image, path, headers, what), able[0]
        failures: dict[str, SnapshotterError] = {}
        for endpoint in self._standing.order(able, f"{image.host}/{image.repository}"):
            try:
                reply = self._get(endpoint, method, image, path, headers, what)
                if reply.status < 400 or reply.status == 416:
                    return reply, endpoint
                with reply:
                    error = status_error(reply.status, reply.headers, reply.what)
            except SnapshotterError as exc:
                error = exc
            failures[endpoint.url] = error
            # Many refuse a HEAD and serve the GET.
            if isinstance(error, Transient) or not (optional or method == "HEAD"):
                self.blame(endpoint, image, error)
        raise _verdict([failures[one.url] for one in able])

    def write(
        self,
        method: str,
        image: ImageRef,
        path: str,
        headers: dict[str, str],
        what: str,
        body: bytes | Upload | None = None,
        actions: str = PUSH,
    ) -> tuple[Reply, Endpoint]:
        """One request to whom the image's repository is written at. `path` is a path in the repository, or the whole
        URL that an answer gave for going on; at another origin that gets no credentials.

        Denied says which credentials were shown; any other status is the caller's.
        """
        able = [one for one in self._hosts.endpoints(image.host) if one.pushes]
        if not able:
            raise Precondition(f"{what}: the hosts.toml of {image.host} names no host that may be pushed to")
        endpoint = able[0]
        url = path if "://" in path else endpoint.address(image.host, image.repository, path)
        if origin(url) != origin(endpoint.url):
            return self.transport.open(method, url, headers, what, line=endpoint.line, body=body), endpoint
        try:
            return self._ask(endpoint, method, image, url, headers, what, body, actions), endpoint
        except Denied as exc:
            raise Denied(f"{exc}; writing needs the right to it: {self._keyring.shown(endpoint, image)}") from exc

    def blame(self, endpoint: Endpoint, image: ImageRef, error: SnapshotterError) -> None:
        """`endpoint` has failed `image`, perhaps in the middle of an answer: ask others before it, for a while."""
        self._standing.failed(endpoint, f"{image.host}/{image.repository}", error)

    def expect(self, image_ref: str, requests: int) -> None:
        """So many requests for contents of the image's repository are about to be made at once: where its host is far,
        the connections are opened beside what is asked before. Never raises, waits for nothing."""
        try:
            endpoint = self._first(parse_reference(image_ref))
        except SnapshotterError:
            return
        if endpoint is not None:
            self.transport.expect(endpoint.url, requests, endpoint.line)

    def round_trip_s(self, image: ImageRef) -> float:
        """The round trip to who is asked first for contents of the repository, in seconds; 0.0 while that is not
        known."""
        endpoint = self._first(image)
        return 0.0 if endpoint is None else self.transport.round_trip_s(endpoint.url)

    def _first(self, image: ImageRef) -> Endpoint | None:
        """Who would be asked first for contents."""
        able = self._able(image, by_digest=True)
        return next(iter(self._standing.order(able, f"{image.host}/{image.repository}")), None)

    def _able(self, image: ImageRef, by_digest: bool) -> list[Endpoint]:
        """Who may be asked for contents by digest, or for what a tag means, in the configured order."""
        configured = self._hosts.endpoints(image.host)
        return [one for one in configured if (one.pulls if by_digest else one.resolves)]

    def _get(
        self, endpoint: Endpoint, method: str, image: ImageRef, path: str, headers: dict[str, str], what: str
    ) -> Reply:
        url = endpoint.address(image.host, image.repository, path)
        return self._ask(endpoint, method, image, url, headers, what)

    def _ask(
        self,
        endpoint: Endpoint,
        method: str,
        image: ImageRef,
        url: str,
        headers: dict[str, str],
        what: str,
        body: bytes | Upload | None = None,
        actions: str = PULL,
    ) -> Reply:
        """Ask one endpoint; a refusal gets one fresh token, of each credential that there is."""
        header = self._auth.header(endpoint, image, actions)
        for attempt in range(_ATTEMPTS):
            private = dict(endpoint.headers)
            if header is not None:
                private = {name: value for name, value in private.items() if name.lower() != "authorization"}
                private["Authorization"] = header
            reply = self.transport.open(method, url, headers, what, private=private, line=endpoint.line, body=body)
            if reply.status not in (401, 403):
                return reply
            with reply:
                challenge = reply.headers.get("WWW-Authenticate", "")
                error = status_error(reply.status, reply.headers, reply.what)
            if reply.redirected:
                raise error
            try:
                header = self._auth.renew(endpoint, image, challenge, header, attempt, actions)
            except Denied as exc:
                if attempt:
                    raise error from exc
                raise Denied(f"{error} ({exc})") from exc
        raise error

    def _manifest(self, image: ImageRef, target: str, what: str) -> tuple[Digest, bytes]:
        reply, endpoint = self.open("GET", image, f"manifests/{target}", {"Accept": ACCEPT}, what)
        with reply:
            if reply.status != 200:
                raise status_error(reply.status, reply.headers, reply.what)
            body = reply.read_all(_MANIFEST_BYTES)
        got = Digest(f"sha256:{hashlib.sha256(body).hexdigest()}")
        if target.startswith("sha256:") and got != target:
            error = Transient(f"{reply.what}: what came has the digest {got}")
            self.blame(endpoint, image, error)
            raise error
        return got, body


def _verdict(failures: list[SnapshotterError]) -> SnapshotterError:
    """What it means that all endpoints failed, given in the configured order: what the last says, who is nearest to
    the origin; but worth a retry if that holds for one of them."""
    last = failures[-1]
    text = f"{last}; before that: {'; '.join(map(str, failures[:-1]))}"
    passing = [error for error in failures if isinstance(error, Transient)]
    if passing:
        return Transient(text, min(error.retry_after_s or 0.0 for error in passing) or None)
    return type(last)(text)
