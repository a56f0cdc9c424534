"""Now and then a round of publishing (`snapshotter.publish`), in a program of its own, if [publish] says so.

A thread that sleeps: at random times, so that the nodes of a cluster do not come at once. Nothing here waits in a
reader's thread, and nothing that goes wrong is more than a line in the log.
"""

import json
import logging
import random
import subprocess
import sys
import threading

from snapshotter.config import Config
from snapshotter.errors import SnapshotterError
from snapshotter.log import fields
from snapshotter.publish.state import State

__all__ = ["Publishing"]

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 30.0  # pulls that a node begins with come first
_MOST_S = 960.0  # a little more than the program gives itself


class Publishing:
    """See the module."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._ended = threading.Event()

    def __repr__(self) -> str:
        return f"<Publishing {'on' if self._config.publish.enabled else 'off'}>"

    def start(self) -> None:
        """Begin, if this node is to publish."""
        if self._config.publish.enabled:
            threading.Thread(target=self._run, name="publishing", daemon=True).start()

    def end(self) -> None:
        """Begin no more rounds."""
        self._ended.set()

    def status(self) -> dict[str, list[dict[str, object]]]:
        """What was done, and which places are left alone; empty where this node does not publish."""
        return State.load(self._config.root_path).document() if self._config.publish.enabled else {}

    def _run(self) -> None:
        publish = self._config.publish
        pause_s = min(_FIRST_PAUSE_S, publish.every_s)
        while not self._ended.wait(pause_s + random.uniform(0, publish.jitter_s)):
            pause_s = publish.every_s
            try:
                self.round()
            except Exception as error:  # without this thread nothing would be published any more
                _log.warning("publish.failed %s", fields(reason=str(error)))

    def round(self) -> None:
        """One round. OSError, ValueError, SnapshotterError when it did not work."""
        argv = [sys.executable, "-P", "-m", "snapshotter.publish"]
        try:
            done = subprocess.run(
                argv, input=self._config.to_toml(), capture_output=True, text=True, timeout=_MOST_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise SnapshotterError(f"not done after {_MOST_S:.0f} s") from error
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2]
            raise SnapshotterError(last or f"exit code {done.returncode}")
        answer = json.loads(done.stdout)
        for row in answer["done"]:
            shown = {name: row[name] for name in ("what", "image", "workload", "to", "status", "digest", "reason")}
            _log.info("publish.done %s", fields(**shown))
        for line in answer["failed"]:
            _log.warning("publish.failed %s", fields(reason=line))
