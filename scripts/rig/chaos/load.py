"""Much at once, and the same very often: `scripts/chaos --load`. Nothing may fail, and nothing may grow.

First all containers of all images are started together, each by a client of its own, and each reads everything. Then
one layer is prepared and removed again and again, as containerd does it, and what the processes of the daemon hold is
compared between the end and a moment by which all had been done some times.
"""

import json
import re
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from scripts.rig.chaos.containers import Container, told
from scripts.rig.chaos.images import ChaosImage
from scripts.rig.chaos.leaks import Census, census, left_over
from scripts.rig.chaos.site import Site
from scripts.rig.errors import RigError
from scripts.rig.snapshotcalls import SnapshotCalls

__all__ = ["Loaded", "put_load"]

_ALL_READ_S = 300.0
_GC_S = 300.0
_WARM_SHARE = 0.2
_SPARE = {"descriptors": 8, "threads": 4, "rss_mb": 12.0}
"""What a process may have more after all the cycles: pools that fill by chance. One leak in ten cycles is far more."""

Gauges = dict[str, dict[str, float]]


@dataclass(slots=True)
class Loaded:
    """`grown`: for each process, what it has more after the cycles than after the first fifth of them."""

    containers: int = 0
    all_read_s: float = 0.0
    cycles: int = 0
    cycle_ms: float = 0.0
    grown: Gauges = field(default_factory=dict)
    reads: int = 0
    io_errors: int = 0
    mismatches: int = 0
    leaks: int = 0

    @property
    def clean(self) -> bool:
        """Whether nothing failed or grew."""
        return not (self.io_errors or self.mismatches or self.leaks)

    def text(self) -> str:
        """As one line of JSON."""
        return json.dumps(asdict(self))


def put_load(site: Site, each: int, cycles: int, progress: Callable[[str], None]) -> Loaded:
    """`each` containers of every image of the site together, then so many cycles."""
    layers = [layer for image in site.images.values() for layer in image.layers]

    def look() -> Census:
        return census(site.node, site.workspace.root, layers)

    before, loaded = look(), Loaded()
    images = list(site.images.values())
    _together(site, images, each, loaded)
    progress(f"{loaded.containers} containers of {len(images)} images have read all in {loaded.all_read_s:.1f} s")
    for image in images:
        site.client.remove_image(site.reference(image))
    _cycle(site, images[0], cycles, loaded)
    progress(f"{cycles} times prepared and removed, {loaded.cycle_ms:.1f} ms each (median)")
    # hundreds of layers, one after the other: on a busy machine more than one call may take
    site.client.insist("gc", lambda: site.client.bootseer("gc"), _GC_S)
    for what in left_over(before, look, 30.0):
        site.record.leak(what)
    counts = site.record.counts
    loaded.reads, loaded.io_errors = counts.reads, counts.io_errors
    loaded.mismatches, loaded.leaks = counts.mismatches, counts.leaks
    return loaded


def _together(site: Site, images: Sequence[ChaosImage], each: int, loaded: Loaded) -> None:
    """Each image is pulled by a thread, which starts its containers, each by a thread again."""
    out = site.workspace.directory("out")
    began = time.monotonic()

    def start(image: ChaosImage) -> None:
        try:
            site.client.pull(site.reference(image))
        except RigError as error:
            site.record.io_error(f"{image.name} cannot be pulled: {told(error)}")
            return
        _all([lambda number=number: _run(site, image, number, out) for number in range(each)])  # type: ignore[misc]

    _all([lambda image=image: start(image) for image in images])  # type: ignore[misc]
    loaded.containers, loaded.all_read_s = len(images) * each, round(time.monotonic() - began, 2)


def _run(site: Site, image: ChaosImage, number: int, out: Path) -> None:
    name = f"{image.name}-{number}"
    container = Container(site.client, image, site.reference(image), name, out / f"{name}.out", always=False)
    try:
        container.start()
    except RigError as error:
        site.record.io_error(f"{name} does not start: {told(error)}")
        return
    give_up = time.monotonic() + _ALL_READ_S
    while not container.finished and time.monotonic() < give_up:
        container.harvest()
        time.sleep(0.1)
    if container.right != len(image.digests):
        site.record.io_error(f"{name} has read {container.right} files of {len(image.digests)}")
    container.stop()


def _all(calls: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _cycle(site: Site, image: ChaosImage, cycles: int, loaded: Loaded) -> None:
    calls, took = SnapshotCalls(site.node.daemon_socket), []
    warm, early = max(1, int(cycles * _WARM_SHARE)), _gauges(site)
    digests = image.layers[:1]
    try:
        for number in range(cycles):
            if number == warm:
                early = _gauges(site)
            began = time.monotonic()
            calls.prepare(site.reference(image), digests)
            calls.remove(digests)
            took.append((time.monotonic() - began) * 1000)
    finally:
        calls.close()
    loaded.cycles, loaded.cycle_ms = cycles, round(statistics.median(took), 1)
    loaded.grown = _grown(early, _gauges(site))
    for process, grown in loaded.grown.items():
        for what, count in grown.items():
            if count > _SPARE[what]:
                site.record.leak(f"{process} has {count:g} {what} more after {cycles - warm} cycles")


def _gauges(site: Site) -> Gauges:
    return {row["name"]: _gauge(row["pid"]) for row in site.status()["processes"]}


def _gauge(pid: int) -> dict[str, float]:
    status = Path(f"/proc/{pid}/status").read_text()
    numbers: Mapping[str, str] = dict(re.findall(r"^(Threads|VmRSS):\s+(\d+)", status, re.MULTILINE))
    return {
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "threads": int(numbers["Threads"]),
        "rss_mb": int(numbers["VmRSS"]) / 1000,
    }


def _grown(early: Gauges, late: Gauges) -> Gauges:
    return {
        process: {what: round(count - early[process][what], 1) for what, count in gauge.items()}
        for process, gauge in late.items()
    }
