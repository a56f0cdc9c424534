"""Metadata that were mounted before they were judged, and those that did not stand the judgement afterwards.

Judging metadata (`blockindex.codec.judge`) takes more time than all else between an index and its mount: 40 ms for
10,000 files. It protects the kernel from metadata that nobody answers for. Metadata whose writer is trusted with what
containers run (a listed key has signed the index, or its directory is the operator's own) are mounted at once: digests
have been checked, so they are what that writer wrote. They are judged soon after.

A layer that waits for its judgement has a file `unjudged` in its directory, from before it appears in the store until
the judgement. A layer that fails it is named in `<root>/unsound`, with the reason: what is mounted of it is served on
(taking it away would end its containers), and no new mount is made; the layer is brought in anew, and its indexes are
judged first from then on. Any process may read; the fetch process writes.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from .killpoints import reach

__all__ = ["Judgements"]

_UNJUDGED = "unjudged"


class Judgements:
    """Those of the node whose state is below `root`. Keeps nothing in memory."""

    def __init__(self, root: Path) -> None:
        self._layers = root / "layers"
        self._unsound = root / "unsound"

    def __repr__(self) -> str:
        return f"<Judgements {len(list(self.due()))} due>"

    @staticmethod
    def owe(directory: Path) -> None:
        """The layer that is being staged in `directory` is to be judged later. Raises OSError."""
        os.close(os.open(directory / _UNJUDGED, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))

    def due(self) -> Iterator[str]:
        """The node names of the layers that wait for their judgement."""
        for path in self._layers.glob(f"[!.]*/{_UNJUDGED}"):
            yield path.parent.name

    def settle(self, name: str, reason: str) -> None:
        """The layer has been judged; `reason` says why it is unsound, and is empty where it is sound. OSError."""
        if reason:
            self._unsound.mkdir(mode=0o700, exist_ok=True)
            (self._unsound / name).write_text(reason)
        reach("fetch.judged")
        with contextlib.suppress(FileNotFoundError):
            (self._layers / name / _UNJUDGED).unlink()

    def unsound(self, name: str) -> str:
        """Why the layer is unsound, as far as is known; empty where nothing is."""
        try:
            return (self._unsound / name).read_text()
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"unknown: {error.strerror}"

    def renewed(self, name: str) -> None:
        """The layer has come in anew, from a source that was judged."""
        with contextlib.suppress(FileNotFoundError):
            (self._unsound / name).unlink()
