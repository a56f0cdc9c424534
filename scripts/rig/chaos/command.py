"""`scripts/chaos`: everything that may happen to a node happens to this one, and its containers must not notice.

A run is: pull a steady image and read it without end, from containers and straight from its mounts; pull cold images
again and again; disturb all that for `--seconds`; then stop disturbing, see that every reader goes on, take everything
away, and look for what is left. The order of disturbances follows from the seed; what they meet does not, for that is a
matter of microseconds. With a failure the logs are kept, and a line says where. `--load` is another run: see `load`.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from scripts.rig.arguments import count, positive
from scripts.rig.chaos.coldlayers import ColdLayers
from scripts.rig.chaos.containers import Container
from scripts.rig.chaos.disturbers import Disturber, all_of
from scripts.rig.chaos.leaks import Census, census, left_over
from scripts.rig.chaos.load import Loaded, put_load
from scripts.rig.chaos.readers import LayerReaders
from scripts.rig.chaos.record import Counts, Record
from scripts.rig.chaos.site import Site
from scripts.rig.errors import RigError
from scripts.rig.interrupt import Interrupted, arm, disarm, leave
from scripts.rig.process import wait_for
from scripts.rig.progress import Progress

__all__ = ["main"]

_MB, _SMALL = 1_000_000, 2000
_SIZES = {"steady": (6 * _MB, 3 * _MB), "cold-0": (5 * _MB,), "cold-1": (3 * _MB, 3 * _MB), "cold-2": (4 * _MB,)}
_WITHOUT_INDEX = ("cold-2",)
_THREADS = {"cold-a": ("cold-0", "cold-2"), "cold-b": ("cold-1",)}
_STEADY_CONTAINERS = 2
_PATIENCE_S = 60.0
_KEPT = Path("/var/tmp")


class Run:
    """One run on an open site."""

    def __init__(self, site: Site, source: random.Random, progress: Progress) -> None:
        self._site, self._source, self._progress = site, source, progress
        self._record = site.record
        self._out = site.workspace.directory("out")
        steady = site.images["steady"]
        names = [f"steady-{number}" for number in range(_STEADY_CONTAINERS)]
        self._steady = [
            Container(site.client, steady, site.reference(steady), name, self._out / f"{name}.out", always=True)
            for name in names
        ]
        self._cold = [
            ColdLayers(
                site.client, [(site.reference(site.images[one]), site.images[one]) for one in images], self._out, name
            )
            for name, images in _THREADS.items()
        ]

    def __call__(self, seconds: float) -> None:
        """The whole of it; what was found is in the record."""
        layers = [layer for image in self._site.images.values() for layer in image.layers]
        before = census(self._site.node, self._site.workspace.root, layers)
        self._begin()
        with LayerReaders(self._site, self._site.images["steady"], self._source) as readers:
            disturbers = all_of(self._site)
            try:
                for cold in self._cold:
                    cold.start()
                self._disturb(disturbers, seconds, readers)
            finally:
                for disturber in disturbers:
                    disturber.calm()
                for cold in self._cold:
                    cold.stop()
            self._progress("disturbed enough; everything must go on now")
            self._go_on(readers)
        for container in self._steady:
            container.stop()
        self._clean(before, lambda: census(self._site.node, self._site.workspace.root, layers))
        log = self._site.node.daemon_log.read_text()
        self._record.counts.upgrades = log.count(" upgrade.done ")
        self._record.counts.faults += self._site.proxy.finish()

    def _begin(self) -> None:
        """The steady image is complete, and read by its containers."""
        image = self._site.images["steady"]
        self._site.client.pull(self._site.reference(image))
        for container in self._steady:
            container.start()
        complete = lambda: all(row["state"] == "complete" for row in self._site.status()["layers"])  # noqa: E731
        wait_for(complete, "waiting for a complete layer", None, _PATIENCE_S)
        self._progress("the steady image is complete and read; now all is disturbed")

    def _disturb(self, disturbers: Sequence[Disturber], seconds: float, readers: LayerReaders) -> None:
        record, source = self._record, self._source
        end = time.monotonic() + seconds
        due = {one.name: time.monotonic() + source.expovariate(1 / one.every_s) for one in disturbers}
        told = time.monotonic()
        while (now := time.monotonic()) < end:
            self._look(readers)
            if now - told > 10:
                told = now
                self._tell()
            one = min(disturbers, key=lambda one: due[one.name])
            if due[one.name] > now:
                time.sleep(min(0.1, due[one.name] - now))
                continue
            text = one.act(source)
            record.note(f"{one.name}: {text or 'nothing to do it to'}")
            due[one.name] = time.monotonic() + source.expovariate(1 / one.every_s)

    def _look(self, readers: LayerReaders) -> None:
        """Take in what was read; start a daemon that has ended by itself, as a service manager would."""
        for container in self._steady:
            container.harvest()
        readers.harvest()
        manager = self._site.node.manager
        assert manager is not None
        if manager.process.poll() is not None:
            self._record.note(f"the daemon ended by itself, with code {manager.process.returncode}; started again")
            manager.start()

    def _tell(self) -> None:
        counts = self._record.counts
        turns = sum(cold.turns for cold in self._cold)
        bad = f", PROBLEMS {len(self._record.problems)}" if self._record.problems else ""
        self._progress(f"{counts.kills} kills, {counts.reads} reads, {turns} cold images{bad}")

    def _go_on(self, readers: LayerReaders) -> None:
        """Each reader must read everything once more."""
        files = len(self._site.images["steady"].digests)
        wanted = {container.name: container.right + files for container in self._steady}
        give_up = time.monotonic() + _PATIENCE_S
        self._site.client.insist("asking for tasks", self._site.client.tasks)
        tasks = self._site.client.tasks()
        for container in self._steady:
            if tasks.get(container.name) != "RUNNING":
                self._record.io_error(f"{container.name} does not run any more: {tasks.get(container.name)}")
                continue
            while container.right < wanted[container.name] and time.monotonic() < give_up:
                self._look(readers)
                time.sleep(0.1)
            if container.right < wanted[container.name]:
                self._record.io_error(f"{container.name} does not go on")
        readers.go_on(_PATIENCE_S)

    def _clean(self, before: Census, look: Callable[[], Census]) -> None:
        """Everything is taken away; what is left then has leaked."""
        client = self._site.client
        self._site.node.end_containers()  # of those whose start was cut short by the end of containerd
        for image in self._site.images.values():
            reference = self._site.reference(image)
            client.insist(f"removing {image.name}", lambda reference=reference: client.remove_image(reference))  # type: ignore[misc]
        client.insist("removing leases", client.remove_leases)
        client.insist("gc", lambda: client.bootseer("gc"))
        for what in left_over(before, look, 30.0):
            self._record.leak(what)


def main(argv: Sequence[str] | None = None) -> int:
    """0 if no reader noticed anything and nothing is left, 1 if not, 128 + signal if interrupted."""
    options = _parse(argv)
    if os.geteuid() != 0:
        print("chaos: namespaces and mounts need root; run: sudo ./scripts/chaos", file=sys.stderr)
        return 2
    arm()
    try:
        with ExitStack() as stack:
            try:
                result = _load(options, stack) if options.load else _disturbed(options, stack)
            finally:
                disarm()
    except Interrupted as interrupted:
        print(f"chaos: interrupted by {signal.Signals(interrupted.number).name}, all cleaned up", file=sys.stderr)
        return 128 + interrupted.number
    except RigError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 1
    text = result.text()
    if options.json is not None:
        options.json.write_text(f"{text}\n")
    print(text)
    return 0 if result.clean else 1


def _disturbed(options: argparse.Namespace, stack: ExitStack) -> Counts:
    progress, source = Progress(), random.Random(options.seed)
    site = Site(stack, _SIZES, _WITHOUT_INDEX, source, _record, progress, armed=True)
    with _kept(site, options):
        Run(site, source, progress)(options.seconds)
    return site.record.counts


def _load(options: argparse.Namespace, stack: ExitStack) -> Loaded:
    progress = Progress()
    many = [(_SMALL,) * (count - 1) for count in options.layers]
    sizes = {f"load-{at}": layers for at, layers in enumerate([*many, *[(_MB,)] * options.images][: options.images])}
    site = Site(stack, sizes, (), random.Random(options.seed), _record, progress)
    with _kept(site, options):
        return put_load(site, options.containers, options.cycles, progress)


@contextmanager
def _kept(site: Site, options: argparse.Namespace) -> Iterator[None]:
    """The logs stay if the block fails or found anything, and say so."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Interrupted):
            _keep(site, options.seed)
        raise
    for problem in site.record.problems:
        print(f"chaos: {problem}", file=sys.stderr)
    if site.record.problems or options.keep:
        _keep(site, options.seed)


