"""The gRPC adapter: containerd's messages to `Snapshots` and back. The only module that knows gRPC and protobuf.

It decides nothing: each call translates, calls one method, translates back. Errors become status codes in one place
(`_status`): ours by the table `_CODES`, their text kept because containerd logs it; a disk that refuses is UNAVAILABLE;
anything else is a bug, is logged with its traceback and answered INTERNAL, and the server goes on. `Snapshots` locks
for itself, so calls run at once, and no lock is held while List streams.
"""

import errno
import logging
import socket
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.timestamp_pb2 import Timestamp

from proto import mount_pb2, snapshots_pb2, snapshots_pb2_grpc
from snapshotter import errors
from snapshotter.containerd.model import Mount, Snapshot
from snapshotter.containerd.snapshots import Snapshots
from snapshotter.grpcsocket import Serving, listen

__all__ = ["SnapshotsService", "serve"]

_log = logging.getLogger(__name__)

# The first class that fits wins.
_CODES: Sequence[tuple[type[errors.SnapshotterError], grpc.StatusCode]] = (
    (errors.NotFound, grpc.StatusCode.NOT_FOUND),
    (errors.AlreadyExists, grpc.StatusCode.ALREADY_EXISTS),
    (errors.InvalidArgument, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.Precondition, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.Denied, grpc.StatusCode.PERMISSION_DENIED),
    (errors.Transient, grpc.StatusCode.UNAVAILABLE),
    (errors.UserError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.SnapshotterError, grpc.StatusCode.UNKNOWN),
)

_DISK = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY}

_MESSAGE_LIMIT = 16 << 20
"""Bytes; containerd's own limit."""

_LIST_BATCH = 100
"""Snapshots a List message; as containerd itself sends them."""


@contextmanager
def _status(context: grpc.ServicerContext, call: str) -> Iterator[None]:
    """Ends the call with the status code of whatever the block raises."""
    try:
        yield
    except errors.SnapshotterError as error:
        code = next(code for kind, code in _CODES if isinstance(error, kind))
        _log.debug("call.failed call=%s code=%s reason=%s", call, code.name, error)
        _abort(context, code, str(error))
    except (OSError, sqlite3.OperationalError) as error:
        if not _is_the_disks(error):
            _unexpected(context, call, error)
        _log.error("call.failed call=%s code=UNAVAILABLE reason=%r the disk refuses: make room", call, str(error))
        _abort(context, grpc.StatusCode.UNAVAILABLE, f"bootseer: the disk refuses ({error}): make room")
    except Exception as error:  # the border of the process: containerd must get an answer, and the next call too
        _unexpected(context, call, error)


