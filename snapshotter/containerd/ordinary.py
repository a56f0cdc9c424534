"""Image layers that are not served lazily: why not, and how many. A full pull never happens without being counted here.

`LazyRules` says for which images the operator wants none; the other reasons are found where layers are prepared.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase

from snapshotter.errors import InvalidArgument
from snapshotter.lazyswitch import LazySwitch
from snapshotter.registry.reference import parse_reference

__all__ = ["LazyRules", "OrdinaryLayers", "OrdinaryPulls", "Reason", "Refusal"]


class Reason(Enum):
    """Why containerd was left to download and unpack a layer."""

    NO_TARGET = "no-target"
    NO_LABELS = "no-labels"
    BAD_LABELS = "bad-labels"
    SWITCHED_OFF = "switched-off"
    NOT_INCLUDED = "not-included"
    EXCLUDED = "excluded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reason with what it was in this case."""

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class OrdinaryLayers:
    """The layers of one reason since this process started: how many, and the latest of them. `last_s`: since 1970."""

    reason: str
    layers: int
    image: str
    detail: str
    last_s: float


class LazyRules:
    """The operator's say: the kill switch, then the patterns."""

    def __init__(self, switch: LazySwitch, include: Sequence[str], exclude: Sequence[str]) -> None:
        """Shell patterns on whole image references; `*` matches slashes too. No `include` includes all."""
        self._switch = switch
        self._include = tuple(include)
        self._exclude = tuple(exclude)

    def __repr__(self) -> str:
        return f"<LazyRules {self._switch!r} include={list(self._include)} exclude={list(self._exclude)}>"

    def refusal(self, image: str) -> Refusal | None:
        """Why layers of `image` are not to be lazy, or None when they may be."""
        since = self._switch.off_since()
        if since is not None:
            return Refusal(Reason.SWITCHED_OFF, f"`bootseer lazy off` since {since}")
        names = _names(image)
        for pattern in self._exclude:
            if _matches(pattern, names) or _may_match(pattern, image):
                return Refusal(Reason.EXCLUDED, f"exclude pattern {pattern!r} in [lazy]")
        if self._include and not any(_matches(pattern, names) for pattern in self._include):
            return Refusal(Reason.NOT_INCLUDED, "no include pattern in [lazy] matches")
        return None


class OrdinaryPulls:
    """Counts them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[Reason, OrdinaryLayers] = {}

    def __repr__(self) -> str:
        return f"<OrdinaryPulls { ({row.reason: row.layers for row in self.rows()}) }>"

    def count(self, reason: Reason, image: str, detail: str) -> None:
        """One more layer of `image` ("" when unknown)."""
        with self._lock:
            before = self._rows.get(reason)
            layers = 1 if before is None else before.layers + 1
            self._rows[reason] = OrdinaryLayers(reason.value, layers, image, detail, time.time())

    def rows(self) -> list[OrdinaryLayers]:
        """One row for each reason that occurred, the latest last."""
        with self._lock:
            return sorted(self._rows.values(), key=lambda row: row.last_s)


def _names(image: str) -> set[str]:
    """The reference as the client wrote it, and in full."""
    try:
        return {image, str(parse_reference(image))}
    except InvalidArgument:
        return {image}


def _matches(pattern: str, names: set[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _may_match(pattern: str, image: str) -> bool:
    """Whether the pattern would match the image under some tag, where only its digest is known."""
    place, at, _ = image.partition("@")
    before, colon, tag = pattern.rpartition(":")
    if not at or not colon or "/" in tag or ":" in place.rpartition("/")[2]:
        return False
    return fnmatchcase(place, before)
