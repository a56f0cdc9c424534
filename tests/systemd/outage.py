"""How long containerd's calls fail or wait when something of the daemon ends:
`sudo .venv/bin/python -m tests.systemd.outage`.

A containerd of our own asks the daemon for a snapshot, again and again, since somebody asks it; meanwhile the service
is killed, the whole daemon is killed or restarted by a service manager that keeps its descriptors, or an upgrade is
made. Printed for each kind: how many calls failed, from the first failure to the last, and the longest that worked.
"""

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from proto import snapshots_pb2, snapshots_pb2_grpc
from tests.snapshotter.daemon import origin
from tests.systemd.managed import Managed, as_installed

__all__ = ["Asker", "Outage", "containerd", "main"]

_NAME = "bootseer-outage"
_AROUND_S = 0.2
_OVER_S = 4.0  # containerd pauses for 1 s at first, and for 3 s at most
_METADATA = (("containerd-namespace", "default"),)
_CONFIG = """
version = 2
root = "{home}/c/root"
state = "{home}/c/state"
plugin_dir = "{home}/c/plugins"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.devmapper"]
[grpc]
  address = "{home}/c.sock"
[proxy_plugins.{name}]
  type = "snapshot"
  address = "{socket}"
"""


@dataclass(frozen=True, slots=True)
class Outage:
    """What happened to calls: how many failed, seconds from the first failure's begin to the last one's end, seconds
    that the longest good call took."""

    failed: int
    failing_s: float
    longest_s: float


@contextmanager
def containerd(home: Path, socket: Path) -> Iterator[Path]:
    """A containerd with the snapshotter on `socket`; its own socket."""
    config, log = home / "containerd.toml", home / "containerd.log"
    config.write_text(_CONFIG.format(home=home, name=_NAME, socket=socket))
    with log.open("ab") as output:
        process = subprocess.Popen(
            ["containerd", "-c", str(config)], stdout=output, stderr=output, stdin=subprocess.DEVNULL
        )
    try:
        with grpc.insecure_channel(f"unix://{home}/c.sock") as channel:
            grpc.channel_ready_future(channel).result(timeout=60)
        yield home / "c.sock"
    finally:
        process.terminate()
        process.wait(30)


class Asker:
    """Has containerd ask for a snapshot, in a thread."""

    def __init__(self, socket: Path) -> None:
        self._channel = grpc.insecure_channel(f"unix://{socket}")
        self._stub = snapshots_pb2_grpc.SnapshotsStub(self._channel)  # type: ignore[no-untyped-call]  # generated
        prepare = snapshots_pb2.PrepareSnapshotRequest(snapshotter=_NAME, key="asked-for")
        self._stub.Prepare(prepare, metadata=_METADATA, timeout=60)
        self._calls: list[tuple[float, float, str]] = []
        self._stop = False
        self._thread = threading.Thread(target=self._ask, name="asker")

    def __enter__(self) -> "Asker":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop = True
        self._thread.join()
        self._channel.close()

    def taken(self) -> Outage:
        """What happened since it was asked last."""
        calls, self._calls = self._calls, []
        failed = [(began, ended) for began, ended, wrong in calls if wrong]
        good = [ended - began for began, ended, wrong in calls if not wrong]
        return Outage(len(failed), failed[-1][1] - failed[0][0] if failed else 0.0, max(good, default=0.0))

    def _ask(self) -> None:
        request = snapshots_pb2.StatSnapshotRequest(snapshotter=_NAME, key="asked-for")
        while not self._stop:
            began, wrong = time.monotonic(), ""
            try:
                self._stub.Stat(request, metadata=_METADATA, timeout=60)
            except grpc.RpcError as error:
                wrong = str(error.details())  # type: ignore[attr-defined]  # of a call that has failed
            self._calls.append((began, time.monotonic(), wrong))
            time.sleep(0.002)


def main(argv: list[str]) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="outage", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--turns", type=int, default=20, help="how often each is done (default: 20)")
    turns = parser.parse_args(argv).turns
    with tempfile.TemporaryDirectory(prefix="bs-outage-") as home, origin() as registry:
        as_installed(Path(home))
        with (
            Managed(Path(home), registry, "") as daemon,
            containerd(Path(home), daemon.run / "bootseer.sock") as socket,
            Asker(socket) as asker,
        ):
            kinds: dict[str, Callable[[], None]] = {
                "nothing": lambda: None,
                "service killed": lambda: daemon.kill("service"),
                "all killed, started again": lambda: daemon.restarted(signal.SIGKILL),
                "restarted": lambda: daemon.restarted(signal.SIGTERM),
                "upgraded in place": daemon.upgraded,
            }
            print(f"median and most of {turns}     calls failed        for, ms      longest good, ms")
            for kind, act in kinds.items():
                outages = [_outage(asker, act, _AROUND_S if kind == "nothing" else _OVER_S) for _ in range(turns)]
                failed = [it.failed for it in outages]
                failing = [it.failing_s * 1000 for it in outages]
                longest = [it.longest_s * 1000 for it in outages]
                print(
                    f"{kind:28} {statistics.median(failed):7.0f} {max(failed):6.0f} {statistics.median(failing):9.0f}"
                    f" {max(failing):6.0f} {statistics.median(longest):11.0f} {max(longest):6.0f}",
                    flush=True,
                )
    return 0


def _outage(asker: Asker, act: Callable[[], None], over_s: float) -> Outage:
    time.sleep(_AROUND_S)
    asker.taken()
    act()
    time.sleep(over_s)
    return asker.taken()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
