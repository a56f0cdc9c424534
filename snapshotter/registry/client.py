"""Registries as the daemon sees them: resolve an image, open its blobs.

Speaks the pull half of the registry protocol and nothing more: no ping, no HEAD before a GET, so that the first byte
costs as few round trips as possible (one when no token is needed). All requests to a host share its connections, so
that whoever is in a hurry finds one whose window has already grown.
"""

import hashlib
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from snapshotter.config import RegistryConfig
from snapshotter.errors import Denied, InvalidArgument, Transient
from snapshotter.model import Digest
from snapshotter.registry.answers import status_error
from snapshotter.registry.auth import Authenticator
from snapshotter.registry.blob import RegistryBlob
from snapshotter.registry.manifest import ACCEPT, Manifest, Platform, choose, host_platform, parse_manifest
from snapshotter.registry.reference import ImageRef, parse_digest, parse_reference
from snapshotter.registry.transport import Reply, Transport

__all__ = ["Registry"]

_MANIFEST_BYTES = 4 << 20  # what registries accept
_INDEX_DEPTH = 3


class Registry:
    """All registries, with the warm connections and tokens to them. Thread-safe; `close` when done."""

    def __init__(self, config: RegistryConfig) -> None:
        self._plain_http = frozenset(config.plain_http)
        self.transport = Transport(
            connections=config.connections_per_host,
            connect_timeout_s=config.connect_timeout_s,
            read_timeout_s=config.read_timeout_s,
        )
        self._auth = Authenticator(self.transport)
        self._blobs: WeakValueDictionary[tuple[str, str, Digest], RegistryBlob] = WeakValueDictionary()

    def __repr__(self) -> str:
        return f"<Registry {len(self._blobs)} blobs, {self.transport}>"

    def close(self) -> None:
        """Close the idle connections."""
        self.transport.close()

    def resolve(self, ref: str, platform: Platform | None = None) -> Manifest:
        """The manifest of `ref` for `platform` (this machine's by default), its bytes checked against its digest."""
        image = parse_reference(ref)
        wanted = platform or host_platform()
        target: str = image.target
        for _ in range(_INDEX_DEPTH):
            what = f"manifest {target} of {image.host}/{image.repository}"
            digest, body = self._manifest(image, target, what)
            parsed = parse_manifest(body, digest, what)
            if isinstance(parsed, Manifest):
                return parsed
            target = choose(parsed, wanted, what).digest
        raise InvalidArgument(f"{image}: image indexes nested deeper than {_INDEX_DEPTH}")

    def blob(self, image_ref: str, digest: str) -> RegistryBlob:
        """The blob `digest` in the repository of `image_ref`. Does no I/O; the same blob is the same object."""
        image = parse_reference(image_ref)
        key = (image.api_host, image.repository, parse_digest(digest))
        blob = self._blobs.get(key)
        if blob is None:
            blob = self._blobs[key] = RegistryBlob(self, image, key[2])
        return blob

    def open(self, method: str, image: ImageRef, path: str, headers: dict[str, str], what: str) -> Reply:
        """Ask `image`'s registry for `path` of its repository, with a token if it wants one.

        A 401 or 403 of the registry itself gets one fresh token, then Denied; any other status is the caller's.
        """
        host = image.api_host
        url = f"{self._scheme(host)}://{host}/v2/{image.repository}/{path}"
        header = self._auth.header(host, image.repository)
        for fresh in (False, True):
            reply = self.transport.open(method, url, headers, what, authorization=header)
            if reply.status not in (401, 403):
                return reply
            with reply:
                challenge = reply.headers.get("WWW-Authenticate", "")
                error = status_error(reply.status, reply.headers, reply.what)
            if fresh or reply.redirected:
                raise error
            try:
                header = self._auth.renew(host, image.repository, challenge, header)
            except Denied as exc:
                raise Denied(f"{error} ({exc})") from exc
        raise AssertionError("unreachable: the second round returns or raises")

    def _manifest(self, image: ImageRef, target: str, what: str) -> tuple[Digest, bytes]:
        with self.open("GET", image, f"manifests/{target}", {"Accept": ACCEPT}, what) as reply:
            if reply.status != 200:
                raise status_error(reply.status, reply.headers, reply.what)
            body = reply.read_all(_MANIFEST_BYTES)
        got = Digest(f"sha256:{hashlib.sha256(body).hexdigest()}")
        if target.startswith("sha256:") and got != target:
            raise Transient(f"{what}: what came has the digest {got}")
        return got, body

    def _scheme(self, host: str) -> str:
        name = urlsplit(f"//{host}").hostname or ""
        loopback = name in ("localhost", "::1") or name.startswith("127.")
        return "http" if loopback or host in self._plain_http or name in self._plain_http else "https"
