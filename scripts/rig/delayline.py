"""The process behind an emulated link: packets of two TUN devices, delivered after wire time and half a round trip.

Model, for each direction: the wire sends one packet at a time at `rate`; a packet that would wait longer than one
bandwidth-delay product takes to send is dropped (drop-tail); a sent packet arrives a constant half RTT later, in
order. Sizes are those of IP packets of at most the MTU: the devices hand over TCP segments merged by the kernel
(IFF_VNET_HDR, TSO), and the header bytes of each segment they stand for are counted. A merged packet arrives as a
whole when its last byte does: the kernel's pacing keeps that below 2 ms at 100 Mbit/s.

It knows nothing of what is measured. It ends when its standard input does, and keeps six counters in a shared file.
"""

import argparse
import collections
import contextlib
import fcntl
import gc
import json
import mmap
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from scripts.rig.namespace import enter_network

__all__ = ["COUNTERS", "FAR", "MTU", "NEAR", "main", "wire_size"]

NEAR, FAR = "10.77.0.1", "10.77.0.2"
MTU = 1500
COUNTERS = struct.Struct("=6Q")
"""To the near side, then to the far side: bytes, packets, drops."""

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_VNET = struct.Struct("=BBHHHH")  # flags, GSO type, header length, GSO size, checksum start, checksum offset
_SETTINGS = {
    "net/ipv4/tcp_no_metrics_save": "1",  # else a cold start learns from the one before it
    "net/ipv6/conf/all/disable_ipv6": "1",  # else router solicitations take part
}


