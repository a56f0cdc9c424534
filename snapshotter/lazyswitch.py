"""The kill switch: while the marker `<root>/lazy-off` exists, new pulls are ordinary ones.

The service looks at it at every Prepare of a layer, so it takes effect at once, survives restarts and reboots, and
works while no daemon runs. Layers that are mounted, and snapshots that stand on them, are not touched.
"""

import time
from pathlib import Path

from .errors import SnapshotterError

__all__ = ["LazySwitch"]


class LazySwitch:
    """The switch of one root. Any number of processes may look and turn."""

    def __init__(self, root: Path) -> None:
        self._marker = root / "lazy-off"

    def __repr__(self) -> str:
        since = self.off_since()
        return f"<LazySwitch {'on' if since is None else f'off since {since}'}>"

    def off_since(self) -> str | None:
        """When it was turned off (UTC), or None while it is on."""
        try:
            return self._marker.read_text(encoding="utf-8", errors="replace").strip() or "an unknown time"
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SnapshotterError(f"{self._marker}: {error.strerror}") from error

    def turn_off(self) -> None:
        """Have the next pulls be ordinary; keeps the first time when it is off already."""
        if self.off_since() is not None:
            return
        try:
            self._marker.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
            self._marker.write_text(time.strftime("%Y-%m-%dT%H:%M:%SZ\n", time.gmtime()), encoding="utf-8")
        except OSError as error:
            raise SnapshotterError(f"{self._marker}: {error.strerror}: turning it off needs root") from error

    def turn_on(self) -> None:
        """Have the next pulls be lazy."""
        try:
            self._marker.unlink(missing_ok=True)
        except OSError as error:
            raise SnapshotterError(f"{self._marker}: {error.strerror}: turning it on needs root") from error
