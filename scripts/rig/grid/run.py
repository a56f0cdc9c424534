"""One line of results: what is written of each run, and read back for reports."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Self

from scripts.rig.errors import RigError

__all__ = ["REQUIRED", "Run", "read_runs"]

_SECONDS: tuple[type, ...] = (int, float, NoneType)
_COUNT: tuple[type, ...] = (int, NoneType)

REQUIRED: Mapping[str, tuple[type, ...]] = {
    "image": (str,),
    "network": (str,),
    "system": (str,),
    "t_ready_s": _SECONDS,
    "t_pull_s": _SECONDS,
    "t_warm_s": _SECONDS,
    "bytes": _COUNT,
    "requests": _COUNT,
    "demand_fetches": _COUNT,
    "floor_s": _SECONDS,
    "ok": (bool,),
}
"""Fields that every line has, and what they may be. A run that failed has null for what was not measured, and its
`reason`."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `bytes` is what the node received until ready, `requests` those to registry and file server in all.

    `demand_fetches` are ranges fetched for waiting readers until ready; null for systems that are not ours. `floor_s`
    is the physical limit (`floor`). Whatever else a line has is in `more`: `session` and `round` tell which runs belong
    together.
    """

    image: str
    network: str
    system: str
    t_ready_s: float | None
    t_pull_s: float | None
    t_warm_s: float | None
    bytes: int | None
    requests: int | None
    demand_fetches: int | None
    floor_s: float | None
    ok: bool
    more: Mapping[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """The run as one line of JSON, with its end."""
        document = asdict(self)
        more = document.pop("more")
        return json.dumps({**document, **more}) + "\n"

    @classmethod
    def from_line(cls, text: str) -> Self:
        """The run that a line stands for; ValueError if it stands for none."""
        document = json.loads(text)
        if not isinstance(document, dict):
            raise ValueError("no JSON object")
        missing = [name for name in REQUIRED if name not in document]
        if missing:
            raise ValueError(f"no {', '.join(missing)}")
        values = {name: document.pop(name) for name in REQUIRED}
        for name, value in values.items():
            if not _fits(value, REQUIRED[name]):
                raise ValueError(f"{name} cannot be {value!r}")
        run = cls(**values, more=document)
        if run.ok and (run.t_ready_s is None or run.bytes is None or run.requests is None):
            raise ValueError("a run that is ok has t_ready_s, bytes and requests")
        return run

    @property
    def ready_s(self) -> float:
        """`t_ready_s` of a run that is ok."""
        assert self.t_ready_s is not None
        return self.t_ready_s

    @property
    def group(self) -> tuple[object, ...]:
        """What runs have in common that took turns on one image and one network: ratios are taken within it."""
        return (self.image, self.network, self.more.get("session"), self.more.get("round"), self.together)

    @property
    def together(self) -> int:
        """How many containers were started at once."""
        return int(self.more.get("together", 1))


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """All runs of these files; RigError with file and line where one cannot be read."""
    runs = []
    for path in paths:
        try:
            lines = path.read_text().splitlines()
        except OSError as error:
            raise RigError(f"{path}: {error.strerror}") from None
        for number, text in enumerate(lines, 1):
            try:
                runs.append(Run.from_line(text))
            except ValueError as error:
                raise RigError(f"{path}, line {number}: this is no run: {error}") from None
    return runs


def _fits(value: object, kinds: tuple[type, ...]) -> bool:
    """Whether a JSON value is of these kinds: true is no number, and infinity is none either."""
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) and not (isinstance(value, float) and not math.isfinite(value))
