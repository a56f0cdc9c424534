"""containerd as its clients see it: what it is, its snapshotters, its content, its images.

Calls end within their time-out; errors come out as those of `snapshotter.errors`. Knows nothing of our own service, nor
of what an image is: callers say which blobs refer to which (labels) and in which order things are made.
"""

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.field_mask_pb2 import FieldMask

from proto import (
    content_pb2,
    content_pb2_grpc,
    images_pb2,
    images_pb2_grpc,
    introspection_pb2,
    introspection_pb2_grpc,
    leases_pb2,
    leases_pb2_grpc,
    snapshots_pb2,
    snapshots_pb2_grpc,
    version_pb2_grpc,
)
from snapshotter.errors import AlreadyExists, Denied, InvalidArgument, NotFound, SnapshotterError, Transient
from snapshotter.model import Digest

__all__ = ["DEFAULT_ADDRESS", "Blob", "Containerd", "Content", "Plugin", "Session"]

DEFAULT_ADDRESS = Path("/run/containerd/containerd.sock")

_SNAPSHOTTER = "io.containerd.snapshotter.v1"
_ANSWER_S = 60.0
_LEASE_S = 24 * 3600  # what a killed client's lease protects for; containerd's own clients use the same
_CODES: Mapping[grpc.StatusCode, type[SnapshotterError]] = {
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.UNAVAILABLE: Transient,
    grpc.StatusCode.DEADLINE_EXCEEDED: Transient,
    grpc.StatusCode.PERMISSION_DENIED: Denied,
}


@dataclass(frozen=True, slots=True)
class Plugin:
    """A snapshotter that containerd knows; `exports` of a proxy plugin hold the `address` of its socket, `problem` is
    why it is not in use (empty: it is)."""

    name: str
    exports: Mapping[str, str]
    capabilities: tuple[str, ...]
    problem: str


@dataclass(frozen=True, slots=True)
class Blob:
    """A blob of the content store; `updated_ns` since 1970, of its labels."""

    digest: Digest
    size: int
    updated_ns: int
    labels: Mapping[str, str]


class Containerd:
    """One containerd, by its socket. Connects for each call, and for each session."""

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
    def session(self, namespace: str) -> Iterator["Session"]:
        """Work in a namespace under a lease: what is made in the block is not collected before its end."""
        lease = f"bootseer-{secrets.token_hex(8)}"
        expire = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + _LEASE_S))
        metadata = (("containerd-namespace", namespace),)
        with self._channel() as channel:
            leases = leases_pb2_grpc.LeasesStub(channel)  # type: ignore[no-untyped-call]  # generated
            request = leases_pb2.CreateRequest(id=lease, labels={"containerd.io/gc.expire": expire})
            leases.Create(request, metadata=metadata, timeout=self._timeout_s)
            try:
                yield Session(channel, (*metadata, ("containerd-lease", lease)), self._timeout_s)
            finally:
                leases.Delete(leases_pb2.DeleteRequest(id=lease), metadata=metadata, timeout=self._timeout_s)

    @contextmanager
    def content(self, namespace: str) -> Iterator["Content"]:
        """Read what a namespace has in the content store."""
        with self._channel() as channel:
            yield Content(channel, (("containerd-namespace", namespace),), self._timeout_s)

    @contextmanager
    def _channel(self) -> Iterator[grpc.Channel]:
        """A connection; errors of its calls as ours."""
        if not self._address.exists():
            raise Transient(f"{self._address}: there is no such socket")
        with _translated(str(self._address)), grpc.insecure_channel(f"unix://{self._address}") as channel:
            yield channel


