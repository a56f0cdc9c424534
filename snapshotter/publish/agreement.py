"""Whether recordings agree, and whether a set has changed so much that it is worth publishing again.

Two sets are alike when the blocks that are in both are at least `ALIKE` of those that are in either (their Jaccard
index), after both have had the gaps closed that packing closes. Pure.
"""

from collections.abc import Sequence
from itertools import combinations

from blockindex.hotset import DEFAULT_GAP, HotSet, coalesced

__all__ = ["ALIKE", "agree", "alike", "jaccard"]

ALIKE = 0.9


def agree(records: Sequence[HotSet], least: int) -> bool:
    """Whether there are `least` recordings, newest first, and the newest so many are alike, each two of them."""
    newest = records[:least]
    return len(newest) == least and all(alike(left, right) for left, right in combinations(newest, 2))


def alike(left: HotSet, right: HotSet) -> bool:
    """See the module."""
    return jaccard(left, right) >= ALIKE


def jaccard(left: HotSet, right: HotSet) -> float:
    """Blocks in both by blocks in either; 0 for sets of different layers, or of layers laid out differently."""
    if left.layers != right.layers:
        return 0.0
    marks = [bytearray(layer.blocks) for layer in left.layers]
    for extent in coalesced(left, DEFAULT_GAP).extents:
        marks[extent.layer][extent.start : extent.end] = b"\1" * (extent.end - extent.start)
    both = 0
    other = coalesced(right, DEFAULT_GAP)
    for extent in other.extents:
        both += marks[extent.layer].count(1, extent.start, extent.end)
    either = sum(mark.count(1) for mark in marks) + other.block_count - both
    return both / either if either else 0.0
