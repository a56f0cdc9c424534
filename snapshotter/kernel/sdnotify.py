"""The service manager's protocol, sd_notify(3) and sd_listen_fds(3): state out, descriptors out and back in.

A message is one datagram of `KEY=value` lines to the socket that NOTIFY_SOCKET names; descriptors travel beside it.
Those sent with FDSTORE=1 are kept while the service is started again, and come back as descriptors 3 and up, named by
LISTEN_FDNAMES. FDPOLL=0 is sent with each: the manager otherwise drops a descriptor at the first error on it, and a
FUSE connection may be asked whether it has ended by us only. Without a manager, or with one that has gone, nothing
happens: every call is safe anywhere. It knows nothing of what the descriptors are.
"""

import array
import fcntl
import logging
import os
import socket
from collections.abc import MutableMapping

__all__ = ["forget", "notify", "store", "stored"]

_log = logging.getLogger(__name__)

_FIRST = 3
_LISTEN = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
_PATIENCE_S = 1.0  # a manager that does not read must not hold up who answers readers


def notify(*lines: str, fds: tuple[int, ...] = ()) -> bool:
    """Send one message; whether there is a manager that took it."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())] if fds else []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.settimeout(_PATIENCE_S)
            channel.sendmsg(["\n".join(lines).encode()], rights, 0, address)
    except OSError as error:
        _log.error("notify.failed message=%s error=%r", lines[0], str(error))
        return False
    return True


def store(name: str, fd: int) -> bool:
    """Have the manager keep a copy of `fd` as `name` (no colon, no line break, 255 bytes at most)."""
    return notify("FDSTORE=1", f"FDNAME={name}", "FDPOLL=0", fds=(fd,))


def forget(name: str) -> bool:
    """Have the manager close what it keeps as `name`."""
    return notify("FDSTOREREMOVE=1", f"FDNAME={name}")


def stored(environ: MutableMapping[str, str]) -> dict[str, int]:
    """What the manager has given back, by name, close-on-exec; the caller owns it. The variables that say so are taken
    out of `environ`. Of two with one name the first counts, the other is closed."""
    pid, count, names = (environ.pop(name, "") for name in _LISTEN)
    if pid != str(os.getpid()) or not (count.isascii() and count.isdigit()):
        return {}
    found: dict[str, int] = {}
    called = names.split(":")
    for number in range(int(count)):
        fd, name = _FIRST + number, called[number] if number < len(called) else ""
        if name in found:
            os.close(fd)
            continue
        fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        found[name] = fd
    return found
