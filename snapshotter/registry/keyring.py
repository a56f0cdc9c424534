"""Which credentials to show to an endpoint for a repository, and in which order.

First those that came with pulls of that repository, the newest first; then what Docker's `config.json` has for the
endpoint, or none at all. One that is refused is followed by the next: passed ones may have expired since.
"""

from collections.abc import Iterator

from snapshotter.registry.credentials import Credential, DockerConfig
from snapshotter.registry.endpoint import Endpoint
from snapshotter.registry.passed import PassedCredentials
from snapshotter.registry.reference import ImageRef

__all__ = ["Keyring"]


class Keyring:
    """All sources of credentials. Thread-safe."""

    def __init__(self, passed: PassedCredentials, config: DockerConfig) -> None:
        self._passed = passed
        self._config = config

    def __repr__(self) -> str:
        return f"<Keyring {self._passed!r} {self._config!r}>"

    def candidates(self, endpoint: Endpoint, image: ImageRef) -> Iterator[Credential | None]:
        """At least one; None means to come without. Asks a helper only when its turn comes, which may take 30 s."""
        yield from self._passed.lookup(endpoint, image)
        yield self._config.lookup(endpoint.host)

    def problem(self, host: str) -> str:
        """Why there may be no credentials for `host`, for an error message."""
        return self._config.problem(host)

    def shown(self, endpoint: Endpoint, image: ImageRef) -> str:
        """Which credentials the endpoint gets to see for the image's repository, for an error message."""
        users = [one.user or "a token" for one in self.candidates(endpoint, image) if one is not None]
        return f"shown were the credentials of {', '.join(map(repr, users))}" if users else self.problem(endpoint.host)

    def registries(self) -> set[str]:
        """The registries, host[:port], that are named by any source."""
        return self._passed.registries() | self._config.hosts()
