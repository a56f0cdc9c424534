"""Image references and digests, parsed where they enter: `[host[:port]/]repository[:tag][@digest]`.

Follows the rules of the Docker command line: no host means docker.io, a docker.io repository without a slash lies
below `library/`, neither tag nor digest means the tag `latest`. Knows nothing of HTTP. A value of ImageRef is always
valid: `parse_reference` is the only way in from text.
"""

import re
from dataclasses import dataclass

from snapshotter.errors import InvalidArgument
from snapshotter.model import Digest

__all__ = ["DOCKER", "DOCKER_API", "ImageRef", "parse_digest", "parse_reference", "parse_repository"]

DOCKER = "docker.io"
DOCKER_API = "registry-1.docker.io"
"""The host that speaks the registry protocol for `DOCKER`."""

_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ImageRef:
    """One image of one repository. `host` may carry a port; with a digest the tag is only a comment."""

    host: str
    repository: str
    tag: str | None
    digest: Digest | None

    @property
    def api_host(self) -> str:
        """The host[:port] that speaks the registry protocol for `host`."""
        return DOCKER_API if self.host == DOCKER else self.host

    @property
    def target(self) -> str:
        """What to ask the registry for: the digest where there is one, else the tag, else `latest`."""
        return self.digest or self.tag or "latest"

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"{self.host}/{self.repository}{tag}{digest}"


def parse_digest(text: str) -> Digest:
    """`text` as a Digest; InvalidArgument unless it is `sha256:` and 64 lower-case hexadecimal digits."""
    if not _DIGEST.fullmatch(text):
        raise InvalidArgument(f"{text!r} is not a digest: expected sha256: and 64 lower-case hexadecimal digits")
    return Digest(text)


def parse_reference(text: str) -> ImageRef:
    """`text` as an ImageRef with its defaults filled in; InvalidArgument says which part is wrong."""
    rest, at, digest_text = text.partition("@")
    digest = parse_digest(digest_text) if at else None
    host, rest = _split_host(rest)
    repository, colon, tag = rest.partition(":")
    if colon and not _TAG.fullmatch(tag):
        raise InvalidArgument(f"image reference {text!r}: {tag!r} is not a tag")
    if not _HOST.fullmatch(host):
        raise InvalidArgument(f"image reference {text!r}: {host!r} is not a host[:port]")
    if host in (DOCKER, "index.docker.io"):
        host = DOCKER
        repository = repository if "/" in repository else f"library/{repository}"
    if not _REPOSITORY.fullmatch(repository):
        hint = " (repositories are lower case)" if repository != repository.lower() else ""
        raise InvalidArgument(f"image reference {text!r}: {repository!r} is not a repository name{hint}")
    return ImageRef(host, repository, tag if colon else None, digest)


def parse_repository(text: str) -> ImageRef:
    """`HOST/REPOSITORY` as an ImageRef without tag and digest; InvalidArgument for anything else. The host has to be
    named: what is misspelt must not lead to some other registry."""
    ref = parse_reference(text)
    if _split_host(text)[1] == text or ref.tag or ref.digest:
        raise InvalidArgument(f"{text!r} is not a repository: expected HOST/REPOSITORY")
    return ref


def _split_host(text: str) -> tuple[str, str]:
    """The host and the rest of a reference without digest; a first component is a host only if it looks like one."""
    first, slash, rest = text.partition("/")
    looks_like_host = first == "localhost" or any(c in first for c in ".:[") or first != first.lower()
    return (first, rest) if slash and looks_like_host else (DOCKER, text)
