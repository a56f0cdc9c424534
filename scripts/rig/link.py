"""A link between two network namespaces: a rate, a round-trip time, counters, and a self-test that refuses lies.

near (`NEAR`, where the node is) <-> far (`FAR`, the registry). The delay line is a process of its own
(`delayline`); no netem is needed. Addresses are the same in every run: the namespaces are private.
"""

import json
import select
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from scripts.rig.delayline import COUNTERS, FAR, MTU, NEAR
from scripts.rig.errors import RigError
from scripts.rig.namespace import Namespace, inside_network, network_namespace
from scripts.rig.process import end, spawn, tail
from scripts.rig.workspace import Workspace

__all__ = ["FAR", "NEAR", "Link", "LinkReport", "Traffic"]

CHECKOUT = Path(__file__).resolve().parents[2]
_HEADERS = 52  # IPv4 and TCP with time stamps
_PORT = 7


@dataclass(frozen=True, slots=True)
class Traffic:
    """What arrived since the link began: bytes and IP packets, headers included; and packets dropped on the way."""

    to_near: int
    packets_to_near: int
    drops_to_near: int
    to_far: int
    packets_to_far: int
    drops_to_far: int


@dataclass(frozen=True, slots=True)
class LinkReport:
    """What the self-test measured, and how the link was made. `rate_mbit` counts headers, as the link itself does."""

    tier: str
    congestion_control: tuple[str, ...]
    connect_ms: float
    rtt_ms: float
    rate_mbit: float

    def __str__(self) -> str:
        return (
            f"connect {self.connect_ms:.1f} ms, RTT {self.rtt_ms:.1f} ms, {self.rate_mbit:.1f} Mbit/s "
            f"({self.tier}, TCP {'/'.join(sorted(set(self.congestion_control)))})"
        )