class Content:
    """The content store of one namespace, to read."""

    def __init__(self, channel: grpc.Channel, metadata: Sequence[tuple[str, str]], timeout_s: float) -> None:
        self._metadata = metadata
        self._timeout_s = timeout_s
        self._stub = content_pb2_grpc.ContentStub(channel)  # type: ignore[no-untyped-call]  # generated

    def labelled(self, label: str) -> list[Blob]:
        """The blobs that have the label, in no order."""
        request = content_pb2.ListContentRequest(filters=[f'labels."{label}"'])
        found: list[Blob] = []
        for answer in self._stub.List(request, metadata=self._metadata, timeout=self._timeout_s):
            for info in answer.info:
                updated_ns = info.updated_at.ToNanoseconds()
                found.append(Blob(Digest(info.digest), info.size, updated_ns, dict(info.labels)))
        return found

    def read(self, digest: Digest, limit: int) -> bytes:
        """The whole blob; InvalidArgument when it has more than `limit` bytes."""
        request = content_pb2.ReadContentRequest(digest=digest, size=limit + 1)
        body = bytearray()
        with _translated(f"content {digest}"):
            for answer in self._stub.Read(request, metadata=self._metadata, timeout=self._timeout_s):
                body += answer.data
                if len(body) > limit:
                    raise InvalidArgument(f"content {digest}: more than {limit} bytes")
        return bytes(body)


class Session:
    """The calls of one client in one namespace, under one lease."""

    def __init__(self, channel: grpc.Channel, metadata: Sequence[tuple[str, str]], timeout_s: float) -> None:
        self._metadata = metadata
        self._timeout_s = timeout_s
        self._content = content_pb2_grpc.ContentStub(channel)  # type: ignore[no-untyped-call]  # generated
        self._images = images_pb2_grpc.ImagesStub(channel)  # type: ignore[no-untyped-call]  # generated
        self._snapshots = snapshots_pb2_grpc.SnapshotsStub(channel)  # type: ignore[no-untyped-call]  # generated

    def put_blob(self, digest: Digest, body: bytes, labels: Mapping[str, str]) -> None:
        """Have the blob in the content store, with these labels beside those it has."""
        request = content_pb2.WriteContentRequest(
            action=content_pb2.COMMIT,
            ref=f"bootseer-{digest}",
            total=len(body),
            expected=digest,
            data=body,
            labels=labels,
        )
        try:
            with _translated(f"content {digest}"):
                for _ in self._content.Write(iter([request]), metadata=self._metadata, timeout=self._timeout_s):
                    pass
        except AlreadyExists:
            info = content_pb2.Info(digest=digest, labels=labels)
            mask = FieldMask(paths=[f"labels.{key}" for key in labels])
            update = content_pb2.UpdateRequest(info=info, update_mask=mask)
            with _translated(f"content {digest}"):
                self._content.Update(update, metadata=self._metadata, timeout=self._timeout_s)

    def has_blob(self, digest: Digest) -> bool:
        """Whether the content store has it."""
        try:
            with _translated(f"content {digest}"):
                request = content_pb2.InfoRequest(digest=digest)
                self._content.Info(request, metadata=self._metadata, timeout=self._timeout_s)
                return True
        except NotFound:
            return False

    def write_blob(
        self, digest: Digest, size: int, labels: Mapping[str, str], read: Callable[[int], Iterator[bytes]]
    ) -> None:
        """Bring a large blob into the content store. `read(offset)` gives its bytes from there on: containerd keeps
        what an earlier attempt has brought, and checks the digest at the end. Raises what `read` raises."""
        upload = _Upload(digest, size, labels, read)
        try:
            with _translated(f"content {digest}"):
                for answer in self._content.Write(upload.requests(), metadata=self._metadata):
                    upload.answered(answer.offset)
        except AlreadyExists:
            return
        except SnapshotterError:
            if upload.failure is not None:
                raise upload.failure from None
            raise

    def image(self, name: str) -> Digest:
        """The digest that the name stands for. NotFound when containerd has no such image."""
        with _translated(f"image {name}"):
            request = images_pb2.GetImageRequest(name=name)
            answer = self._images.Get(request, metadata=self._metadata, timeout=self._timeout_s)
            return Digest(answer.image.target.digest)

    def put_image(self, name: str, media_type: str, digest: Digest, size: int) -> None:
        """Have the name stand for the blob."""
        target = images_pb2.Descriptor(media_type=media_type, digest=digest, size=size)
        image = images_pb2.Image(name=name, target=target)
        try:
            with _translated(f"image {name}"):
                request = images_pb2.CreateImageRequest(image=image)
                self._images.Create(request, metadata=self._metadata, timeout=self._timeout_s)
        except AlreadyExists:
            update = images_pb2.UpdateImageRequest(image=image, update_mask=FieldMask(paths=["target"]))
            with _translated(f"image {name}"):
                self._images.Update(update, metadata=self._metadata, timeout=self._timeout_s)

    def has_snapshot(self, snapshotter: str, name: str) -> bool:
        """Whether there is one; containerd then puts it under the lease."""
        request = snapshots_pb2.StatSnapshotRequest(snapshotter=snapshotter, key=name)
        try:
            with _translated(f"snapshot {name}"):
                self._snapshots.Stat(request, metadata=self._metadata, timeout=self._timeout_s)
                return True
        except NotFound:
            return False

    def prepare(self, snapshotter: str, key: str, parent: str, labels: Mapping[str, str]) -> bool:
        """Prepare a layer as an unpacker does, and wait as long as the snapshotter takes. True when it says that the
        layer is there; False when it wants it unpacked: the key is then removed again."""
        request = snapshots_pb2.PrepareSnapshotRequest(snapshotter=snapshotter, key=key, parent=parent, labels=labels)
        try:
            with _translated(f"snapshot {key}"):
                self._snapshots.Prepare(request, metadata=self._metadata)
        except AlreadyExists:
            return True
        with _translated(f"snapshot {key}"):
            remove = snapshots_pb2.RemoveSnapshotRequest(snapshotter=snapshotter, key=key)
            self._snapshots.Remove(remove, metadata=self._metadata, timeout=self._timeout_s)
        return False


