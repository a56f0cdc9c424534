"""containerd as its clients see it: what it is, and which plugins it runs. Reads only.

Calls end within their time-out; errors come out as those of `snapshotter.errors`. Knows nothing of our own service.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from google.protobuf.empty_pb2 import Empty

from proto import introspection_pb2, introspection_pb2_grpc, version_pb2_grpc
from snapshotter.errors import Denied, SnapshotterError, Transient

__all__ = ["DEFAULT_ADDRESS", "Containerd", "Plugin"]

DEFAULT_ADDRESS = Path("/run/containerd/containerd.sock")

_SNAPSHOTTER = "io.containerd.snapshotter.v1"


@dataclass(frozen=True, slots=True)
class Plugin:
    """A snapshotter that containerd knows; `exports` of a proxy plugin hold the `address` of its socket, `problem` is
    why it is not in use (empty: it is)."""

    name: str
    exports: Mapping[str, str]
    capabilities: tuple[str, ...]
    problem: str


class Containerd:
    """One containerd, by its socket. Connects for each call."""

    def __init__(self, address: Path, timeout_s: float = 5.0) -> None:
        self._address = address
        self._timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"<Containerd {self._address}>"

    def version(self) -> str:
        """Its version, as it was built."""
        with self._channel() as channel:
            stub = version_pb2_grpc.VersionStub(channel)  # type: ignore[no-untyped-call]  # generated
            version: str = stub.Version(Empty(), timeout=self._timeout_s).version
            return version

    def snapshotters(self) -> list[Plugin]:
        """The snapshotters it was started with, whether they work or not."""
        request = introspection_pb2.PluginsRequest(filters=[f"type=={_SNAPSHOTTER}"])
        with self._channel() as channel:
            stub = introspection_pb2_grpc.IntrospectionStub(channel)  # type: ignore[no-untyped-call]  # generated
            answer = stub.Plugins(request, timeout=self._timeout_s)
        return [
            Plugin(found.id, dict(found.exports), tuple(found.capabilities), found.init_err.message)
            for found in answer.plugins
        ]

    @contextmanager
    def _channel(self) -> Iterator[grpc.Channel]:
        """A connection for one call; its errors as ours."""
        if not self._address.exists():
            raise Transient(f"{self._address}: there is no such socket")
        try:
            with grpc.insecure_channel(f"unix://{self._address}") as channel:
                yield channel
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                kind: type[SnapshotterError] = Denied if "ermission denied" in str(details) else Transient
                raise kind(f"{self._address}: {details}") from error
            raise SnapshotterError(f"{self._address}: {code.name}: {details}") from error
