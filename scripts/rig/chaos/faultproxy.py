"""A registry's bad days: a proxy process before it that breaks answers with bytes of layers, and its handle.

What is asked for besides layers is passed on as it is: a client that cannot have a manifest fails by rights. `main` is
the process. It takes one JSON line on standard input for each window (`{"kind", "share", "seconds", "seed"}`): so long
that share of the requests meets that fault. It prints the number of requests that met one when its input ends.

What is wrong with TLS and names is met as most layers are: by a redirect to the host that has the bytes.
"""

import argparse
import json
import random
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from scripts.rig.delayline import FAR
from scripts.rig.faults import (
    Action,
    Answer,
    Drip,
    Falsify,
    FaultyServer,
    Hold,
    IgnoreRange,
    Range,
    Request,
    Reset,
    ShortRange,
    Status,
    Truncate,
    WrongRange,
    ask,
    redirect,
)
from scripts.rig.link import CHECKOUT
from scripts.rig.namespace import Ends
from scripts.rig.process import end, spawn
from scripts.rig.registry import ADDRESS as BACKEND
from scripts.rig.registry import wait_for_port
from scripts.rig.workspace import Workspace

__all__ = ["ADDRESS", "KINDS", "FaultProxy"]

PORT = 5002
ADDRESS = f"{FAR}:{PORT}"
_SECRET = f"{FAR}:5003"
_EXPIRED = "/expired"


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
        self._over = threading.Event()
        self.met = 0

    def change(self, order: Mapping[str, object]) -> None:
        """Close the window, and open another one."""
        seconds = float(str(order["seconds"]))
        with self._lock:
            self._over.set()
            self._over = threading.Event()
            self._kind, self._share = str(order["kind"]), float(str(order["share"]))
            self._until = time.monotonic() + seconds
            self._source = random.Random(int(str(order["seed"])))
            closing = threading.Timer(seconds, self._over.set)
        closing.daemon = True
        closing.start()

    def fault(self, request: Request) -> Action | None:
        """What this request for a layer meets."""
        with self._lock:
            if time.monotonic() >= self._until or self._source.random() >= self._share:
                return None
            self.met += 1
            return KINDS[self._kind](request, self._over)


class _Proxy(FaultyServer):
    def __init__(self, weather: _Weather, layers: frozenset[str]) -> None:
        self._weather, self._layers = weather, layers
        super().__init__((FAR, PORT), kept=0)

    def action(self, request: Request) -> Action | None:
        if request.path.startswith(_EXPIRED):
            return Status(403)
        digest = request.path.partition("?")[0].rpartition("/")[2]
        return self._weather.fault(request) if request.method == "GET" and digest in self._layers else None

    def right(self, request: Request, asked: Range | None) -> Answer:
        return ask(BACKEND, request, asked)


class _Untrusted(FaultyServer):
    """Nobody gets beyond its certificate, which no authority has signed."""

    def __init__(self, directory: Path) -> None:
        """`directory` is where certificate and key are put."""
        certificate, key = str(directory / "certificate"), str(directory / "key")
        words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        names = ["-subj", f"/CN={FAR}", "-addext", f"subjectAltName=IP:{FAR}"]
        subprocess.run([*words, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        super().__init__((FAR, int(_SECRET.rpartition(":")[2])), tls=context)

    def action(self, request: Request) -> Action | None:
        return Status(200)


def _half(request: Request) -> int:
    start, end = request.range or (0, None)
    return (1 << 16) if end is None else (end - start) // 2


Kind = Callable[[Request, threading.Event], Action]


def _status(status: int, **headers: str) -> Kind:
    said = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda request, over: Status(status, said)


def _moved(root: str, status: int = 307) -> Kind:
    return lambda request, over: redirect(f"{root}{request.path}", status)


KINDS: Mapping[str, Kind] = {
    "silence": lambda request, over: Hold(-1, over),
    "stall": lambda request, over: Hold(_half(request), over),
    "reset": lambda request, over: Reset(_half(request)),
    "refused": lambda request, over: Reset(-1),
    "truncated": lambda request, over: Truncate(_half(request)),
    "wrong bytes": lambda request, over: Falsify(0),
    "200 for a range": lambda request, over: IgnoreRange(),
    "another range": lambda request, over: WrongRange(512),
    "short range": lambda request, over: ShortRange(_half(request)),
    "slow": lambda request, over: Drip(0.02, 2048),
    "redirect": _moved(f"http://{BACKEND}"),
    "expired redirect": _moved(f"http://{ADDRESS}{_EXPIRED}", 302),
    "no TLS": _moved(f"https://{ADDRESS}"),
    "untrusted certificate": _moved(f"https://{_SECRET}"),
    "name gone": _moved("http://layers.invalid"),
    "401": _status(401),
    "403": _status(403),
    "404": _status(404),
    "416": _status(416, Content_Range="bytes */1"),
    "429": _status(429, Retry_After="1"),
    "500": _status(500),
    "503": _status(503, Retry_After="1"),
}
"""What a request for a layer may meet, until the event is set."""


def main() -> int:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=Path, required=True)
    weather = _Weather()
    listing: Path = parser.parse_args().layers
    with _Untrusted(listing.parent), _Proxy(weather, frozenset(listing.read_text().split())):
        for line in sys.stdin:
            weather.change(json.loads(line))
        print(weather.met, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
