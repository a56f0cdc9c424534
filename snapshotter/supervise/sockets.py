"""The sockets on which containerd, the kubelet and the command line reach the service, held by the supervisor.

While the service is replaced, who connects is not refused: the connection waits in the socket's backlog, and the
successor, which inherits the socket, answers. containerd's client would pause for a second and more after a refusal.
The first two are also in the service manager's store, so connections wait through a restart of the daemon, too; the
command line is to learn at once that no daemon runs.
"""

import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from snapshotter.config import Config
from snapshotter.errors import UserError
from snapshotter.kernel import sdnotify
from snapshotter.killpoints import reach
from snapshotter.listening import bind, is_at

__all__ = ["complete", "kept_of", "let_go", "taken", "wanted"]

_log = logging.getLogger(__name__)

_CONTROL = "socket-control"


def wanted(config: Config) -> dict[str, Path]:
    """Where the sockets are to be, by their names in the store and in a handover."""
    paths = {"socket-containerd": config.socket_path, _CONTROL: config.control_path}
    return paths | {"socket-cri": config.cri_path} if config.cri.enabled else paths


def kept_of(paths: Mapping[str, Path], kept: Mapping[str, int]) -> dict[str, int]:
    """Those of the `kept` descriptors that are still the sockets at these paths."""
    return {name: kept[name] for name, path in paths.items() if name in kept and is_at(path, kept[name])}


def complete(paths: Mapping[str, Path], held: dict[str, int]) -> None:
    """Make the sockets that are missing in `held`, and have the manager keep them. One that cannot be made stays out,
    and the log says why: the service tries it again, and readers do not depend on it."""
    for name, path in paths.items():
        if name not in held:
            try:
                held[name] = bind(path).detach()
            except (UserError, OSError) as error:
                _log.error("socket.not_held socket=%s reason=%r", path, str(error))
            else:
                reach("supervisor.listening")
                if name != _CONTROL:
                    sdnotify.store(name, held[name])


def let_go(paths: Mapping[str, Path], held: Mapping[str, int]) -> None:
    """At the daemon's end: take the names away, but of those that the service manager keeps for the next one."""
    for name, fd in held.items():
        if (name == _CONTROL or "NOTIFY_SOCKET" not in os.environ) and is_at(paths[name], fd):
            paths[name].unlink(missing_ok=True)


def taken(held: Mapping[str, int], name: str, path: Path) -> socket.socket:
    """In the service: the socket that is held for it, or one of its own. UserError as of `listening.bind`."""
    return socket.socket(fileno=held[name]) if name in held else bind(path)
