"""Verified bytes that the disk refused: kept in memory, so that whoever waits for them gets them all the same.

While the disk has no room (or a quota is used up, or it is broken) a layer is served straight from the network: what
comes for readers lands here, and readers are answered from here. What nobody waits for is not asked for meanwhile.
Bounded, one for all layers of the process: the bytes that were asked for least recently go first, and are fetched again
when somebody wants them. A reader that waits for more keeps what has come for it itself (`layer.Waiter.held`), so it is
answered however small this is. As soon as the disk takes bytes again, what is here is written (`LayerFetch.tend`).

Knows nothing of files, layers or readers: `owner` is any number, and blocks are an owner's. Thread-safe.
"""

import logging
import threading
from collections import OrderedDict

from blockindex.model import BLOCK

__all__ = ["Overflow"]

_log = logging.getLogger(__name__)

_MOST = 64 << 20  # bytes, as the default of the configuration: readers of 128 spans at once find each other's blocks


class Overflow:
    """See the module."""

    def __init__(self, most: int = _MOST) -> None:
        """`most`: bytes that are kept at once."""
        self._most = most
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[int, int], bytes] = OrderedDict()  # least recently asked for first
        self._refusing = False

    def __repr__(self) -> str:
        return f"<Overflow {self.size} bytes{', the disk refuses' if self._refusing else ''}>"

    @property
    def size(self) -> int:
        """Bytes that wait for room."""
        return len(self._blocks) * BLOCK

    @property
    def refusing(self) -> bool:
        """Whether the disk refused bytes, and has not taken any since."""
        return self._refusing

    def refused(self, error: OSError) -> None:
        """The disk would not take bytes. Said once until it takes some again."""
        with self._lock:
            first, self._refusing = not self._refusing, True
        if first:
            _log.error("store.full reason=%r readers are served from the network, nothing is kept", str(error))

    def taken(self) -> None:
        """The disk has taken bytes."""
        if not self._refusing:  # the usual case, and a racy look will do: the next bytes come soon
            return
        with self._lock:
            was, self._refusing = self._refusing, False
        if was:
            _log.info("store.room_again bytes_waiting=%d", self.size)

    def settle(self) -> None:
        """To be called now and then: where nothing waits for room, whether there is any is seen with the next bytes."""
        if not self._blocks:
            self.taken()

    def keep(self, owner: int, start: int, data: bytes | memoryview) -> None:
        """Keep the bytes of whole blocks from `start` on."""
        with self._lock:
            for number in range(len(data) // BLOCK):
                key = owner, start + number
                self._blocks[key] = bytes(data[number * BLOCK : (number + 1) * BLOCK])
                self._blocks.move_to_end(key)
            while len(self._blocks) * BLOCK > self._most:
                self._blocks.popitem(last=False)

    def find(self, owner: int, block: int) -> bytes | None:
        """The bytes of a block, None when they are not here."""
        if not self._blocks:
            return None
        with self._lock:
            found = self._blocks.get((owner, block))
            if found is not None:
                self._blocks.move_to_end((owner, block))
            return found

    def of(self, owner: int) -> list[tuple[int, bytes]]:
        """The owner's blocks, ascending."""
        with self._lock:
            return sorted((block, data) for (its, block), data in self._blocks.items() if its == owner)

    def drop(self, owner: int, block: int) -> None:
        """The block is not needed any more."""
        with self._lock:
            self._blocks.pop((owner, block), None)
