"""What containerd knows of containers: arguments, labels, annotations; and when one is created.

A client prepares the snapshot, creates the container, asks for the snapshot's mounts, and starts the task (ctr,
nerdctl, the CRI plugin); Docker asks for the mounts before it creates the container. So a container is asked for when
its mounts are, and is heard of by the event of its creation, whichever comes first. Container and snapshot have one
name, as `tasks` says.
"""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc

from proto import containers_pb2, containers_pb2_grpc, events_pb2
from snapshotter.workload.container import Container

from .events import EventStream

__all__ = ["ContainerdContainers"]

_log = logging.getLogger(__name__)

_TIMEOUT_S = 1.0  # a container's start waits for the answer
_OPTIONS = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500))
"""containerd may be started after us, and again: with gRPC's own pauses it would not be found for up to two minutes."""
_TOPIC = "/containers/create"


class ContainerdContainers:
    """One containerd, by its socket. Thread-safe."""

    def __init__(self, address: Path) -> None:
        self._address = address
        self._channel = grpc.insecure_channel(f"unix://{address}", options=_OPTIONS)
        self._stub = containers_pb2_grpc.ContainersStub(self._channel)  # type: ignore[no-untyped-call]  # generated
        self._created: EventStream | None = None

    def __repr__(self) -> str:
        return f"<ContainerdContainers {self._address}>"

    def listen(self, created: Callable[[str, str], None]) -> None:
        """Call `created(namespace, name)` whenever a container has been created."""

        def take(envelope: events_pb2.Envelope) -> None:
            created(envelope.namespace, events_pb2.ContainerCreate.FromString(envelope.event.value).id)

        self._created = EventStream(self._channel, _TOPIC, take)

    def close(self) -> None:
        """Listen no more, ask no more."""
        if self._created is not None:
            self._created.stop()
        self._channel.close()

    def find(self, namespace: str, name: str) -> Container | None:
        """The container; None when there is none (yet), or containerd does not answer in time. Never raises."""
        if not self._address.exists():
            return None
        request = containers_pb2.GetContainerRequest(id=name)
        metadata = (("containerd-namespace", namespace),)
        try:
            found = self._stub.Get(request, metadata=metadata, timeout=_TIMEOUT_S, wait_for_ready=True).container
            return _described(found.spec.value, dict(found.labels))
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                _log.debug("containers.not_answered namespace=%s name=%s error=%r", namespace, name, error.details())
        except (ValueError, TypeError, AttributeError) as error:  # no JSON, or other JSON than a specification's
            _log.warning("containers.strange namespace=%s name=%s error=%r", namespace, name, str(error))
        return None


def _described(spec: bytes, labels: Mapping[str, str]) -> Container:
    """A container with this specification; one without a process (of a client with another format) has no arguments."""
    values: Mapping[str, Any] = json.loads(spec) if spec else {}
    argv = (values.get("process") or {}).get("args") or ()
    annotations = values.get("annotations") or {}
    return Container(tuple(map(str, argv)), labels, {str(key): str(it) for key, it in annotations.items()})