class Link:
    """An open link of `mbit` and `rtt_ms`. `near` and `far` are its namespaces; all of it ends with `close`."""

    def __init__(self, workspace: Workspace, mbit: float, rtt_ms: float, name: str = "link") -> None:
        self.mbit = mbit
        self.rtt_ms = rtt_ms
        directory = workspace.directory(name)
        self._counters = directory / "counters"
        self._counters.write_bytes(bytes(COUNTERS.size))
        self._log = directory / "log"
        self._opened: list[Namespace] = []
        self._line: subprocess.Popen[bytes] | None = None
        try:
            self.near = self._open_namespace(workspace)
            self.far = self._open_namespace(workspace)
            self._line = self._start(workspace)
            self._description = self._read_description(self._line)
        except BaseException:
            self.close()
            raise

    def traffic(self) -> Traffic:
        """The counters as they are now."""
        return Traffic(*COUNTERS.unpack(self._counters.read_bytes()))

    def self_test(self, transfer: int = 50_000_000, attempts: int = 4) -> LinkReport:
        """Measure the link with `transfer` bytes from far to near; RigError unless it is what was asked for.

        A neighbour's burst of work can spoil one measurement, so there are `attempts`, a second apart.
        """
        for attempt in range(1, attempts + 1):
            report = self._report(transfer)
            try:
                self._judge(report)
                return report
            except RigError:
                if attempt == attempts:
                    raise
            time.sleep(1)
        raise AssertionError("attempts must be at least 1")

    def tested(self, any_link: bool = False) -> str:
        """What the self-test says; with `any_link`, a link that failed it says so and is used all the same."""
        try:
            return str(self.self_test(attempts=1 if any_link else 4))
        except RigError as error:
            if not any_link:
                raise
            return f"REFUSED: {error}"

    def close(self) -> None:
        """End the delay line and both namespaces. Safe to call twice."""
        if self._line is not None:
            for pipe in (self._line.stdin, self._line.stdout):
                if pipe is not None:
                    pipe.close()
            end(self._line, grace_s=2)
            self._line = None
        while self._opened:
            self._opened.pop().close()

    def _open_namespace(self, workspace: Workspace) -> Namespace:
        namespace = network_namespace(workspace.env)
        self._opened.append(namespace)
        return namespace

    def _start(self, workspace: Workspace) -> subprocess.Popen[bytes]:
        ends = ["--near", str(self.near.pid), "--far", str(self.far.pid), "--counters", str(self._counters)]
        argv = [sys.executable, "-m", "scripts.rig.delayline", *ends]
        argv += ["--mbit", str(self.mbit), "--rtt-ms", str(self.rtt_ms)]
        env = {**workspace.env, "PYTHONPATH": str(CHECKOUT)}
        with self._log.open("wb") as log:
            return spawn(argv, env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)

    def _read_description(self, line: subprocess.Popen[bytes]) -> dict[str, list[str]]:
        assert line.stdout is not None
        ready, _, _ = select.select([line.stdout], [], [], 15)
        text = line.stdout.readline() if ready else b""
        if not text:
            raise RigError(f"the delay line did not start (it needs root and /dev/net/tun):\n{tail(self._log)}")
        description: dict[str, list[str]] = json.loads(text)
        return description

    def _report(self, transfer: int) -> LinkReport:
        listener = inside_network(self.far.pid, lambda: socket.create_server((FAR, _PORT)))
        with listener:
            server = threading.Thread(target=_serve, args=(listener, transfer))
            server.start()
            try:
                connect_ms, rtt_ms, rate_mbit = self._measure(transfer)
            finally:
                listener.shutdown(socket.SHUT_RDWR)
                server.join()
        tier, control = str(self._description["tier"]), tuple(self._description["congestion_control"])
        return LinkReport(tier, control, connect_ms, rtt_ms, rate_mbit)

    def _measure(self, transfer: int) -> tuple[float, float, float]:
        client = inside_network(self.near.pid, lambda: socket.socket(socket.AF_INET))
        with client:
            client.settimeout(60)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            started = time.monotonic()
            client.connect((FAR, _PORT))
            connect_ms = (time.monotonic() - started) * 1000
            turns = [_turn_ms(client) for _ in range(8)]
            client.sendall(b"G")
            rate_mbit = _receive_mbit(client, transfer)
        return connect_ms, statistics.median(turns), rate_mbit  # one hiccup of the machine is not the link

    def _judge(self, report: LinkReport) -> None:
        slack_ms = 1.5
        wrong = []
        if not self.rtt_ms - 0.1 <= report.connect_ms <= self.rtt_ms + 2 * slack_ms:
            wrong.append("connect time")
        if not self.rtt_ms - 0.1 <= report.rtt_ms <= self.rtt_ms + slack_ms:
            wrong.append("RTT")
        if not 0.95 * self.mbit <= report.rate_mbit <= 1.03 * self.mbit:
            wrong.append("rate")
        if wrong:
            raise RigError(
                f"the emulated link is not {self.mbit:g} Mbit/s with {self.rtt_ms:g} ms: wrong {', '.join(wrong)}; "
                f"measured {report}. Is the machine busy with something else?"
            )

    def __repr__(self) -> str:
        return f"<Link {self.mbit:g} Mbit/s {self.rtt_ms:g} ms {self.traffic()}>"


def _serve(listener: socket.socket, transfer: int) -> None:
    """Answer one client: each byte with itself, a G with `transfer` bytes. Ends with the client or the listener."""
    try:
        connection, _ = listener.accept()
    except OSError:  # shut down before a client came
        return
    with connection:
        connection.settimeout(60)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while order := connection.recv(1):
                if order == b"G":
                    chunk = bytes(1 << 18)
                    for start in range(0, transfer, len(chunk)):
                        connection.sendall(chunk[: transfer - start])
                else:
                    connection.sendall(order)
        except OSError:  # the client gave up: it says why
            return


def _turn_ms(client: socket.socket) -> float:
    started = time.monotonic()
    client.sendall(b"x")
    client.recv(1)
    return (time.monotonic() - started) * 1000


def _receive_mbit(client: socket.socket, transfer: int) -> float:
    """Rate of the transfer after its first fifth (slow start), header bytes included."""
    received = first = 0
    began = 0.0
    while received < transfer:
        got = len(client.recv(1 << 18))
        if got == 0:
            raise RigError(f"the emulated link broke the transfer after {received} bytes")
        received += got
        if not first and received >= transfer // 5:
            first, began = received, time.monotonic()
    payload = (received - first) * 8 / (time.monotonic() - began) / 1e6
    return payload * MTU / (MTU - _HEADERS)
