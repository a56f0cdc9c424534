"""containerd's calls for the layers of a lazy pull, made by us, so that nothing of containerd is in the time they take.

This is the one place of the bench that speaks gRPC: the API is containerd's own, not the product's.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc

from proto import snapshots_pb2, snapshots_pb2_grpc
from scripts.rig.errors import RigError

__all__ = ["SnapshotCalls"]


class SnapshotCalls:
    """A client of the snapshotter on `socket`. Close it with `close`."""

    def __init__(self, socket: Path) -> None:
        self._channel = grpc.insecure_channel(f"unix://{socket}")
        make_stub: Callable[[grpc.Channel], snapshots_pb2_grpc.SnapshotsStub] = snapshots_pb2_grpc.SnapshotsStub
        self._stub = make_stub(self._channel)
        self._serial = 0
        grpc.channel_ready_future(self._channel).result(timeout=20)

    def prepare(self, image: str, digests: Sequence[str]) -> list[float]:
        """Prepare the layers of an image, from the lowest up; seconds that each call took until its answer that the
        layer is there. RigError if it gave another."""
        taken = []
        parent = ""
        for number, digest in enumerate(digests):
            name = _name(parent, digest)
            self._serial += 1
            labels = {
                "containerd.io/snapshot.ref": name,
                "containerd.io/snapshot/cri.image-ref": image,
                "containerd.io/snapshot/cri.layer-digest": digest,
                "containerd.io/snapshot/cri.image-layers": ",".join(digests[number : number + 40]),
            }
            key = f"bench/{self._serial}/extract-1-x {name}"
            taken.append(self._prepare(key, parent, labels))
            parent = name
        return taken

    def remove(self, digests: Sequence[str]) -> None:
        """Remove the snapshots of `prepare`, from the highest down."""
        names = [""]
        for digest in digests:
            names.append(_name(names[-1], digest))
        for name in reversed(names[1:]):
            self._stub.Remove(snapshots_pb2.RemoveSnapshotRequest(snapshotter="bootseer", key=name))

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _prepare(self, key: str, parent: str, labels: dict[str, str]) -> float:
        request = snapshots_pb2.PrepareSnapshotRequest(snapshotter="bootseer", key=key, parent=parent, labels=labels)
        started = time.monotonic()
        try:
            self._stub.Prepare(request, timeout=300)
        except grpc.RpcError as error:
            taken = time.monotonic() - started
            assert isinstance(error, grpc.Call)
            if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
                raise RigError(f"Prepare of {key}: {error.code().name}: {error.details()}") from None
            return taken
        raise RigError(f"Prepare of {key}: the layer is to be unpacked; the daemon's log says why")

    def __repr__(self) -> str:
        return f"<SnapshotCalls {self._serial} layers prepared>"


def _name(parent: str, digest: str) -> str:
    """A name that is different for each layer on each parent."""
    return f"sha256:{hashlib.sha256(f'{parent} {digest}'.encode()).hexdigest()}"
