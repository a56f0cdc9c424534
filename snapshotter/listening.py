"""Unix sockets on which others connect to us, for root alone.

A socket may be made by one process and served by another: who connects while nobody serves waits in its backlog, and
is not refused. `is_at` tells whether a name still leads to the socket that one holds. Knows nothing of what is spoken.
"""

import fcntl
import os
import socket
import stat
from pathlib import Path

from .errors import UserError

__all__ = ["POLLER", "bind", "is_at"]

POLLER = {"GRPC_POLL_STRATEGY": "poll"}
"""What the environment has to say before gRPC is imported, if it is to serve on one of these: see `grpcsocket`."""

_PATH_LIMIT = 107  # bytes of a socket's path: sun_path, less its final zero
_BACKLOG = 128
_SIOCUNIXFILE = 0x89E0


def bind(path: Path) -> socket.socket:
    """A socket that listens on `path`, mode 0600 from its first moment, non-blocking. A stale one of an earlier process
    is replaced. UserError when somebody serves there, or when the path cannot be a socket's."""
    _check(path)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    previous = os.umask(0o177)
    try:
        listener.bind(os.fspath(path))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(previous)
    return listener


def is_at(path: Path, listener: int) -> bool:
    """Whether who connects to `path` reaches this socket."""
    try:
        bound = fcntl.ioctl(listener, _SIOCUNIXFILE)  # the file it was bound to, wherever that has been moved since
    except OSError:
        return False
    try:
        return os.path.samestat(os.fstat(bound), path.stat())
    except OSError:
        return False
    finally:
        os.close(bound)


def _check(path: Path) -> None:
    """Raises UserError unless a server may listen on `path`; its directory is made."""
    if not path.is_absolute() or len(os.fsencode(path)) > _PATH_LIMIT:
        raise UserError(f"{path}: a socket's path must be absolute, and of {_PATH_LIMIT} bytes at most: choose another")
    path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise UserError(f"{path}: exists and is not a socket: remove it or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:  # somebody is slow to serve
            pass
        except OSError:
            return  # nobody listens: left over by a process that died
    raise UserError(f"{path}: another process serves there: stop it or choose another path")
