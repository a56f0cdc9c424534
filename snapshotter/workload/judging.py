"""How well a hot set served a start: what was read of the image's layers, and what of that nobody had foreseen."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from blockindex.hotset import HotSet
from blockindex.model import BLOCK

__all__ = ["blocks_read", "unforeseen"]

_SECTOR = 512
_READ_SECTORS = 2  # column of the kernel's block device statistics


def blocks_read(mount: Path) -> int | None:
    """Blocks that the page cache has asked a layer's device for since it was attached, metadata too; None where the
    layer has no device of its own, or is not mounted."""
    try:
        device = os.stat(mount).st_dev
        counts = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
        return int(counts[_READ_SECTORS]) * _SECTOR // BLOCK
    except (OSError, ValueError, IndexError):
        return None


def unforeseen(waits: Iterable[Mapping[str, Any]], names: Sequence[str], hotset: HotSet | None) -> int:
    """Blocks of the layers `names` (node names, in the order of the set's layers) that were fetched for readers and are
    not in the set. `waits`: see `fetch.journal.Wait`. What is in the set and came too late was foreseen even so."""
    rows = {name: row for row, name in enumerate(names)}
    missed: set[tuple[int, int]] = set()
    for wait in waits:
        if wait["brought_by"] == "demand" and wait["name"] in rows:
            row = rows[wait["name"]]
            missed.update((row, block) for block in range(wait["start"], wait["end"]))
    for extent in hotset.extents if hotset is not None and missed else ():
        missed.difference_update((extent.layer, block) for block in range(extent.start, extent.end))
    return len(missed)
