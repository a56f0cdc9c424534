"""How far hosts are: the shortest round trip to each, as the kernel measured it when a connection was opened and used.

A host is *far* when a round trip takes `FAR_S` or more. Then what a start waits for is TCP's slow start, not the wire:
a connection brings 14.6 kB in its first round trip, twice that in the next, and with 100 ms it is half a second until
one connection fills 50 Mbit/s. So more of them are worth their handshakes there, and nowhere else.

Behind a proxy nothing is measured, and nobody is far.
"""

import socket
import struct
import threading

__all__ = ["FAR_S", "Distances", "is_far", "round_trip_s"]

FAR_S = 0.04

_MIN_RTT = struct.Struct("=148xI")  # struct tcp_info up to tcpi_min_rtt, microseconds
_NONE = 0xFFFFFFFF


def round_trip_s(sock: socket.socket) -> float:
    """The shortest round trip of a connection so far, in seconds; 0.0 where the kernel does not say (the handshake had
    to be repeated, or it is no TCP)."""
    try:
        (microseconds,) = _MIN_RTT.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.size))
    except (OSError, struct.error):
        return 0.0
    return 0.0 if microseconds == _NONE else float(microseconds) / 1e6


def is_far(round_trip_s: float) -> bool:
    """Whether a host at such a distance is far; False where it is not known (0.0)."""
    return round_trip_s >= FAR_S


class Distances:
    """The shortest round trip to each origin so far: a full queue on the way, or a busy machine, makes single ones
    longer. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str | None, int], float] = {}

    def __repr__(self) -> str:
        return f"<Distances {self._known}>"

    def note(self, origin: tuple[str, str | None, int], round_trip_s: float) -> None:
        """What a connection to `origin` tells; 0.0 says nothing."""
        if round_trip_s > 0:
            with self._lock:
                self._known[origin] = min(self._known.get(origin, round_trip_s), round_trip_s)

    def is_known(self, origin: tuple[str, str | None, int]) -> bool:
        """Whether a connection to it was ever opened, and told."""
        return origin in self._known

    def round_trip_s(self, origin: tuple[str, str | None, int]) -> float:
        """The round trip to it, in seconds; 0.0 while that is not known."""
        return self._known.get(origin, 0.0)
