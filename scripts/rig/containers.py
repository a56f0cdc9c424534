"""Containers of one image started at once, and the first line of each: a blocking read, no poll."""

import os
import selectors
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from scripts.rig.errors import RigError
from scripts.rig.image import Recipe
from scripts.rig.node import Node
from scripts.rig.process import end, spawn
from scripts.rig.workspace import Workspace

__all__ = ["Containers", "FirstLine", "run_words"]


@dataclass(frozen=True, slots=True)
class FirstLine:
    """A container's first line without its end, when it arrived (monotonic), and how long after the order to run."""

    text: str
    at: float
    after_s: float


class Containers:
    """`count` running `ctr run` commands. `words` are theirs before and after the container's name."""

    def __init__(
        self, workspace: Workspace, node: Node, name: str, words: tuple[list[str], list[str]], count: int
    ) -> None:
        self._errors = [workspace.root / f"{name}-{number}.errors" for number in range(count)]
        self._processes: list[subprocess.Popen[bytes]] = []
        before, after = words
        self._started = time.monotonic()
        try:
            for number, path in enumerate(self._errors):
                argv = node.ctr(*before, f"{name}-{number}", *after)
                with path.open("wb") as log:
                    self._processes.append(spawn(argv, workspace.env, stdout=subprocess.PIPE, stderr=log))
        except BaseException:
            self._end()
            raise

    def first_lines(self, deadline: float) -> list[FirstLine]:
        """The first line of each container; RigError unless all arrive before `deadline` (monotonic)."""
        data = [b""] * len(self._processes)
        found: dict[int, FirstLine] = {}
        with selectors.DefaultSelector() as selector:
            for number, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout.fileno(), selectors.EVENT_READ, number)
            while len(found) < len(self._processes):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise RigError(f"no line from the container in time; {_text(self._errors[0])}")
                for key, _ in ready:
                    number = key.data
                    chunk = os.read(key.fd, 4096)
                    if not chunk:
                        raise RigError(f"the container ended without a line; {_text(self._errors[number])}")
                    data[number] += chunk
                    if b"\n" in data[number]:
                        now = time.monotonic()
                        text = data[number].split(b"\n", 1)[0].decode(errors="replace").rstrip("\r")
                        found[number] = FirstLine(text, now, now - self._started)
                        selector.unregister(key.fd)
        return [found[number] for number in range(len(self._processes))]

    def wait(self) -> None:
        """Wait until all have ended; RigError if one does not within 30 s, or fails."""
        for process, errors in zip(self._processes, self._errors, strict=True):
            try:
                code = process.wait(30)
            except subprocess.TimeoutExpired:
                raise RigError("the container was ready, but did not end within 30 s") from None
            if code != 0:
                raise RigError(f"the container ended with exit code {code}: {_text(errors)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        for process in self._processes:
            end(process, grace_s=0)
            if process.stdout is not None:
                process.stdout.close()

    def __repr__(self) -> str:
        return f"<Containers {len(self._processes)}>"


def run_words(recipe: Recipe, snapshotter: str, reference: str) -> tuple[list[str], list[str]]:
    """The words of `ctr run` before and after the container's name."""
    # No cgroup of its own: a new parent group named after the namespace would stay on the machine.
    before = ["run", "--rm", "--cgroup", "", "--snapshotter", snapshotter, reference]
    return before, list(recipe.command) if recipe.layers_of else []


def _text(errors: Path) -> str:
    return errors.read_text(errors="replace").strip()
