"""A gRPC server on a unix socket that somebody else made, and keeps: so callers wait while one server follows another.

gRPC for Python takes a path, makes its socket by itself, and has no way to be given one. So it is had listen in a
private place, and once it does, the descriptor of its socket is made one of ours (`dup2`). It goes on as if nothing
had been: accept(2) takes a number. This needs the poller that gives the kernel all numbers each time, `poll`; the
usual one, epoll, has been told the file. Its thread may be in the kernel already, with the file from before; it begins
anew, with what the number is now, when it gets one more socket. `check` proves that the gRPC at hand can be treated so.

gRPC chooses its poller when it is imported: whoever does that first in a process that is to serve has set `POLLER`.
"""

import logging
import os
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from snapshotter.errors import UserError
from snapshotter.listening import POLLER, bind

__all__ = ["Serving", "check", "listen"]

_log = logging.getLogger(__name__)

_ANSWER_S = 5.0


class Serving:
    """A server that runs. The socket stays as it is when it stops."""

    def __init__(self, server: grpc.Server, number: int, own: int) -> None:
        """`number`: the descriptor that gRPC takes for its socket; `own`: that socket."""
        self._server = server
        self._number, self._own = number, own

    def stop(self, grace: float | None) -> threading.Event:
        """Take no more calls; those under way have `grace` seconds. The event: all have ended. Connections that come
        from now on wait for another server."""
        if self._own >= 0:
            # gRPC is going to shut its socket down, for all that have a copy: it gets back its own
            os.dup2(self._own, self._number, inheritable=False)
            os.close(self._own)
            self._own = -1
        return self._server.stop(grace)

    def __repr__(self) -> str:
        return f"<Serving {'on' if self._own >= 0 else 'no more on'} descriptor {self._number}>"


def listen(
    listener: socket.socket,
    add: Callable[[grpc.Server], None],
    name: str,
    max_workers: int,
    options: Sequence[tuple[str, int]] = (),
) -> Serving:
    """Serve what `add` registers on a socket of `listening.bind`, with threads called `name`. The descriptor is closed;
    where it is to outlive the server, somebody has another.

    The caller stops the server; its workers end then, each when its call does."""
    assert POLLER.items() <= os.environ.items(), "the wrong poller: no connection would be accepted"
    workers = ThreadPoolExecutor(max_workers, thread_name_prefix=name)
    server = grpc.server(workers, options=options)
    add(server)
    with listener:
        address = listener.getsockname()
        number, own = _put_in(server, listener.fileno(), Path(address).parent)
    server.start()
    threading.Thread(target=_end_with, args=(server, workers), name=f"{name}-end", daemon=True).start()
    _log.info("service.listening service=%s socket=%s workers=%d", name, address, max_workers)
    return Serving(server, number, own)


def check() -> None:
    """UserError unless this gRPC can serve on a socket of ours. Uses gRPC: not before a fork."""
    with tempfile.TemporaryDirectory(prefix="bootseer-") as directory:
        path = Path(directory, "s")
        with socket.socket(socket.AF_UNIX) as client:
            serving = listen(bind(path), lambda server: None, "check", 1)
            client.settimeout(_ANSWER_S)
            try:
                client.connect(os.fspath(path))
                if not client.recv(1):  # HTTP/2: the server's settings come first
                    raise UserError("gRPC does not serve on a socket that it has not made")
            except OSError as error:
                raise UserError(f"gRPC does not serve on a socket that it has not made: {error}") from error
            finally:
                serving.stop(None).wait()


def _put_in(server: grpc.Server, listener: int, directory: Path) -> tuple[int, int]:
    """Have gRPC listen in `directory`, and put our socket in the place of its own: the number that both have had, and
    a copy of its own."""
    with tempfile.TemporaryDirectory(prefix=".s", dir=directory) as private:
        place = os.open(private, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            path = f"/proc/self/fd/{place}/s"  # a socket's path has 107 bytes at most
            server.add_insecure_port(f"unix://{path}")
            number = _number_of(path)
            own = os.dup(number)
            os.dup2(listener, number, inheritable=False)
            server.add_insecure_port(f"unix://{path}-to-wake-the-poller")
        finally:
            os.close(place)
    return number, own


def _number_of(path: str) -> int:
    """The descriptor that listens on `path`, in this process."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    bound = copy.getsockname() if copy.family == socket.AF_UNIX else ""
                    if isinstance(bound, str) and bound.lstrip("/") == path.lstrip("/"):
                        return int(name)
        except OSError:  # closed since, by another thread
            continue
    raise RuntimeError(f"gRPC does not listen on {path}")


def _end_with(server: grpc.Server, workers: ThreadPoolExecutor) -> None:
    """Let the workers go once the server has been stopped: grpc leaves them behind."""
    server.wait_for_termination()
    workers.shutdown(wait=False)
