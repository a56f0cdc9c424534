"""A hot set as its prefetch asks it: which extent holds a block, and whether a layer is the one that the set speaks of.

Immutable, so that it can be replaced as a whole without a lock. The image key says which layers a set has, in which
order: layer numbers are those of the image whose key it has. Knows nothing of frames, of what is there, or of fetching.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from blockindex.hotset import HotExtent, HotSet
from snapshotter.blockstore import LayerRecord

__all__ = ["HotTable"]

_WHOLE_SHARE = 0.6  # of an image's blocks: from there on its layers are downloaded as they are


@dataclass(frozen=True, slots=True)
class _Rows:
    """A layer's extents, ascending: blocks `[start, end)`, and the row of the set that each is."""

    starts: "array[int]"
    ends: "array[int]"
    rows: "array[int]"


class HotTable:
    """See the module."""

    def __init__(self, hotset: HotSet) -> None:
        self.hotset = hotset
        found: dict[int, list[tuple[int, int, int]]] = {}
        for row, extent in enumerate(hotset.extents):
            found.setdefault(extent.layer, []).append((extent.start, extent.end, row))
        self._rows: dict[int, _Rows] = {}
        for layer, triples in found.items():
            starts, ends, rows = zip(*sorted(triples), strict=True)
            self._rows[layer] = _Rows(array("Q", starts), array("Q", ends), array("Q", rows))

    def __repr__(self) -> str:
        return f"<HotTable {self.hotset!r}>"

    @property
    def layers(self) -> set[int]:
        """The layers that have extents."""
        return set(self._rows)

    @property
    def is_whole(self) -> bool:
        """Whether the set is most of the image."""
        return self.hotset.block_count >= _WHOLE_SHARE * sum(layer.blocks for layer in self.hotset.layers)

    def row_of(self, layer: int, block: int) -> int | None:
        """The row of the extent that holds the layer's block."""
        found = self._rows.get(layer)
        place = bisect_right(found.starts, block) - 1 if found is not None else -1
        return found.rows[place] if found is not None and place >= 0 and block < found.ends[place] else None

    def rows_with(self, extents: Iterable[HotExtent]) -> set[int] | None:
        """The rows that hold these blocks of the same layers; None when one is in no row."""
        rows = set()
        for extent in extents:
            block = extent.start
            while block < extent.end:
                row = self.row_of(extent.layer, block)
                if row is None:
                    return None
                rows.add(row)
                block = self.hotset.extents[row].end
        return rows

    def blocks_of(self, layer: int) -> list[tuple[int, int]]:
        """The layer's extents in the set's order, blocks `[start, end)`."""
        return [(extent.start, extent.end) for extent in self.hotset.extents if extent.layer == layer]

    def fits(self, layer: int, record: LayerRecord) -> bool:
        """Whether the set speaks of the blocks that the layer has here (or not of the layer at all)."""
        stated = self.hotset.layers[layer]
        return layer not in self._rows or (stated.blocks, stated.layout) == (record.blocks, record.layout)
