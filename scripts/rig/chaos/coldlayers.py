"""Something to fetch, always: images whose layers are removed, pulled again, and read by a container at once.

A pull may fail while the registry does, or a process of the daemon has just been killed, or the disk is full: the
client is told so and comes again. Once a container runs, each of its reads must succeed.
"""

import itertools
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.rig.chaos.containers import Client, Container, told
from scripts.rig.chaos.images import ChaosImage
from scripts.rig.errors import RigError

__all__ = ["ColdLayers"]

_READ_S = 120.0
"""Time for one container to read all, whatever happens: far above any of the disturbances, far below a reader's end."""


class ColdLayers:
    """A thread that goes through these images (reference and image) in turn, from `start` to `stop`."""

    def __init__(self, client: Client, images: Sequence[tuple[str, ChaosImage]], directory: Path, name: str) -> None:
        self._client, self._images, self._directory, self._name = client, images, directory, name
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name)
        self.turns = 0

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Begin nothing new, and end with the container that runs."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        for number, (reference, image) in enumerate(itertools.cycle(self._images)):
            if self._stop.is_set():
                return
            try:
                self._turn(number, reference, image)
            except RigError as error:  # a client's call that failed: it comes again
                self._client.record.note(f"{self._name}: {told(error)}")
                self._stop.wait(0.2)

    def _turn(self, number: int, reference: str, image: ChaosImage) -> None:
        record, client = self._client.record, self._client
        began = time.monotonic()
        client.pull(reference)
        pulled = time.monotonic()
        name = f"{self._name}-{number}"
        container = Container(client, image, reference, name, self._directory / f"{name}.out", always=False)
        try:
            container.start()
            started = time.monotonic()
            self._read(container, len(image.digests))
            text = f"pull {pulled - began:.2f} s, start {started - pulled:.2f} s, {time.monotonic() - started:.2f} s"
            record.note(f"{name}: {image.name} read: {text}")
        finally:
            container.stop()
            if not client.insist(f"removing {image.name}", lambda: client.remove_image(reference)):
                record.leak(f"image {reference} cannot be removed")
        client.bootseer("gc")
        self.turns += 1

    def _read(self, container: Container, files: int) -> None:
        """Wait until the container has read all, and count it as an error if it does not."""
        give_up, look_at = time.monotonic() + _READ_S, time.monotonic() + 1
        while not container.finished:
            container.harvest()
            now = time.monotonic()
            if now > give_up:
                self._client.record.io_error(f"{container.name} has not read all within {_READ_S:.0f} s")
                return
            if now > look_at and not container.finished:
                look_at = now + 1
                if self._has_ended(container):
                    self._client.record.io_error(f"{container.name} has ended before it had read all")
                    return
            time.sleep(0.05)
        if container.right != files and not container.failed:
            self._client.record.io_error(f"{container.name} has read {container.right} files of {files}")

    def _has_ended(self, container: Container) -> bool:
        try:
            state = self._client.tasks().get(container.name)
        except RigError:  # containerd is just being started
            return False
        if state != "STOPPED":
            return False
        container.harvest()
        return not container.finished

    def __repr__(self) -> str:
        return f"<ColdLayers {self._name} {self.turns} turns>"
