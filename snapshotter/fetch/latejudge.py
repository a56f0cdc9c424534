"""The judgement of metadata after their mount: see `snapshotter.judgement` for whose, and what follows from it.

One layer at a time, on a thread of its own, once the start that mounted it has had its time: judging holds the
interpreter, which a reader's fetch needs too. A process that is killed meanwhile has a successor that begins again.
"""

import logging
import threading
import time
from pathlib import Path

from blockindex.codec import decode_unjudged, judge
from blockindex.errors import BlockIndexError
from snapshotter.judgement import Judgements

__all__ = ["LateJudge"]

_log = logging.getLogger(__name__)

_DELAY_S = 15.0


class LateJudge:
    """`tend` is called about once a second, by one thread."""

    def __init__(self, root: Path, delay_s: float = _DELAY_S) -> None:
        self._layers = root / "layers"
        self._judgements = Judgements(root)
        self._delay_s = delay_s
        self._since: dict[str, float] = {}
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<LateJudge {len(self._since)} waiting>"

    def tend(self) -> None:
        """Begin to judge a layer if one is due."""
        if self._thread is not None and self._thread.is_alive():
            return
        now = time.monotonic()
        self._since = {name: self._since.get(name, now) for name in self._judgements.due()}
        due = [name for name, since in self._since.items() if since <= now - self._delay_s]
        if due:
            self._thread = threading.Thread(target=self._judge, args=(due[0],), name="judge", daemon=True)
            self._thread.start()

    def _judge(self, name: str) -> None:
        try:
            reason = self._fault(name)
            if reason:
                _log.error(
                    "layer.unsound name=%s reason=%r it is served on where it is mounted, and mounted no more; its"
                    " index is signed, or from a directory of yours, but no bootseer can have written it",
                    name,
                    reason,
                )
            self._judgements.settle(name, reason)
        except OSError as error:  # a full disk, or the layer was removed: the next one in line, then this one again
            self._since[name] = time.monotonic()
            _log.warning("layer.not_judged name=%s error=%r", name, str(error))

    def _fault(self, name: str) -> str:
        try:
            judge(decode_unjudged((self._layers / name / "index").read_bytes()))
        except BlockIndexError as error:
            return str(error)
        return ""
