"""What containerd knows of the containers that are recorded: whether their first process runs, and how it ended.

A task that has ended may be gone a moment later, with its exit status, so its end is learnt from the stream of events,
and asked for only where nothing has come yet. Clients of containerd give a container and its snapshot the same name
(ctr, nerdctl, Docker, the CRI plugin); one of a client that does not is taken for a container that never started.
"""

import logging
from pathlib import Path

import grpc

from proto import events_pb2, tasks_pb2, tasks_pb2_grpc
from snapshotter.containerd.events import EventStream
from snapshotter.record.recorder import namespace_and_name
from snapshotter.record.recording import Task, TaskState

__all__ = ["ContainerdTasks", "NoTasks"]

_log = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
_MOST_EXITS = 4096
_TOPIC = "/tasks/exit"
_STATES = {
    tasks_pb2.CREATED: TaskState.NONE,
    tasks_pb2.RUNNING: TaskState.RUNNING,
    tasks_pb2.PAUSED: TaskState.RUNNING,
    tasks_pb2.PAUSING: TaskState.RUNNING,
    tasks_pb2.STOPPED: TaskState.EXITED,
}


class NoTasks:
    """Where no containerd is known that could be asked."""

    def watch(self) -> None:
        """See `Tasks`."""

    def unwatch(self) -> None:
        """See `Tasks`."""

    def task(self, key: str, seen: bool) -> Task:
        """See `Tasks`."""
        return Task(TaskState.UNKNOWN)


class ContainerdTasks:
    """One containerd, by its socket, while it is watched. `watch`, `unwatch` and `task` are called by one thread."""

    def __init__(self, address: Path) -> None:
        self._address = address
        self._channel: grpc.Channel | None = None
        self._stub: tasks_pb2_grpc.TasksStub | None = None
        self._ends: EventStream | None = None
        self._exits: dict[tuple[str, str], int] = {}

    def __repr__(self) -> str:
        return f"<ContainerdTasks {self._address} {'watched' if self._channel else 'not watched'}>"

    def watch(self) -> None:
        """See `Tasks`."""
        if self._channel is None:
            self._channel = grpc.insecure_channel(f"unix://{self._address}")
            self._stub = tasks_pb2_grpc.TasksStub(self._channel)  # type: ignore[no-untyped-call]  # generated
            self._ends = EventStream(self._channel, _TOPIC, self._note)

    def unwatch(self) -> None:
        """See `Tasks`."""
        if self._ends is not None:
            self._ends.stop()
            self._ends = self._channel = self._stub = None
            self._exits.clear()

    def task(self, key: str, seen: bool) -> Task:
        """See `Tasks`."""
        namespace, name = namespace_and_name(key)
        known = self._exits.get((namespace, name))
        if known is not None:
            return Task(TaskState.EXITED, known)
        if self._stub is None:
            return Task(TaskState.UNKNOWN)
        try:
            request = tasks_pb2.GetRequest(container_id=name)
            metadata = (("containerd-namespace", namespace),)
            process = self._stub.Get(request, metadata=metadata, timeout=_TIMEOUT_S).process
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                # its end may have come while we asked
                known = self._exits.get((namespace, name))
                if known is not None:
                    return Task(TaskState.EXITED, known)
                return Task(TaskState.GONE if seen else TaskState.NONE)
            _log.debug("tasks.not_answered key=%s error=%r", key, error.details())
            return Task(TaskState.UNKNOWN)
        return Task(_STATES.get(process.status, TaskState.UNKNOWN), process.exit_status)

    def _note(self, envelope: events_pb2.Envelope) -> None:
        event = events_pb2.TaskExit.FromString(envelope.event.value)
        if event.id in ("", event.container_id):  # another id: a process that was started beside the first
            if len(self._exits) >= _MOST_EXITS:
                self._exits.clear()
            self._exits[(envelope.namespace, event.container_id)] = event.exit_status