def _is_the_disks(error: OSError | sqlite3.OperationalError) -> bool:
    """Whether it is full, over its quota, or broken."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DISK


def _unexpected(context: grpc.ServicerContext, call: str, error: Exception) -> NoReturn:
    _log.exception("call.failed call=%s code=INTERNAL", call)
    _abort(context, grpc.StatusCode.INTERNAL, f"bootseer: unexpected {type(error).__name__}: {error}")


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, text: str) -> NoReturn:
    context.abort(code, text)
    raise AssertionError("abort returned")


class SnapshotsService(snapshots_pb2_grpc.SnapshotsServicer):
    """`containerd.services.snapshots.v1.Snapshots` over one `Snapshots`. `request.snapshotter` is not looked at: a
    socket serves one snapshotter, whatever name containerd's configuration gave it."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots

    def Prepare(
        self, request: snapshots_pb2.PrepareSnapshotRequest, context: grpc.ServicerContext
    ) -> snapshots_pb2.PrepareSnapshotResponse:
        """A new active snapshot, or ALREADY_EXISTS for a layer that is there."""
        with _status(context, "Prepare"):
            found = self._snapshots.prepare(request.key, request.parent, dict(request.labels))
        return snapshots_pb2.PrepareSnapshotResponse(mounts=map(_mount, found))

    def View(
        self, request: snapshots_pb2.ViewSnapshotRequest, context: grpc.ServicerContext
    ) -> snapshots_pb2.ViewSnapshotResponse:
        """A new view."""
        with _status(context, "View"):
            found = self._snapshots.view(request.key, request.parent, dict(request.labels))
        return snapshots_pb2.ViewSnapshotResponse(mounts=map(_mount, found))

    def Mounts(
        self, request: snapshots_pb2.MountsRequest, context: grpc.ServicerContext
    ) -> snapshots_pb2.MountsResponse:
        """The mounts of an active snapshot or a view."""
        with _status(context, "Mounts"):
            found = self._snapshots.mounts(request.key)
        return snapshots_pb2.MountsResponse(mounts=map(_mount, found))

    def Commit(self, request: snapshots_pb2.CommitSnapshotRequest, context: grpc.ServicerContext) -> Empty:
        """Active to committed."""
        with _status(context, "Commit"):
            self._snapshots.commit(request.name, request.key, dict(request.labels), request.parent)
        return Empty()

    def Remove(self, request: snapshots_pb2.RemoveSnapshotRequest, context: grpc.ServicerContext) -> Empty:
        """Forget a snapshot without children."""
        with _status(context, "Remove"):
            self._snapshots.remove(request.key)
        return Empty()

    def Stat(
        self, request: snapshots_pb2.StatSnapshotRequest, context: grpc.ServicerContext
    ) -> snapshots_pb2.StatSnapshotResponse:
        """One snapshot."""
        with _status(context, "Stat"):
            found = self._snapshots.stat(request.key)
        return snapshots_pb2.StatSnapshotResponse(info=_info(found))

    def Update(
        self, request: snapshots_pb2.UpdateSnapshotRequest, context: grpc.ServicerContext
    ) -> snapshots_pb2.UpdateSnapshotResponse:
        """Replace labels."""
        with _status(context, "Update"):
            info, paths = request.info, list(request.update_mask.paths)
            found = self._snapshots.update(info.name, dict(info.labels), paths)
        return snapshots_pb2.UpdateSnapshotResponse(info=_info(found))

    def List(
        self, request: snapshots_pb2.ListSnapshotsRequest, context: grpc.ServicerContext
    ) -> Iterator[snapshots_pb2.ListSnapshotsResponse]:
        """The snapshots that match, in batches."""
        with _status(context, "List"):
            found = self._snapshots.select(request.filters)
        for start in range(0, len(found), _LIST_BATCH):
            batch = found[start : start + _LIST_BATCH]
            yield snapshots_pb2.ListSnapshotsResponse(info=map(_info, batch))

    def Usage(self, request: snapshots_pb2.UsageRequest, context: grpc.ServicerContext) -> snapshots_pb2.UsageResponse:
        """Bytes and inodes on disk."""
        with _status(context, "Usage"):
            found = self._snapshots.usage(request.key)
        return snapshots_pb2.UsageResponse(size=found.size, inodes=found.inodes)

    def Cleanup(self, request: snapshots_pb2.CleanupRequest, context: grpc.ServicerContext) -> Empty:
        """Delete what removed snapshots left."""
        with _status(context, "Cleanup"):
            self._snapshots.cleanup()
        return Empty()


def serve(snapshots: Snapshots, listener: socket.socket, max_workers: int = 64) -> Serving:
    """Serve on a socket of `listening.bind`, and return the running server.

    See `grpcsocket.listen`. A Prepare holds a worker for as long as a layer takes to come: `admission` keeps some free.
    """
    options = [("grpc.max_receive_message_length", _MESSAGE_LIMIT), ("grpc.max_send_message_length", _MESSAGE_LIMIT)]

    def add(server: grpc.Server) -> None:
        register: Callable[[SnapshotsService, grpc.Server], None] = snapshots_pb2_grpc.add_SnapshotsServicer_to_server
        register(SnapshotsService(snapshots), server)

    return listen(listener, add, "snapshots", max_workers, options)


def _mount(mount: Mount) -> mount_pb2.Mount:
    return mount_pb2.Mount(type=mount.type, source=mount.source, options=mount.options)


def _info(snapshot: Snapshot) -> snapshots_pb2.Info:
    return snapshots_pb2.Info(
        name=snapshot.key,
        parent=snapshot.parent,
        kind=snapshots_pb2.Kind.Name(snapshot.kind),
        created_at=_timestamp(snapshot.created_ns),
        updated_at=_timestamp(snapshot.updated_ns),
        labels=snapshot.labels,
    )


def _timestamp(time_ns: int) -> Timestamp:
    seconds, nanos = divmod(time_ns, 1_000_000_000)
    return Timestamp(seconds=seconds, nanos=nanos)
