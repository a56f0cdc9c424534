"""What a PullImage request of CRI says: the image, and the credentials that came with it. Sans-IO.

Which of several kinds of credentials counts is containerd's rule: user and password, else identity token, else `auth`;
and, what containerd has no use for, a registry token last.
"""

from base64 import b64decode
from dataclasses import dataclass
from urllib.parse import urlsplit

from google.protobuf.message import DecodeError

from proto import cri_pb2
from snapshotter.errors import InvalidArgument
from snapshotter.registry.credentials import Credential
from snapshotter.registry.passed import Passed
from snapshotter.registry.reference import ImageRef, parse_reference

__all__ = ["PullRequest", "parse_pull"]


@dataclass(frozen=True, slots=True)
class PullRequest:
    """`text` is the image as it was asked for; `passed` None: no (understandable) credentials came."""

    text: str
    image: ImageRef
    passed: Passed | None


def parse_pull(request: bytes) -> PullRequest | None:
    """The request, or None when it is none that we understand: containerd will say what is wrong with it."""
    try:
        message = cri_pb2.PullImageRequest.FromString(request)
        image = parse_reference(message.image.image)
    except (DecodeError, InvalidArgument):
        return None
    credential = _credential(message.auth)
    passed = None if credential is None else Passed(credential, _host(message.auth.server_address))
    return PullRequest(message.image.image, image, passed)


def _credential(auth: cri_pb2.AuthConfig) -> Credential | None:
    if auth.username:
        return Credential(auth.username, auth.password)
    if auth.identity_token:
        return Credential(identity_token=auth.identity_token)
    if auth.auth:
        try:
            user, colon, password = b64decode(auth.auth, validate=True).decode().partition(":")
        except ValueError:
            return None
        return Credential(user, password.strip("\0")) if colon else None
    return Credential(registry_token=auth.registry_token) if auth.registry_token else None


def _host(address: str) -> str:
    """host[:port] of a server's address, which may be a URL."""
    try:
        return urlsplit(address if "//" in address else f"//{address}").netloc.rpartition("@")[2]
    except ValueError:
        return address  # of no host, so the credentials are for nobody
