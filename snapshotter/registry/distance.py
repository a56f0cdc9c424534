"""How far hosts are: the round trip to each, as the kernel measured it when a connection was opened.

A host is *far* when a round trip takes `FAR_S` or more. Then what a start waits for is TCP's slow start, not the wire:
a connection brings 14.6 kB in its first round trip, twice that in the next, and with 100 ms it is half a second until
one connection fills 50 Mbit/s. So more of them are worth their handshakes there, and nowhere else.

Behind a proxy nothing is measured, and nobody is far.
"""

import socket
import struct
import threading

__all__ = ["FAR_S", "Distances", "connect_time_s"]

FAR_S = 0.04

_RTT = struct.Struct("=68xI")  # struct tcp_info up to tcpi_rtt, microseconds


def connect_time_s(sock: socket.socket) -> float:
    """The round trip of the connection's handshake, in seconds; 0.0 where the kernel does not say (a segment of it was
    lost, or it is no TCP)."""
    try:
        (microseconds,) = _RTT.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT.size))
    except (OSError, struct.error):
        return 0.0
    return float(microseconds) / 1e6


class Distances:
    """The shortest round trip to each origin so far: a full queue on the way makes single ones longer. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str | None, int], float] = {}

    def __repr__(self) -> str:
        return f"<Distances {self._known}>"

    def note(self, origin: tuple[str, str | None, int], round_trip_s: float) -> None:
        """A connection to `origin` was opened; 0.0 says nothing."""
        if round_trip_s > 0:
            with self._lock:
                self._known[origin] = min(self._known.get(origin, round_trip_s), round_trip_s)

    def is_known(self, origin: tuple[str, str | None, int]) -> bool:
        """Whether a connection to it was ever opened, and told."""
        return origin in self._known

    def is_far(self, origin: tuple[str, str | None, int]) -> bool:
        """Whether the origin is far; False while that is not known."""
        return self._known.get(origin, 0.0) >= FAR_S
