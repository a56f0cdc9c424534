"""What stands behind the proxy: a gRPC server that answers any method as it is told, and the fetch process's socket."""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from snapshotter.registry.passed import PassedCredentials
from snapshotter.rpc import Server
from snapshotter.supervise.memory import PassedMemory

Answer = Callable[[bytes, grpc.ServicerContext], Iterator[bytes]]


class Upstream(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in its stub only
    """`answers` by method name; `asked` has method and bytes of each call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: dict[str, Answer] = {}
        self.asked: list[tuple[str, bytes]] = []
        self.metadata: list[tuple[str, str | bytes]] = []
        self._workers = ThreadPoolExecutor(8)
        self._server = grpc.server(self._workers)
        self._server.add_generic_rpc_handlers((self,))
        self._server.add_insecure_port(f"unix://{path}")
        self._server.start()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Answers every method."""
        method = handler_call_details.method

        def answer(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            self.asked.append((method, request))
            self.metadata = [(it.key, it.value) for it in context.invocation_metadata()]
            yield from self.answers[method.rpartition("/")[2]](request, context)

        return grpc.unary_stream_rpc_method_handler(answer)

    def close(self) -> None:
        """End it."""
        self._server.stop(0).wait()
        self._workers.shutdown()


class Fetch:
    """The socket of a fetch process, and the table that it was handed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.passed = PassedCredentials()
        self.handed = 0
        self._server: Server | None = None
        self.start()

    def start(self) -> None:
        """Answer."""
        self._server = Server(self.path, {"set-credentials": self._take})

    def stop(self) -> None:
        """Be killed."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _take(self, request: Mapping[str, Any]) -> None:
        self.passed.replace(request["rows"])
        self.handed += 1


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory for sockets, whose paths end at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="bs", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def memory() -> Iterator[PassedMemory]:
    """Where credentials outlive the processes."""
    fd = PassedMemory.create()
    yield PassedMemory(fd)
    os.close(fd)


@pytest.fixture
def upstream(short: Path) -> Iterator[Upstream]:
    """containerd's image service."""
    made = Upstream(short / "c.sock")
    yield made
    made.close()


@pytest.fixture
def fetch(short: Path) -> Iterator[Fetch]:
    """The fetch process."""
    made = Fetch(short / "f.sock")
    yield made
    made.stop()
