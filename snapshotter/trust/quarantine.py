"""Packs whose bytes a layer has refuted: a directory `<root>/quarantine`, a file for each, named by its digest.

A pack is known by the digest of its head (prologue and head, the first blob of a hot set's artifact), which names every
frame by its own digest, wherever the file came from. Any process may read and add; a file appears whole by one rename.
A pack stays in quarantine until somebody removes its file.
"""

import os
import re
from pathlib import Path

__all__ = ["Quarantine"]

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MOST = 4096


class Quarantine:
    """What is in quarantine below `root`. Keeps nothing in memory; thread-safe."""

    def __init__(self, root: Path) -> None:
        self._directory = root / "quarantine"

    def __repr__(self) -> str:
        return f"<Quarantine {self._directory}>"

    def is_quarantined(self, digest: str) -> bool:
        """Whether the pack with this head, or the blob with this digest, must not be used."""
        path = self._path(digest)
        return path is not None and os.path.exists(path)

    def reason(self, digest: str) -> str:
        """Why, in one line; empty for what is not in quarantine."""
        path = self._path(digest)
        try:
            text = path.read_bytes()[:_MOST].decode("utf-8", "replace") if path is not None else ""
        except OSError:
            return ""
        return " ".join(text.split())

    def add(self, digest: str, reason: str) -> None:
        """Put it in quarantine; the first reason stays. Raises OSError when the disk refuses."""
        path = self._path(digest)
        assert path is not None, digest
        if path.exists():
            return
        self._directory.mkdir(mode=0o700, exist_ok=True)
        temporary = self._directory / f".{path.name}.{os.urandom(4).hex()}"
        temporary.write_text(f"{reason}\n", encoding="utf-8")
        temporary.rename(path)

    def _path(self, digest: str) -> Path | None:
        match = _DIGEST.fullmatch(digest)
        return self._directory / match[1] if match is not None else None
