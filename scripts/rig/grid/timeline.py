"""Where the time of one run went: what `scripts/bench run --timeline DIR` kept, as one list of moments.

Moments are seconds after the order to pull. From the files of `watch`: the bench's own events, requests, and when the
node had received so much of all it received until ready. From the daemon's log: every kind of event, each of them if
they are few, otherwise when the first, 10, 50, 90 % and the last of them had happened. A kind is the event's name, so
new kinds show without a change here.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from scripts.rig.errors import RigError

__all__ = ["Moment", "Timeline", "milestones", "read_timeline", "render"]

_SHARES = (10, 50, 90, 100)
_ARTIFACT = ".bootseer-"  # in the tags of our artifacts: each look-up is shown
_FEW = 6
_LINE = re.compile(r"^time=(\S+) level=(\w+) logger=\S+ ([a-z_.]+)(.*)$")
_REQUEST = re.compile(r'"?(GET|HEAD) (\S+)(?: HTTP/[0-9.]+")? (\d{3}) (\d+)')


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that had happened `t` seconds after the order to pull; `source` is bench, link, registry, index or
    daemon."""

    t: float
    source: str
    text: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """One run: its name, when its container was ready, and its moments in order."""

    name: str
    ready_s: float | None
    moments: tuple[Moment, ...]


def read_timeline(directory: Path) -> Timeline:
    """What was kept in `directory`; RigError if that is no such directory."""
    try:
        events = _lines(directory / "events.jsonl")
        samples = [(float(each["t"]), int(each["to_node"])) for each in _lines(directory / "link.jsonl")]
        requests = _lines(directory / "requests.jsonl")
        started = float(json.loads((directory / "clock.json").read_text())["started"])
    except (OSError, ValueError, KeyError) as error:
        raise RigError(f"{directory} holds no timeline: {error}") from None
    moments = [Moment(float(event["t"]), "bench", str(event["event"])) for event in events]
    ready_s = next((moment.t for moment in moments if moment.text == "ready"), None)
    moments += _link(samples, ready_s)
    for server in ("registry", "files"):
        mine = [(float(each["t"]), _short(str(each["line"]))) for each in requests if each["server"] == server]
        moments += [Moment(t, server, text) for t, text in mine if _ARTIFACT in text]
        moments += milestones(server, "request", [(t, text) for t, text in mine if text and _ARTIFACT not in text])
    log = directory / "bootseer.log"
    if log.exists():
        moments += _daemon(log.read_text(errors="replace").splitlines(), started)
    return Timeline(directory.name, ready_s, tuple(sorted(moments, key=lambda moment: moment.t)))


def milestones(source: str, kind: str, happened: Sequence[tuple[float, str]]) -> list[Moment]:
    """Each of them if they are few; otherwise the first and those at which a share of all had happened."""
    ordered = sorted(happened)
    if len(ordered) <= _FEW:
        return [Moment(t, source, text) for t, text in ordered]
    found = [Moment(ordered[0][0], source, f"{kind}: the first of {len(ordered)}: {ordered[0][1]}")]
    for share in _SHARES:
        number = max(1, -(-len(ordered) * share // 100))
        found.append(Moment(ordered[number - 1][0], source, f"{kind}: {share} % of {len(ordered)}"))
    return found


def render(timeline: Timeline, until_s: float | None = None) -> str:
    """The moments as text, one a line; those later than `until_s` (a second after ready) are left out."""
    limit = until_s if until_s is not None else (timeline.ready_s + 1 if timeline.ready_s is not None else None)
    shown = [moment for moment in timeline.moments if limit is None or moment.t <= limit]
    lines = [f"{moment.t:8.3f} s  {moment.source:8}  {moment.text}" for moment in shown]
    left = len(timeline.moments) - len(shown)
    return "\n".join([timeline.name, *lines, *([f"({left} later ones left out)"] if left else [])])


def _link(samples: Sequence[tuple[float, int]], ready_s: float | None) -> list[Moment]:
    until = [(t, size) for t, size in samples if ready_s is None or t <= ready_s]
    if not until or until[-1][1] == 0:
        return []
    total = until[-1][1]
    moments = []
    for share in _SHARES:
        t = next(t for t, size in until if size * 100 >= total * share)
        moments.append(Moment(t, "link", f"{share} % of the {total / 1e6:.2f} MB that were received until ready"))
    return moments


def _daemon(lines: Sequence[str], started: float) -> list[Moment]:
    kinds: dict[str, list[tuple[float, str]]] = {}
    for line in lines:
        match = _LINE.match(line)
        if match is not None:
            t = datetime.fromisoformat(match[1]).timestamp() - started
            if t >= 0:  # earlier is the daemon's own start
                text = f"{match[3]}{match[4]}"
                kinds.setdefault(match[3], []).append((t, text if len(text) <= 100 else f"{text[:97]}..."))
    return [moment for kind, happened in kinds.items() for moment in milestones("daemon", kind, happened)]


def _short(line: str) -> str:
    """An access log's line as method, path (digests cut), status and bytes; empty if it is none."""
    match = _REQUEST.search(line)
    if match is None:
        return ""
    path = re.sub(r"([0-9a-f]{12})[0-9a-f]{52}", r"\1", match[2])
    return f"{match[1]} {path} {match[3]}, {int(match[4])} bytes"


def _lines(path: Path) -> list[dict[str, Any]]:
    return list(_parsed(path))


def _parsed(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        document = json.loads(line)
        if not isinstance(document, dict):
            raise ValueError(f"{path.name}: no object")
        yield document
