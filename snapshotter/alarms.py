"""What an operator has to know until he says that he does: packs whose bytes a layer has refuted.

A file `<root>/alarms/<layer's node name>-<digits of the pack>` for each layer and pack, a JSON object; a later finding
about the same two is added to it. One process, the fetch process, raises alarms; any may list and clear them. After
that the pack goes into quarantine, where it stays when the alarm is cleared. In this order: what is in quarantine is
not looked at again, so a process that is killed in between has a successor that finds the same once more, and the alarm
is raised in any case.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .errors import NotFound, SnapshotterError
from .killpoints import reach
from .trust.quarantine import Quarantine
from .unproven import Pack

__all__ = ["Alarm", "Alarms"]

_log = logging.getLogger(__name__)

_RUNS = 256
_FILES = 4096
_SHOWN = 32  # of either, in the log line


@dataclass(frozen=True, slots=True)
class Alarm:
    """Blocks `runs` (half-open, the first `_RUNS` runs) of a layer came wrong in a pack; `files` (the first `_FILES`)
    hold them. `served`: containers may have read them, else they were refused before. `images`: those that the layer
    was pulled for. `at`: seconds since 1970."""

    id: str
    at: float
    layer: str
    name: str
    images: tuple[str, ...]
    pack: Pack
    runs: tuple[tuple[int, int], ...]
    files: tuple[str, ...]
    served: bool

    @property
    def blocks(self) -> int:
        """Blocks of all runs."""
        return sum(end - start for start, end in self.runs)


class Alarms:
    """Those below `root`. Thread-safe."""

    def __init__(self, root: Path, raised: Callable[[str], None] | None = None) -> None:
        """`raised(digest)` is called, on a thread of its own, after an alarm about the pack with this digest."""
        self._directory = root / "alarms"
        self._quarantine = Quarantine(root)
        self._raised = raised
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Alarms {self._directory}: {len(self.entries())}>"

    def is_refuted(self, digest: str) -> bool:
        """Whether a pack must not be used any more."""
        return self._quarantine.is_quarantined(digest)

    def raise_(
        self,
        layer: str,
        name: str,
        images: Iterable[str],
        pack: Pack,
        runs: Sequence[tuple[int, int]],
        files: Sequence[str],
        served: bool,
    ) -> None:
        """A pack's blocks are wrong. Never raises: what the disk refuses is logged all the same."""
        id_ = f"{name}-{pack.digest.removeprefix('sha256:')[:12] or 'unknown'}"
        alarm = Alarm(id_, time.time(), layer, name, tuple(images), pack, tuple(runs), tuple(files[:_FILES]), served)
        _log.error(
            "pack.refuted layer=%s images=%s blocks=%s files=%r served=%s pack=%s from=%s key=%s image_key=%s"
            " the layer's own bytes are used; restart the containers of these images, then `bootseer alarm clear`",
            layer,
            ",".join(alarm.images),
            ",".join(f"{start}-{end}" for start, end in runs[:_SHOWN]),
            ", ".join(alarm.files[:_SHOWN]),
            str(served).lower(),
            pack.digest,
            pack.where,
            pack.key or "none",
            pack.image_key,
        )
        try:
            self._add(alarm)
        except OSError as error:
            _log.error("alarm.not_kept id=%s error=%r", id_, str(error))
        reach("fetch.alarmed")
        try:
            if pack.digest:
                self._quarantine.add(pack.digest, f"blocks of layer {layer} were wrong, found at {pack.where}")
        except OSError as error:
            _log.error("pack.not_quarantined pack=%s error=%r", pack.digest, str(error))
        reach("fetch.quarantined")
        if self._raised is not None and pack.digest:
            try:
                threading.Thread(target=self._raised, args=(pack.digest,), name="alarm", daemon=True).start()
            except RuntimeError as error:  # no thread to be had: the quarantine counts when layers are opened
                _log.error("alarm.not_heard id=%s error=%r", id_, str(error))

    def _add(self, alarm: Alarm) -> None:
        with self._lock:
            known = self._load(alarm.id)
            if known is not None:
                alarm = replace(
                    alarm,
                    at=known.at,
                    runs=tuple(_union([*known.runs, *alarm.runs]))[:_RUNS],
                    files=tuple(dict.fromkeys((*known.files, *alarm.files)))[:_FILES],
                    served=known.served or alarm.served,
                )
            self._directory.mkdir(mode=0o700, exist_ok=True)
            temporary = self._directory / f".{alarm.id}"
            temporary.write_text(json.dumps(asdict(alarm)), encoding="utf-8")
            reach("fetch.alarm-written")
            temporary.rename(self._directory / alarm.id)

    def entries(self) -> list[Alarm]:
        """All of them, the oldest first. SnapshotterError when the directory cannot be read."""
        try:
            names = [name for name in os.listdir(self._directory) if not name.startswith(".")]
            found = [alarm for alarm in map(self._load, names) if alarm is not None]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise SnapshotterError(f"{self._directory}: cannot be read: {error.strerror}") from error
        return sorted(found, key=lambda alarm: (alarm.at, alarm.id))

    def clear(self, id_: str) -> None:
        """Forget an alarm. NotFound when there is none; SnapshotterError when the disk refuses."""
        if id_ not in {alarm.id for alarm in self.entries()}:
            raise NotFound(f"{id_}: there is no such alarm: see `bootseer alarm ls`")
        try:
            (self._directory / id_).unlink(missing_ok=True)
        except OSError as error:
            raise SnapshotterError(f"{self._directory / id_}: cannot be removed: {error.strerror}") from error

    def _load(self, id_: str) -> Alarm | None:
        try:
            fields = json.loads((self._directory / id_).read_bytes())
            fields["pack"] = Pack(**fields["pack"])
            fields["runs"] = tuple((int(start), int(end)) for start, end in fields["runs"])
            fields["files"], fields["images"] = tuple(fields["files"]), tuple(fields["images"])
            return Alarm(**fields)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            _log.warning("alarm.damaged id=%s error=%r", id_, str(error))
            return None


def _union(runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The runs, joined where they overlap or touch, ascending."""
    last: tuple[int, int] | None = None
    for start, end in sorted(runs):
        if last is not None and start <= last[1]:
            last = last[0], max(last[1], end)
            continue
        if last is not None:
            yield last
        last = start, end
    if last is not None:
        yield last
