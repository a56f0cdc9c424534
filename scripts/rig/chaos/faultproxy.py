"""A registry's bad days: a proxy process before it that breaks answers with bytes of layers, and its handle.

What is asked for besides layers is passed on as it is: a client that cannot have a manifest fails by rights. `main` is
the process. It takes one JSON line on standard input for each window (`{"kind", "share", "seconds", "seed"}`): so long
that share of the requests meets that fault. It prints the number of requests that met one when its input ends.
"""

import argparse
import contextlib
import http.client
import json
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from scripts.rig.delayline import FAR
from scripts.rig.link import CHECKOUT
from scripts.rig.namespace import Ends
from scripts.rig.process import end, spawn
from scripts.rig.registry import ADDRESS as BACKEND
from scripts.rig.registry import wait_for_port
from scripts.rig.workspace import Workspace

__all__ = ["ADDRESS", "KINDS", "FaultProxy"]

PORT = 5002
ADDRESS = f"{FAR}:{PORT}"
_HOP = ("connection", "transfer-encoding", "content-length", "keep-alive")
_EXPIRED = "/expired"
_DRIP = 2048


class FaultProxy:
    """A running proxy at `ADDRESS`, before the registry."""

    def __init__(self, workspace: Workspace, ends: Ends, layers: Sequence[str]) -> None:
        directory = workspace.directory("faultproxy")
        listing = directory / "layers"
        listing.write_text("\n".join(layers))
        argv = [sys.executable, "-m", "scripts.rig.chaos.faultproxy", "--layers", str(listing)]
        env = {**workspace.env, "PYTHONPATH": str(CHECKOUT)}
        with (directory / "log").open("wb") as log:
            self._process = spawn(
                ends.far.command(argv), env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        try:
            wait_for_port(ends.far.pid, PORT, self._process, "starting the fault proxy")
        except BaseException:
            self.close()
            raise

    def begin(self, kind: str, share: float, seconds: float, seed: int) -> None:
        """Let this share of the requests for layers meet the fault, from now on for so long."""
        order = {"kind": kind, "share": share, "seconds": seconds, "seed": seed}
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(order)}\n".encode())
        self._process.stdin.flush()

    def finish(self) -> int:
        """End the process; how many requests met a fault."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        count = self._process.stdout.readline()
        self.close()
        return int(count or 0)

    def close(self) -> None:
        """End the process. Safe to call twice."""
        end(self._process, grace_s=0)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __repr__(self) -> str:
        return f"<FaultProxy {ADDRESS} pid {self._process.pid}>"


class _Weather:
    """The window that is open now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kind, self._share, self._until = "", 0.0, 0.0
        self._source = random.Random(0)
        self.met = 0

    def change(self, order: Mapping[str, object]) -> None:
        with self._lock:
            self._kind, self._share = str(order["kind"]), float(str(order["share"]))
            self._until = time.monotonic() + float(str(order["seconds"]))
            self._source = random.Random(int(str(order["seed"])))

    def fault(self) -> str:
        """What the next request for a layer meets; empty: nothing."""
        with self._lock:
            if time.monotonic() >= self._until or self._source.random() >= self._share:
                return ""
            self.met += 1
            return self._kind

    def sit_out(self) -> None:
        """Wait until the window is closed."""
        while (left_s := self._until - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.05))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    weather: _Weather
    layers: frozenset[str]

    def do_GET(self) -> None:
        digest = self.path.partition("?")[0].rpartition("/")[2]
        if self.path.startswith(_EXPIRED):
            self._say(403, {})
            return
        fault = self.weather.fault() if self.command == "GET" and digest in self.layers else ""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if fault:
                KINDS[fault](self)
            else:
                self.relay()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""

    def relay(self, asked: str | None = None, spoil: Callable[[bytes], bytes] | None = None, pace_s: float = 0) -> None:
        """The registry's answer, for the range `asked` instead of the request's; `spoil` changes the bytes."""
        headers = {name: value for name, value in self.headers.items() if name.lower() not in (*_HOP, "host")}
        headers["Host"] = ADDRESS
        if asked is not None:
            headers["Range"] = asked
        if not headers.get("Range", "x"):
            del headers["Range"]
        with contextlib.closing(http.client.HTTPConnection(BACKEND, timeout=60)) as backend:
            backend.request(self.command, self.path, headers=headers)
            answer = backend.getresponse()
            length = int(answer.getheader("Content-Length", "0"))
            self._head(answer.status, dict(answer.getheaders()), length)
            if self.command == "HEAD":
                return
            while chunk := answer.read(_DRIP if pace_s else 1 << 16):
                self.wfile.write(spoil(chunk) if spoil else chunk)
                spoil = None
                time.sleep(pace_s)

    def cut(self, then: Callable[[], None]) -> None:
        """The first half of the right answer, then something else, and the end of the connection."""
        headers = {name: value for name, value in self.headers.items() if name.lower() not in (*_HOP, "host")}
        with contextlib.closing(http.client.HTTPConnection(BACKEND, timeout=60)) as backend:
            backend.request("GET", self.path, headers={**headers, "Host": ADDRESS})
            answer = backend.getresponse()
            data = answer.read()
        self._head(answer.status, dict(answer.getheaders()), len(data))
        self.wfile.write(data[: len(data) // 2])
        self.wfile.flush()
        then()
        self.close_connection = True

    def refuse(self, status: int, headers: Mapping[str, str]) -> None:
        """An answer without bytes."""
        self._say(status, headers)

    def reset(self) -> None:
        """RST: SO_LINGER with time 0 turns the close into one."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.rfile.close()
        self.connection.close()
        self.close_connection = True

    def moved(self, shift: int, shorten: int = 0) -> None:
        """206 with another range than was asked for; a request without a range gets the right answer."""
        asked = self.headers.get("Range", "").removeprefix("bytes=")
        start, _, last = asked.partition("-")
        if not (start.isdigit() and last.isdigit()):
            self.relay()
            return
        self.relay(f"bytes={int(start) + shift}-{max(int(start) + shift, int(last) + shift - shorten)}")

    def _say(self, status: int, headers: Mapping[str, str]) -> None:
        self._head(status, headers, 0)

    def _head(self, status: int, headers: Mapping[str, str], length: int) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.flush()


def _silence(handler: _Handler) -> None:
    handler.weather.sit_out()
    handler.close_connection = True


def _flip(data: bytes) -> bytes:
    return bytes([data[0] ^ 0x55]) + data[1:]


KINDS: Mapping[str, Callable[[_Handler], None]] = {
    "silence": _silence,
    "stall": lambda handler: handler.cut(handler.weather.sit_out),
    "reset": lambda handler: handler.cut(handler.reset),
    "refused": _Handler.reset,
    "truncated": lambda handler: handler.cut(lambda: None),
    "wrong bytes": lambda handler: handler.relay(spoil=_flip),
    "200 for a range": lambda handler: handler.relay(asked=""),
    "another range": lambda handler: handler.moved(512),
    "short range": lambda handler: handler.moved(0, 1000),
    "slow": lambda handler: handler.relay(pace_s=0.02),
    "redirect": lambda handler: handler.refuse(307, {"Location": f"http://{BACKEND}{handler.path}"}),
    "expired redirect": lambda handler: handler.refuse(302, {"Location": f"http://{ADDRESS}{_EXPIRED}{handler.path}"}),
    "401": lambda handler: handler.refuse(401, {}),
    "403": lambda handler: handler.refuse(403, {}),
    "404": lambda handler: handler.refuse(404, {}),
    "416": lambda handler: handler.refuse(416, {"Content-Range": "bytes */1"}),
    "429": lambda handler: handler.refuse(429, {"Retry-After": "1"}),
    "500": lambda handler: handler.refuse(500, {}),
    "503": lambda handler: handler.refuse(503, {"Retry-After": "1"}),
}
"""What a request for a layer may meet."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are part of it."""


def main() -> int:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=Path, required=True)
    weather = _Weather()
    layers = frozenset(parser.parse_args().layers.read_text().split())
    server = _Server((FAR, PORT), type("Handler", (_Handler,), {"weather": weather, "layers": layers}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for line in sys.stdin:
        weather.change(json.loads(line))
    print(weather.met, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