def _record(directory: Path) -> Record:
    return Record(directory / "actions.log")


def _keep(site: Site, seed: int) -> None:
    """Copy the logs to a place that stays, and say where."""
    kept = _KEPT / f"bootseer-chaos-{seed}-{os.getpid()}"
    site.node.keep_logs(kept)
    shutil.copy(site.record.path, kept)
    for output in (site.workspace.root / "out").glob("*"):
        shutil.copy(output, kept)
    with (kept / "dmesg").open("wb") as out:
        subprocess.run(["dmesg"], stdout=out, stderr=subprocess.DEVNULL, check=False)
    print(f"chaos: logs kept in {kept}", file=sys.stderr)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=positive, default=60.0, metavar="N", help="how long all is disturbed (60)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of contents and order of disturbances (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")
    parser.add_argument("--keep", action="store_true", help="keep the logs even if all went well")
    parser.add_argument("--load", action="store_true", help="instead: many containers at once, one layer very often")
    parser.add_argument("--images", type=count, default=10, metavar="N", help="with --load: images (10)")
    layers = "with --load: layers of the first images, the others have two (128 64)"
    parser.add_argument("--layers", type=_layers, nargs="*", default=[128, 64], metavar="N", help=layers)
    parser.add_argument("--containers", type=count, default=5, metavar="N", help="with --load: of each image (5)")
    parser.add_argument("--cycles", type=count, default=1000, metavar="N", help="with --load: of one layer (1000)")
    options = parser.parse_args(argv)
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: no directory {options.json.absolute().parent}")
    return options


def _layers(text: str) -> int:
    value = int(text)
    if not 2 <= value <= 400:  # overlayfs takes no more than 500
        raise argparse.ArgumentTypeError("must be from 2 to 400")
    return value


if __name__ == "__main__":
    leave(main())
