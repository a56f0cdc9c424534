"""Calls between our own processes and from the CLI: one JSON line asks, one JSON line answers, over a unix socket.

A request is an object with `op`; an answer is `{"ok": value}` or `{"error": text, "kind": class name}`, and the error
comes out of `call` as the SnapshotterError of that name. JSON lines and not gRPC: the block server and the supervisor
stay free of heavy imports, `bootseer status` starts in a blink, and `socat` is debugger enough.
"""

import contextlib
import json
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import errors
from .errors import InvalidArgument, SnapshotterError, Transient
from .listening import bind

__all__ = ["Handler", "Server", "Unanswered", "call"]

_log = logging.getLogger(__name__)

Handler = Callable[[Mapping[str, Any]], Any]
"""Request object in, JSON value out; JSON carries no static types, hence Any."""

_MAX_LINE = 16 << 20
_RETRY_S = 0.1


class Unanswered(Transient):
    """The other process is not there, or ended before it answered: the call may or may not have been carried out."""


def call(path: Path, op: str, timeout_s: float | None = 10.0, **fields: Any) -> Any:
    """Ask the process behind `path` and wait for its answer at most `timeout_s` (None: as long as it lives). Raises
    Unanswered when nobody does, else what the other side raised."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            connection.sendall(json.dumps({"op": op, **fields}).encode() + b"\n")
            with connection.makefile("rb") as stream:
                line = stream.readline(_MAX_LINE)
    except OSError as error:
        raise Unanswered(f"{path}: {op}: {error.strerror or error}") from error
    if not line.endswith(b"\n"):
        raise Unanswered(f"{path}: {op}: the other process ended before it answered")
    answer = json.loads(line)
    if "error" in answer:
        kind = getattr(errors, answer["kind"], SnapshotterError)
        raise kind(answer["error"])
    return answer["ok"]


def _request(line: bytes) -> Mapping[str, Any]:
    """The object that a line holds; InvalidArgument where it is none with an `op`."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("a call is one line of JSON") from error
    if not isinstance(request, dict) or not isinstance(request.get("op"), str):
        raise InvalidArgument("a call is an object with `op`")
    return request


class Server:
    """Serves `handlers` by op on a unix socket for root alone; a thread for each connection, since a call may wait."""

    def __init__(self, path: Path, handlers: Mapping[str, Handler], held: socket.socket | None = None) -> None:
        """`held`: a socket of `listening.bind` at `path` that outlives us; calls that come after `close` wait for who
        serves it next. Without one it is ours: the name goes with us, and a stale one is replaced."""
        self._path = path
        self._handlers = handlers
        self._held = held is not None
        if held is None:
            path.unlink(missing_ok=True)
            held = bind(path)
        self._socket = held
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._closing = False
        self._thread = threading.Thread(target=self._accept, name=f"rpc-{path.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more calls; those under way run on."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        self._socket.close()
        if not self._held:
            self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        waiting = select.poll()
        for fd in (self._socket.fileno(), self._wake):
            waiting.register(fd, select.POLLIN)
        while True:
            waiting.poll()
            if self._closing:
                return
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:  # it was for a process that serves the same socket
                continue
            except OSError as error:
                _log.error("rpc.refused socket=%s error=%r", self._path.name, str(error))  # out of descriptors?
                time.sleep(_RETRY_S)
                continue
            try:
                threading.Thread(target=self._answer, args=(connection,), name="rpc-call", daemon=True).start()
            except RuntimeError as error:  # out of threads: the caller learns that nobody answered
                _log.error("rpc.refused socket=%s error=%r", self._path.name, str(error))
                connection.close()

    def _answer(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream:
            try:
                line = stream.readline(_MAX_LINE)
                if not line:  # somebody only looked whether we are there
                    return
                request = _request(line)
                handler = self._handlers.get(request["op"])
                if handler is None:
                    raise InvalidArgument(f"{request['op'][:100]!r} is no call of {self._path.name}")
                answer = {"ok": handler(request)}
            except SnapshotterError as error:
                answer = {"error": str(error), "kind": type(error).__name__}
            except Exception as error:  # the border of the process: a bug in one call must not end the others
                _log.exception("rpc.failed socket=%s", self._path.name)
                answer = {"error": f"{type(error).__name__}: {error}", "kind": "SnapshotterError"}
            with contextlib.suppress(OSError):  # the caller has gone
                connection.sendall(json.dumps(answer).encode() + b"\n")