def wire_size(packet: bytes) -> tuple[int, int]:
    """Bytes on the wire and number of the IP packets that one packet of the device (virtio header in front) means."""
    size = len(packet) - _VNET.size
    _, gso_type, _, gso_size, tcp_start, _ = _VNET.unpack_from(packet)
    if gso_type == 0 or gso_size == 0:
        return size, 1
    headers = tcp_start + (packet[_VNET.size + tcp_start + 12] >> 4) * 4
    segments = max(1, -(-(size - headers) // gso_size))
    return size + (segments - 1) * headers, segments


@dataclass(slots=True)
class _Direction:
    """One direction: from device `source` to device `target`. Times are monotonic seconds."""

    source: int
    target: int
    idle_at: float = 0.0
    queue: collections.deque[tuple[float, bytes]] = field(default_factory=collections.deque)
    size: int = 0
    packets: int = 0
    drops: int = 0


class _DelayLine:
    def __init__(self, near: int, far: int, mbit: float, rtt_ms: float, counters: mmap.mmap) -> None:
        self._rate = mbit * 1e6 / 8
        self._half_s = rtt_ms / 2000
        # One BDP, but never less than 10 ms: on a fast, short link that would be a few merged packets of 64 KiB.
        self._backlog_s = max(2 * self._half_s, 0.01)
        self._directions = (_Direction(far, near), _Direction(near, far))
        self._counters = memoryview(counters).cast("Q")

    def run(self, control: int) -> None:
        """Forward until `control` is readable (closed by the other side)."""
        by_source = {direction.source: direction for direction in self._directions}
        devices = [*by_source, control]
        while True:
            # select, not epoll: its time-out has microseconds, epoll's whole milliseconds.
            ready, _, _ = select.select(devices, [], [], self._sleep_s())
            if control in ready:
                return
            for descriptor in ready:
                self._take(by_source[descriptor])
            for direction in self._directions:
                self._deliver(direction)

    def _sleep_s(self) -> float:
        due = [direction.queue[0][0] for direction in self._directions if direction.queue]
        return max(0.0, min(due) - time.monotonic()) if due else 1.0

    def _take(self, direction: _Direction) -> None:
        for _ in range(64):  # bounded: the other direction waits meanwhile
            try:
                packet = os.read(direction.source, 1 << 17)
            except BlockingIOError:
                return
            size, packets = wire_size(packet)
            now = time.monotonic()
            start = max(now, direction.idle_at)
            if start - now > self._backlog_s:
                direction.drops += packets
                continue
            direction.idle_at = start + size / self._rate
            direction.queue.append((direction.idle_at + self._half_s, packet))

    def _deliver(self, direction: _Direction) -> None:
        queue = direction.queue
        delivered = False
        while queue and queue[0][0] <= time.monotonic():
            _, packet = queue.popleft()
            size, packets = wire_size(packet)
            try:
                os.write(direction.target, packet)
            except OSError:  # the device is down: its namespace is going away
                direction.drops += packets
                continue
            direction.size += size
            direction.packets += packets
            delivered = True
        if delivered:
            self._publish()

    def _publish(self) -> None:
        for index, direction in enumerate(self._directions):
            at = 3 * index
            self._counters[at] = direction.size
            self._counters[at + 1] = direction.packets
            self._counters[at + 2] = direction.drops


def _merged_bytes(mbit: float) -> int:
    """Most bytes of a merged packet: 1 ms of the wire. A queue that is full drops it whole, and a real one would drop
    single packets: at 50 Mbit/s and 100 ms, drops of 64 KiB at once halved what TCP got through."""
    return int(min(max(mbit * 1e6 / 8 * 0.001, 2 * MTU), 65536))


def _open_device(name: str, address: str, merged: int) -> int:
    """A TUN device in the calling thread's network namespace, up, with its loopback; returns its descriptor. TCP hands
    it at most `merged` bytes at once."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("=16sH22x", name.encode(), flags))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    for arguments in (
        ["addr", "add", f"{address}/24", "dev", name],
        # A queue that never overflows: the only queue of the link is ours.
        ["link", "set", name, "mtu", str(MTU), "txqueuelen", "10000", "gso_max_size", str(merged), "up"],
        ["link", "set", "lo", "up"],
    ):
        subprocess.run(["ip", *arguments], check=True)
    for setting, value in _SETTINGS.items():
        path = Path("/proc/sys") / setting
        if path.exists():
            path.write_text(value)
    return device


def _set_congestion_control(name: str) -> str:
    """Choose TCP's congestion control for the calling thread's network namespace; returns the one in force."""
    setting = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    with contextlib.suppress(OSError):  # not built in, or not on the host's list of allowed ones
        setting.write_text(name)
    return setting.read_text().strip()


@contextlib.contextmanager
def _allowed(name: str) -> Iterator[None]:
    """Let new namespaces choose congestion control `name` meanwhile: the list is the host's, and is put back."""
    try:
        # Kept open: inside another network namespace the path names a list that cannot be written.
        listing = os.open("/proc/sys/net/ipv4/tcp_allowed_congestion_control", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield
        return
    before = os.pread(listing, 4096, 0)
    try:
        with contextlib.suppress(OSError):  # no such congestion control: `_set_congestion_control` will tell
            if name not in before.decode().split():
                os.pwrite(listing, before.strip() + f" {name}".encode(), 0)
        yield
    finally:
        os.pwrite(listing, before, 0)
        os.close(listing)


def main() -> int:
    """Build both ends, print one JSON line about them, forward until standard input ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--near", type=int, required=True, help="process in the near network namespace")
    parser.add_argument("--far", type=int, required=True, help="process in the far network namespace")
    parser.add_argument("--mbit", type=float, required=True)
    parser.add_argument("--rtt-ms", type=float, required=True)
    parser.add_argument("--counters", type=Path, required=True, help="file for the shared counters")
    options = parser.parse_args()
    devices, control = [], []
    with _allowed("cubic"):
        for pid, name, address in ((options.near, "wan0", NEAR), (options.far, "wan1", FAR)):
            enter_network(pid)
            devices.append(_open_device(name, address, _merged_bytes(options.mbit)))
            control.append(_set_congestion_control("cubic"))
    with options.counters.open("r+b") as file:
        counters = mmap.mmap(file.fileno(), COUNTERS.size)
    with contextlib.suppress(PermissionError):  # a packet that waits for a CPU is a packet with a longer RTT
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    gc.disable()
    line = _DelayLine(devices[0], devices[1], options.mbit, options.rtt_ms, counters)
    print(json.dumps({"tier": "TUN delay line", "congestion_control": control}), flush=True)
    line.run(sys.stdin.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