class _Upload:
    """The requests of one write: asks where to go on, then sends what is missing, then commits. gRPC takes requests on
    a thread of its own, where an exception would be lost: it is kept in `failure`."""

    def __init__(
        self, digest: Digest, size: int, labels: Mapping[str, str], read: Callable[[int], Iterator[bytes]]
    ) -> None:
        self.failure: Exception | None = None
        self._digest = digest
        self._size = size
        self._labels = labels
        self._read = read
        self._offset: SimpleQueue[int] = SimpleQueue()

    def answered(self, offset: int) -> None:
        """containerd has answered a request; the first answer says how much it has."""
        self._offset.put(offset)

    def requests(self) -> Iterator[content_pb2.WriteContentRequest]:
        """What is sent."""
        yield self._request(content_pb2.STAT)
        try:
            offset = self._offset.get(timeout=_ANSWER_S)
            if offset < self._size:
                for chunk in self._read(offset):
                    yield content_pb2.WriteContentRequest(action=content_pb2.WRITE, offset=offset, data=chunk)
                    offset += len(chunk)
        except Exception as error:  # raised again by whoever reads the answers
            self.failure = error
            raise
        yield self._request(content_pb2.COMMIT, offset, self._labels)

    def _request(
        self, action: content_pb2.WriteAction, offset: int = 0, labels: Mapping[str, str] | None = None
    ) -> content_pb2.WriteContentRequest:
        return content_pb2.WriteContentRequest(
            action=action,
            ref=f"bootseer-{self._digest}",
            total=self._size,
            expected=self._digest,
            offset=offset,
            labels=labels,
        )


@contextmanager
def _translated(where: str) -> Iterator[None]:
    """Errors of gRPC as ours, by the status code."""
    try:
        yield
    except grpc.RpcError as error:
        code, details = error.code(), json.dumps(error.details()).strip('"')
        kind = Denied if "ermission denied" in details else _CODES.get(code, SnapshotterError)
        raise kind(f"{where}: {details if kind is not SnapshotterError else f'{code.name}: {details}'}") from error
