"""What happens on the link while a container starts: samples of its counters, and when each request ended.

Access logs are written when a request has ended, and one of them only knows whole seconds, so new lines are stamped
when they appear. Without a directory nothing is watched, and only the clock is started.

Files, all times in seconds after the order to pull: `events.jsonl` (`{"t": s, "event": text}`), `link.jsonl` (`{"t": s,
"to_node": bytes}`, whenever it has grown), `requests.jsonl` (`{"t": s, "server": "registry"|"files", "line": text}`),
`clock.json` (`{"started": seconds since 1970}`).
"""

import json
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from scripts.rig.link import Link

__all__ = ["Watch"]

_STEP_S = 0.01


class Watch:
    """Watches from `start` until it is left. `note` may be called from the thread that started it."""

    def __init__(self, link: Link, registry_log: Path, files_log: Path, directory: Path | None) -> None:
        self._link = link
        self._logs = {"registry": registry_log, "files": files_log}
        self._directory = directory
        self._started = 0.0
        self._clock = 0.0
        self._before = 0
        self._offsets: dict[str, int] = {}
        self._events: list[dict[str, object]] = []
        self._samples: list[dict[str, object]] = []
        self._requests: list[dict[str, object]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> float:
        """Start the clock; the moment (monotonic)."""
        if self._directory is not None:
            self._before = self._link.traffic().to_near
            self._offsets = {name: log.stat().st_size for name, log in self._logs.items()}
            self._thread = threading.Thread(target=self._run, name="watch")
        self._clock, self._started = time.time(), time.monotonic()
        if self._thread is not None:
            self._thread.start()
        self.note("pull started")
        return self._started

    def note(self, event: str) -> None:
        """Something happened just now."""
        self._events.append({"t": self._now(), "event": event})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None or self._directory is None:
            return
        self._stop.set()
        self._thread.join()
        self._look()
        self._directory.mkdir(parents=True, exist_ok=True)
        for name, lines in (("events", self._events), ("link", self._samples), ("requests", self._requests)):
            text = "".join(f"{json.dumps(line)}\n" for line in lines)
            (self._directory / f"{name}.jsonl").write_text(text)
        (self._directory / "clock.json").write_text(json.dumps({"started": self._clock}) + "\n")

    def _now(self) -> float:
        return round(time.monotonic() - self._started, 4)

    def _run(self) -> None:
        while not self._stop.wait(_STEP_S):
            self._look()

    def _look(self) -> None:
        now, size = self._now(), self._link.traffic().to_near - self._before
        if not self._samples or size != self._samples[-1]["to_node"]:
            self._samples.append({"t": now, "to_node": size})
        for name, log in self._logs.items():
            with log.open("rb") as file:
                file.seek(self._offsets[name])
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[name] += len(whole)
            for line in whole.decode(errors="replace").splitlines():
                self._requests.append({"t": now, "server": name, "line": line})

    def __repr__(self) -> str:
        return f"<Watch {self._directory} {len(self._requests)} requests>"
