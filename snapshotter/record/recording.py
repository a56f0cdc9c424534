"""One recording: what is written down of it, what it has seen, and the rule by which it ends.

A recording belongs to one snapshot, by its key, and has a slot. `<root>/record/<slot>.json` holds it for as long as the
snapshot lives, also after the recording has ended: the snapshot keeps its private mounts. It is not synced to the disk:
after a reboot no container runs, so the slots of the boot before are given up, and its snapshots use the shared mounts.

The rule (`ending`). A container that fails or dies young is no evidence of what a start needs, so what is not known to
have gone well is thrown away. The first row that fits counts; rows below the first three are for recordings that no
command has asked for, which alone end by themselves:

    reads are missing from the log                             thrown away
    by command: the snapshot is removed                        thrown away
    by command: the window is over, and nobody has ended it    thrown away
    the container's first process has exited with 0            kept: a job that did its work
    it has exited with another status                          thrown away
    the snapshot is removed, or the task is gone, and the
      exit status is not known (a second later: it may come)   thrown away
    the container has not started when the window is over      thrown away
    the window is over                                         kept
    `quiet_s` without a block that is new to the recording     kept
    (from the container's start on; not while a read waits for its blocks, nor while the daemon was down)

Where containerd cannot be asked about the container, the last two rows count from the beginning, as long as the
snapshot exists. A recording without a single block is always thrown away. Pure but for `load` and `save`.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from blockindex.hotset import HotLayer, HotSet, from_touches
from snapshotter.errors import SnapshotterError

from .log import Touch

__all__ = ["End", "Facts", "Recording", "Task", "TaskState", "Touched", "ending"]

_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class Recording:
    """`layers`: the image's layers as `HotSet` has them. `commanded`: a command says when it ends. `began_s`,
    `started_s` (0: not seen yet; of the container) are monotonic seconds of the boot `boot_id`. `is_open`: it has not
    ended. `workload` is `default` while the container is not known, and `argv` the
    digest of its arguments, empty then."""

    slot: int
    key: str
    image: str
    layers: tuple[HotLayer, ...]
    workload: str
    manifest: str
    commanded: bool
    window_s: float
    began_s: float
    boot_id: str
    started_s: float = 0.0
    is_open: bool = True
    argv: str = ""

    @staticmethod
    def load(path: Path) -> "Recording":
        """Read it; SnapshotterError when it cannot be understood."""
        try:
            fields = json.loads(path.read_bytes())
            fields["layers"] = tuple(HotLayer(**layer) for layer in fields["layers"])
            return Recording(**fields)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SnapshotterError(f"{path}: {error}") from error

    def save(self, path: Path) -> None:
        """Write it, whole or not at all."""
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(asdict(self)))
        temporary.rename(path)


class TaskState(Enum):
    """What containerd says of a container's first process. UNKNOWN: it cannot be asked. NONE: not started yet. GONE:
    there was one, but its exit status was not seen."""

    UNKNOWN = "unknown"
    NONE = "none"
    RUNNING = "running"
    EXITED = "exited"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Task:
    """`exit_status` means something for EXITED only."""

    state: TaskState
    exit_status: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """What `ending` judges by. Times are monotonic seconds; `removed_s`: when the snapshot was removed; `new_s`: when a
    block was touched for the first time last (None: there was no such moment); `busy_s`: until when a quiet container
    says nothing, since its reads were waiting, or this process was not there."""

    task: Task
    removed_s: float | None
    new_s: float | None
    busy_s: float
    log_failed: bool


@dataclass(frozen=True, slots=True)
class End:
    """How a recording ends: whether it is kept, and why so in a few words; `is_quiet`: by `quiet_s`."""

    keep: bool
    why: str
    is_quiet: bool = False


class Touched:
    """The blocks that a recording has seen, fed from its log."""

    def __init__(self, recording: Recording, name_of: Callable[[str], str]) -> None:
        """`name_of(digest)` is the node name of a layer."""
        self._recording = recording
        self._rows = {name_of(layer.digest): row for row, layer in enumerate(recording.layers)}
        self._seen: dict[int, bytearray] = {}
        self._touches: list[tuple[int, int, int, int]] = []
        self.blocks = 0
        self.new_s: float | None = None

    def add(self, touch: Touch) -> None:
        """Take note of a read; one of a layer that is not the image's cannot be, and is left out."""
        row = self._rows.get(touch.name)
        if row is None:
            return
        seen = self._seen.setdefault(row, bytearray(self._recording.layers[row].blocks))
        fresh = seen.count(0, touch.start, touch.end)
        if not fresh:
            return
        end = min(touch.end, len(seen))
        seen[touch.start : end] = b"\1" * (end - touch.start)
        self.blocks += fresh
        self.new_s = touch.time_s
        time_ms = round((touch.time_s - self._recording.began_s) * 1000)
        self._touches.append((row, touch.start, end, max(time_ms, 0)))

    def extents(self) -> dict[str, list[tuple[int, int]]]:
        """The blocks that were touched, by layer digest, as runs `[start, end)` that may overlap."""
        runs: dict[str, list[tuple[int, int]]] = {}
        for row, start, end, _ in self._touches:
            runs.setdefault(self._recording.layers[row].digest, []).append((start, end))
        return runs

    def hotset(self) -> HotSet:
        """What was seen, in the order of the first touches."""
        its = self._recording
        return from_touches(its.layers, self._touches, workload=its.workload, manifest=its.manifest)


def ending(recording: Recording, facts: Facts, quiet_s: float, now_s: float) -> End | None:
    """How the recording ends now; None: it goes on."""
    if facts.log_failed:
        return End(False, "its log could not be written")
    over = now_s - recording.began_s >= recording.window_s
    if recording.commanded:
        if facts.removed_s is not None:
            return End(False, "the snapshot was removed before the command ended it")
        return End(False, "no command ended it in time") if over else None
    end = _by_task(facts, now_s) or _by_time(recording, facts, over, quiet_s, now_s)
    if end is not None and end.keep and facts.new_s is None:
        return End(False, "nothing was read")
    return end


def _by_task(facts: Facts, now_s: float) -> End | None:
    state = facts.task.state
    if state is TaskState.EXITED:
        status = facts.task.exit_status
        return End(status == 0, f"the container exited with {status}")
    if facts.removed_s is not None:
        late = now_s - facts.removed_s >= _GRACE_S
        return End(False, "the snapshot was removed, how the container ended is not known") if late else None
    return End(False, "how the container ended is not known") if state is TaskState.GONE else None


def _by_time(recording: Recording, facts: Facts, over: bool, quiet_s: float, now_s: float) -> End | None:
    if facts.removed_s is not None:
        return None
    if facts.task.state is TaskState.NONE:
        return End(False, "the container did not start") if over else None
    if over:
        return End(True, "window_s is over")
    if facts.new_s is None or now_s - max(facts.new_s, facts.busy_s, recording.started_s) < quiet_s:
        return None
    return End(True, "quiet_s without a new block", is_quiet=True)
