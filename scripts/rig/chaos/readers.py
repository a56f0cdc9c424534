"""Processes on the node that read a complete image's layers straight from their mounts, and time each read.

The longest read of theirs is the pause that a container sees: nothing they ask for has to come from a registry.
"""

import json
import random
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from scripts.rig.chaos import reader
from scripts.rig.chaos.images import ChaosImage
from scripts.rig.chaos.site import Site
from scripts.rig.process import end, spawn

__all__ = ["LayerReaders"]


class LayerReaders:
    """One process for each data layer of the image, which is mounted. A context manager."""

    def __init__(self, site: Site, image: ChaosImage, source: random.Random) -> None:
        self._site, self._image = site, image
        self._seed = source.randrange(1 << 30)
        self._directory = site.workspace.directory("readers")
        self._processes: dict[Path, subprocess.Popen[bytes]] = {}
        self._offsets: dict[Path, int] = {}
        self._right: dict[Path, int] = {}

    def __enter__(self) -> Self:
        for number, layer in enumerate(self._image.layers[1:]):
            listing, out = self._directory / f"{number}.json", self._directory / f"{number}.out"
            listing.write_text(
                json.dumps({n: d for n, d in self._image.digests.items() if n.startswith(f"/data/{number}/")})
            )
            mount = self._site.node.daemon_root / "m" / layer.removeprefix("sha256:")[:14]
            argv = ["python3", reader.__file__, mount, listing, self._seed + number]
            with out.open("wb") as file:
                command = self._site.node.command([str(word) for word in argv])
                self._processes[out] = spawn(command, self._site.workspace.env, stdout=file, stderr=file)
            self._offsets[out] = self._right[out] = 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            end(process, grace_s=0)

    def harvest(self) -> None:
        """Take in what they have found since the last call."""
        record = self._site.record
        for out, process in self._processes.items():
            if process.poll() is not None and self._offsets[out] >= 0:
                record.io_error(f"a reader of a layer has ended with code {process.returncode}")
                self._offsets[out] = -1
            if self._offsets[out] < 0:
                continue
            with out.open("rb") as file:
                file.seek(self._offsets[out])
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[out] += len(whole)
            for line in whole.decode(errors="replace").splitlines():
                self._judge(out, line)

    def go_on(self, patience_s: float) -> None:
        """Each must read on now; those that do not are errors."""
        give_up = time.monotonic() + patience_s
        wanted = {out: right + 5 for out, right in self._right.items()}
        while any(self._right[out] < count for out, count in wanted.items()) and time.monotonic() < give_up:
            self.harvest()
            time.sleep(0.05)
        for out, count in wanted.items():
            if self._right[out] < count:
                self._site.record.io_error(f"reader {out.stem} of a layer does not go on")

    def _judge(self, out: Path, line: str) -> None:
        record = self._site.record
        verdict, _, rest = line.partition(" ")
        if verdict == "ok":
            self._right[out] += 1
            record.read()
            record.pause(float(rest))
        elif verdict == "mismatch":
            record.mismatch(f"reader {out.stem}: {rest}")
        else:
            record.io_error(f"reader {out.stem}: {line}")

    def __repr__(self) -> str:
        return f"<LayerReaders {sum(self._right.values())} files right>"
