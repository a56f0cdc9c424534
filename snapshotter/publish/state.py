"""What a node has published, where, and which places it leaves alone for a while: `<root>/publishing.json`; and below
`<root>/published` the hot sets as they were when they were published, without bytes.

One process at a time writes here (`rounds` holds the lock); anybody reads: a file appears whole. What cannot be read
counts as nothing done: the places are looked at before anything is put there, so that costs requests and no harm.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from snapshotter.errors import Denied
from snapshotter.killpoints import reach

__all__ = ["Done", "Pause", "State"]

_VERSION = 1
_MOST_DONE = 256
_FIRST_PAUSE_S = 60.0
_LONGEST_PAUSE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Done:
    """What became of an artifact. `what`: layer-index or hot-set; `status`: published; there (it, or one as good, was
    already); refused (what is there is signed, and stays); waiting (not all layers are here). `digest` of the manifest,
    "" for plain files; `fingerprint` of what it was made of: the same is not tried again; `at`: seconds since 1970."""

    what: str
    image: str
    workload: str
    to: str
    status: str
    fingerprint: str
    at: float
    digest: str = ""
    reason: str = ""

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """What there is one entry of."""
        return self.what, self.image, self.workload, self.to


@dataclass(frozen=True, slots=True)
class Pause:
    """A place, or an image, that failed so many times in a row, and is left alone until then (seconds since 1970)."""

    to: str
    failures: int
    until: float
    error: str


@dataclass(frozen=True, slots=True)
class State:
    """See the module."""

    done: tuple[Done, ...] = ()
    pauses: tuple[Pause, ...] = ()

    @staticmethod
    def load(root: Path) -> "State":
        """The node's state; an empty one where there is none that can be read."""
        try:
            fields = json.loads(_path(root).read_bytes())
            if fields["version"] != _VERSION:
                return State()
            return State(tuple(Done(**row) for row in fields["done"]), tuple(Pause(**row) for row in fields["pauses"]))
        except (OSError, ValueError, TypeError, KeyError):
            return State()

    def save(self, root: Path) -> None:
        """OSError when the disk refuses."""
        temporary = _path(root).with_suffix(".new")
        temporary.write_text(json.dumps({"version": _VERSION, **self.document()}))
        reach("publish.state-written")
        temporary.rename(_path(root))

    def document(self) -> dict[str, list[dict[str, object]]]:
        """As JSON has it."""
        return {"done": [asdict(row) for row in self.done], "pauses": [asdict(row) for row in self.pauses]}

    def find(self, what: str, image: str, workload: str, to: str) -> Done | None:
        """What became of an artifact the last time."""
        return next((row for row in self.done if row.identity == (what, image, workload, to)), None)

    def with_done(self, row: Done) -> "State":
        """With this entry, the newest, in place of the one that there was. Its place and its image work."""
        others = [it for it in self.done if it.identity != row.identity]
        return State((*others, row)[-_MOST_DONE:], _others(_others(self.pauses, row.to), row.image))

    def is_paused(self, to: str, now: float) -> bool:
        """Whether the place, or image, is to be left alone."""
        return any(pause.to == to and now < pause.until for pause in self.pauses)

    def with_failure(self, to: str, error: Exception, now: float) -> "State":
        """The place, or image, has failed: the pause doubles up to an hour, and is an hour where it refuses us."""
        failures = next((pause.failures for pause in self.pauses if pause.to == to), 0)
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(failures, 16), _LONGEST_PAUSE_S)
        if isinstance(error, Denied):
            pause_s = _LONGEST_PAUSE_S
        pause_s = max(pause_s, getattr(error, "retry_after_s", None) or 0.0)
        failed = Pause(to, failures + 1, now + pause_s, str(error))
        return replace(self, pauses=(*_others(self.pauses, to), failed)[-_MOST_DONE:])


def _others(pauses: Iterable[Pause], to: str) -> tuple[Pause, ...]:
    return tuple(pause for pause in pauses if pause.to != to)


def _path(root: Path) -> Path:
    return root / "publishing.json"
