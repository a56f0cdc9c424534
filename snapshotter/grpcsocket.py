"""A gRPC server on a unix socket that only root may use."""

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

__all__ = ["listen"]

_log = logging.getLogger(__name__)

_SOCKET_PATH_LIMIT = 107
"""Bytes of a socket's path (sun_path, less its final zero)."""


def listen(
    path: Path,
    add: Callable[[grpc.Server], None],
    name: str,
    max_workers: int,
    options: Sequence[tuple[str, int]] = (),
) -> grpc.Server:
    """Serve what `add` registers, with threads called `name`, and return the running server.

    A stale socket of an earlier process is replaced; raises UserError when somebody answers on it, or when the path
    cannot be one. The caller stops the server; its workers end then, each when its call does. The socket stays and is
    stale.
    """
    _check(path)
    workers = ThreadPoolExecutor(max_workers, thread_name_prefix=name)
    server = grpc.server(workers, options=options)
    add(server)
    # Bound in a private directory and renamed when its mode is right: there is no moment at which another user could
    # connect, and none without a socket when a predecessor is replaced.
    with tempfile.TemporaryDirectory(prefix=".s", dir=path.parent) as private:
        bound = Path(private) / "s"
        server.add_insecure_port(f"unix://{bound}")
        server.start()
        bound.chmod(0o600)
        bound.rename(path)
    threading.Thread(target=_end_with, args=(server, workers), name=f"{name}-end", daemon=True).start()
    _log.info("service.listening service=%s socket=%s workers=%d", name, path, max_workers)
    return server


def _end_with(server: grpc.Server, workers: ThreadPoolExecutor) -> None:
    """Let the workers go once the server has been stopped: grpc leaves them behind."""
    server.wait_for_termination()
    workers.shutdown(wait=False)


def _check(path: Path) -> None:
    """Raises UserError unless a server may listen on `path`."""
    # The name it is bound under first is longer than ".sXXXXXXXX/s" at most by this much.
    room = _SOCKET_PATH_LIMIT - len(".s12345678/s")
    if not path.is_absolute() or len(os.fsencode(path)) > _SOCKET_PATH_LIMIT or len(os.fsencode(path.parent)) >= room:
        raise UserError(f"{path}: a socket's path must be absolute and shorter than {room} bytes: choose another")
    path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise UserError(f"{path}: exists and is not a socket: remove it or choose another path")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return  # nobody listens: left over by a process that died
    raise UserError(f"{path}: another process serves there: stop it or choose another path")
