"""Hot sets out of recordings: that of a workload, and `default`, which is fetched before anybody knows the workload.

A workload's set holds what its last recordings read. `default` is a guess: the blocks of the last recordings of all
workloads, in the order of their first touch. Where these are more than it may have, the blocks that are in more of the
recordings are kept, of equal ones those touched earlier. It ages by forgetting: only so many recordings count, of each
workload the newest before the second newest of any, and older ones fall out.

Pure. All recordings given are of one image, the newest first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, zip_longest

from blockindex.hotset import DEFAULT_WORKLOAD, HotSet, merge, without

__all__ = ["capped", "default_set", "own_set", "recent"]


def own_set(records: Sequence[HotSet]) -> HotSet:
    """The set of a workload with these recordings. Of those whose layers are laid out otherwise than the newest has
    them nothing is taken."""
    return merge(_alike(records))


def recent(records: Mapping[str, Sequence[HotSet]], most: int) -> list[HotSet]:
    """The recordings, by workload, that count for `default`: at most `most`."""
    workloads = (records[workload] for workload in sorted(records))
    ranks = chain.from_iterable(zip_longest(*workloads))
    return list(islice((record for record in ranks if record is not None), most))


def default_set(records: Mapping[str, Sequence[HotSet]], most: int, most_blocks: int, most_share: float) -> HotSet:
    """`default`: of `most` recordings at most, with `most_blocks` blocks at most, which are `most_share` of the image's
    blocks at most. There is at least one recording."""
    counted = _alike(recent(records, most))
    of_share = int(most_share * sum(layer.blocks for layer in counted[0].layers))
    made = capped(counted, min(most_blocks, of_share))
    return replace(made, workload=DEFAULT_WORKLOAD, argvs=())


def capped(records: Sequence[HotSet], most_blocks: int) -> HotSet:
    """The union of the recordings, or its `most_blocks` blocks that are in most of them. Each recording weighs the
    same."""
    number = len(records)
    weights = [1.0] * number
    chosen = replace(merge(records, weights=weights), extents=())
    for count in range(number, 0, -1):
        level = merge(records, weights=weights, min_share=(count - 0.5) / number)
        if level.block_count > most_blocks:
            return _topped_up(chosen, level, most_blocks)
        chosen = level
    return chosen


def _topped_up(chosen: HotSet, level: HotSet, most_blocks: int) -> HotSet:
    """`chosen`, and of the blocks that `level` has besides the first, up to `most_blocks`; in the order of `level`."""
    have = [bytearray(layer.blocks) for layer in level.layers]
    for extent in chosen.extents:
        have[extent.layer][extent.start : extent.end] = b"\1" * (extent.end - extent.start)
    left = most_blocks - chosen.block_count
    for extent in without(level, have).extents:
        taken = min(extent.end - extent.start, left)
        have[extent.layer][extent.start : extent.start + taken] = b"\1" * taken
        left -= taken
    return without(level, [bytes(layer).translate(_INVERTED) for layer in have])


_INVERTED = bytes([1, 0]) + bytes(range(2, 256))


def _alike(records: Sequence[HotSet]) -> list[HotSet]:
    return [record for record in records if record.layers == records[0].layers]
