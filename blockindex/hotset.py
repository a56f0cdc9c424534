"""Hot sets: which blocks of an image a start needs, in the order in which it first touched them.

A hot set belongs to one image (its layers, by digest) and one workload. It says nothing of bytes: `hotpack` puts it
into a file, with or without them. Must not know files, containerd or how a recording is made.

Invariants of a `HotSet` (`validate` checks them): layers are distinct and give the image key; extents lie in their
layers, overlap nowhere, and their times never decrease.
"""

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import accumulate, pairwise

from blockindex.errors import Corrupt, Unsupported
from blockindex.model import BLOCK

__all__ = [
    "DEFAULT_GAP",
    "DEFAULT_WORKLOAD",
    "MAX_ARGVS",
    "MAX_EXTENTS",
    "MAX_LAYERS",
    "HotExtent",
    "HotLayer",
    "HotSet",
    "check_workload",
    "coalesced",
    "fitted",
    "from_touches",
    "hotset_name",
    "image_key",
    "includes",
    "merge",
    "without",
]

DEFAULT_GAP = 1
"""Blocks between hot ones that are packed along. Of 6.2 demand fetches that other runs of a concurrent start still
needed, 2.6 go away for 1.3 % more bytes; closing larger gaps costs as much a block and saves a fifth of that
(docs/performance.md)."""

DEFAULT_WORKLOAD = "default"
"""The workload of a recording for which nobody named one."""

MAX_EXTENTS = 1 << 17
"""Extents of a set that fits a file: about 20 MB as Python objects. `import numpy` has some hundred."""

MAX_LAYERS = 1024
"""Twice what overlayfs stacks."""

MAX_ARGVS = 64
"""Different arguments of one workload's containers that a set remembers."""

_MAX_BLOCKS = 1 << 32  # of a layer, as EROFS counts them
_MAX_TIME_MS = 1 << 32
_MAX_RECORDS = 1 << 31
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_WORKLOAD = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_DIRECTORY = "hot"
_SUFFIX = ".bsh"


def image_key(layers: Sequence[str]) -> str:
    """The key of the image that has these layers (`sha256:<hex>`, from the bottom up; of a layer that is there more
    than once the first occurrence counts). Images with equal layers have equal keys, and equal files."""
    return "sha256:" + sha256("\n".join(dict.fromkeys(layers)).encode()).hexdigest()


def hotset_name(key: str, workload: str) -> str:
    """Where a hot set lies below a directory, on disk and over HTTP: `hot/<hex of the image key>/<workload>.bsh`.
    Corrupt if one of them is not what it should be (so the name never leads out of the directory)."""
    _check_digest("image_key", key)
    check_workload(workload)
    return f"{_DIRECTORY}/{key.removeprefix('sha256:')}/{workload}{_SUFFIX}"


@dataclass(frozen=True, slots=True)
class HotLayer:
    """A layer of the image: its blob's digest, the blocks of its data region, and the `LayerIndex.layout()` of that
    region: extents and bytes of one layout mean nothing in another."""

    digest: str
    blocks: int
    layout: str


@dataclass(frozen=True, slots=True)
class HotExtent:
    """Blocks `[start, end)` of the layer at position `layer` of the set, first touched `time_ms` after the recording
    began."""

    layer: int
    start: int
    end: int
    time_ms: int


@dataclass(frozen=True, slots=True)
class HotSet:
    """See the module. `manifest` is the digest of the platform's manifest, "" where it is not known; `records` says of
    how many recordings the set is made. `carried_from` is the key of the image in which it was recorded, if that is
    another one: then it is a guess (`carry`), and "" otherwise. `argvs` are digests of the arguments of the workload's
    containers, where they are known: digests, since arguments may hold secrets, and sets are published."""

    image_key: str
    manifest: str
    workload: str
    layers: tuple[HotLayer, ...]
    extents: tuple[HotExtent, ...] = field(repr=False)
    records: int
    carried_from: str = ""
    argvs: tuple[str, ...] = ()

    @property
    def block_count(self) -> int:
        """Blocks of all extents."""
        return sum(extent.end - extent.start for extent in self.extents)

    @property
    def hot_bytes(self) -> int:
        """Bytes of all extents."""
        return self.block_count * BLOCK

    def by_layer(self) -> list[list[HotExtent]]:
        """For each layer its extents, in first-touch order."""
        rows: list[list[HotExtent]] = [[] for _ in self.layers]
        for extent in self.extents:
            rows[extent.layer].append(extent)
        return rows

    def validate(self) -> None:
        """Raises Corrupt, naming the field, unless the invariants hold; Unsupported for a set beyond the limits."""
        if len(self.layers) > MAX_LAYERS or len(self.extents) > MAX_EXTENTS:
            raise Unsupported(
                f"a hot set of {len(self.extents)} extents in {len(self.layers)} layers is too large: up to "
                f"{MAX_EXTENTS} in {MAX_LAYERS} are read"
            )
        check_workload(self.workload)
        if self.manifest:
            _check_digest("manifest", self.manifest)
        if self.carried_from:
            _check_digest("carried_from", self.carried_from)
        if len(self.argvs) > MAX_ARGVS or len(set(self.argvs)) != len(self.argvs):
            raise Corrupt("argv_digests", f"{len(self.argvs)} are more than {MAX_ARGVS}, or not all different")
        for argv in self.argvs:
            _check_digest("argv_digests", argv)
        if not 1 <= self.records < _MAX_RECORDS:
            raise Corrupt("records", f"{self.records} is not 1 or more")
        for layer in self.layers:
            _check_digest("layers", layer.digest)
            _check_digest("layouts", layer.layout)
            if not 0 <= layer.blocks < _MAX_BLOCKS:
                raise Corrupt("layers", f"{layer.digest} has {layer.blocks} blocks")
        digests = [layer.digest for layer in self.layers]
        if len(set(digests)) != len(digests):
            raise Corrupt("layers", "names a layer twice")
        if image_key(digests) != self.image_key:
            raise Corrupt("image_key", "is not that of the layers")
        self._validate_extents()

    def _validate_extents(self) -> None:
        for row, extent in enumerate(self.extents):
            if not 0 <= extent.layer < len(self.layers):
                raise Corrupt("extents.layer", f"row {row} names layer {extent.layer} of {len(self.layers)}")
            if not 0 <= extent.start < extent.end <= self.layers[extent.layer].blocks:
                blocks = self.layers[extent.layer].blocks
                raise Corrupt("extents", f"row {row}: [{extent.start}, {extent.end}) of {blocks} blocks")
        times = [0, *(extent.time_ms for extent in self.extents), _MAX_TIME_MS - 1]
        if any(left > right for left, right in pairwise(times)):
            raise Corrupt("extents.time", "goes back, or beyond 2^32 ms")
        for left, right in pairwise(sorted(self.extents, key=_place)):
            if left.layer == right.layer and left.end > right.start:
                raise Corrupt("extents", f"overlap in layer {left.layer} at block {right.start}")


def from_touches(
    layers: Sequence[HotLayer],
    touches: Iterable[tuple[int, int, int, int]],
    *,
    workload: str = DEFAULT_WORKLOAD,
    manifest: str = "",
) -> HotSet:
    """The hot set of one recording. `touches` are (layer, start, end, time_ms) in the order in which they happened:
    blocks that were touched before are dropped, what adjoins the extent right above joins it. Blocks beyond a layer's
    end are dropped (a read may reach into the last block's padding); times that go back are taken as standing still.
    """
    seen = [_Blocks() for _ in layers]
    extents = _Joining()
    for layer, start, end, time_ms in touches:
        for first, last in seen[layer].add(max(start, 0), min(end, layers[layer].blocks)):
            extents.add(layer, first, last, max(time_ms, 0))
    return _made(layers, extents, workload, manifest, 1)


def coalesced(hotset: HotSet, gap_blocks: int) -> HotSet:
    """The set with extents of one layer joined where at most `gap_blocks` blocks lie between them (0: where they
    touch). A joined extent takes the place, and the time, of its part that was touched first."""
    order = sorted(range(len(hotset.extents)), key=lambda row: _place(hotset.extents[row]))
    joined: list[tuple[int, HotExtent]] = []  # (row of the first touched part, extent)
    for row in order:
        extent = hotset.extents[row]
        if joined:
            first, last = joined[-1]
            if last.layer == extent.layer and extent.start - last.end <= gap_blocks:
                earlier = min(first, row)
                time_ms = hotset.extents[earlier].time_ms
                joined[-1] = earlier, HotExtent(last.layer, last.start, extent.end, time_ms)
                continue
        joined.append((row, extent))
    joined.sort(key=lambda item: item[0])
    return replace(hotset, extents=tuple(extent for _, extent in joined))


def fitted(hotset: HotSet, max_extents: int = MAX_EXTENTS) -> HotSet:
    """The set, coalesced over as small gaps as leave at most `max_extents` extents (but at least one a layer)."""
    gap_blocks = 0
    while len(hotset.extents) > max(max_extents, len(hotset.layers)):
        hotset = coalesced(hotset, gap_blocks)
        gap_blocks = max(2 * gap_blocks, 1)
    return hotset


def without(hotset: HotSet, present: Sequence[bytes | bytearray | memoryview | None]) -> HotSet:
    """The set less the blocks that are there already. `present` has for each layer one byte a block, 1 for a block that
    is there (the block store's map), or None for a layer of which nothing is there."""
    extents = _Joining()
    for extent in hotset.extents:
        states = present[extent.layer]
        if states is None:
            extents.add(extent.layer, extent.start, extent.end, extent.time_ms)
            continue
        run = bytes(states[extent.start : extent.end]).ljust(extent.end - extent.start, b"\0")
        for match in _ABSENT.finditer(run):
            extents.add(extent.layer, extent.start + match.start(), extent.start + match.end(), extent.time_ms)
    return replace(hotset, extents=tuple(extents))


def includes(whole: HotSet, part: HotSet) -> bool:
    """Whether every block of `part` is in `whole`, a set of the same layers."""
    if whole.layers != part.layers:
        return False
    present = [bytearray(layer.blocks) for layer in whole.layers]
    for extent in whole.extents:
        present[extent.layer][extent.start : extent.end] = b"\1" * (extent.end - extent.start)
    return not without(part, present).extents


_ABSENT = re.compile(rb"[^\x01]+", re.DOTALL)


def merge(sets: Sequence[HotSet], *, weights: Sequence[float] | None = None, min_share: float = 0.0) -> HotSet:
    """One set out of several of the same layers: the blocks that are in at least `min_share` of the weight of all (0:
    in any), ordered by the weighted median of their times. A set weighs as much as its recordings if `weights` does
    not say otherwise. Workload, and the manifest where known, are those of the first, arguments those of all; merged
    with a recorded set, one that was carried over counts as recorded. Unsupported for sets of different images."""
    assert sets, "nothing to merge"
    first = sets[0]
    for other in sets[1:]:
        if other.layers != first.layers:
            raise Unsupported(
                f"hot sets of different images, or of layers laid out differently: {first.image_key} and "
                f"{other.image_key}"
            )
    chosen = [float(it.records) for it in sets] if weights is None else list(weights)
    edges: list[list[_Edge]] = [[] for _ in first.layers]
    for number, hotset in enumerate(sets):
        for row, extent in enumerate(hotset.extents):
            edges[extent.layer] += [(extent.start, True, number, row), (extent.end, False, number, row)]
    rows = [row for layer, found in enumerate(edges) for row in _merged_layer(sets, layer, found, chosen, min_share)]
    rows.sort(key=lambda row: (row[2].time_ms, row[:2], _place(row[2])))
    extents = _Joining()
    for _, _, extent in rows:
        extents.add(extent.layer, extent.start, extent.end, extent.time_ms)
    manifest = next((it.manifest for it in sets if it.manifest), "")
    records = min(sum(it.records for it in sets), _MAX_RECORDS - 1)
    merged = _made(first.layers, extents, first.workload, manifest, records)
    carried_from = first.carried_from if all(it.carried_from for it in sets) else ""
    argvs = tuple(dict.fromkeys(argv for it in sets for argv in it.argvs))[:MAX_ARGVS]
    return replace(merged, carried_from=carried_from, argvs=argvs)


_Edge = tuple[int, bool, int, int]
"""Block, whether an extent begins there (else it ends there), number of the set, row of the extent in it."""


def _merged_layer(
    sets: Sequence[HotSet], layer: int, edges: list[_Edge], weights: Sequence[float], min_share: float
) -> Iterator[tuple[int, int, HotExtent]]:
    """(number of a set, row in it, extent) for each run of blocks that the same sets hold, if these weigh enough."""
    edges.sort(key=lambda edge: edge[:2])  # at one block, ends before beginnings
    total = sum(weights)
    holding: dict[int, int] = {}
    for (block, begins, number, row), following in pairwise([*edges, (-1, False, 0, 0)]):
        if begins:
            holding[number] = row
        else:
            del holding[number]
        if following[0] > block and holding and sum(weights[it] for it in holding) >= min_share * total:
            times = [(sets[it].extents[at].time_ms, it) for it, at in holding.items()]
            source = min(holding)
            yield source, holding[source], HotExtent(layer, block, following[0], _median(times, weights))


def _median(times: list[tuple[int, int]], weights: Sequence[float]) -> int:
    """The least time (of time, number of a set) by which half of the weight has come."""
    times.sort()
    passed = accumulate(weights[it] for _, it in times)
    half = sum(weights[it] for _, it in times) / 2
    return next((time_ms for (time_ms, _), weight in zip(times, passed, strict=True) if weight >= half), times[-1][0])


class _Joining:
    """Extents in order; one that goes on where the one right before ends joins it. Times never decrease."""

    def __init__(self) -> None:
        self._extents: list[HotExtent] = []

    def __iter__(self) -> Iterator[HotExtent]:
        return iter(self._extents)

    def add(self, layer: int, start: int, end: int, time_ms: int) -> None:
        if self._extents:
            last = self._extents[-1]
            time_ms = min(max(time_ms, last.time_ms), _MAX_TIME_MS - 1)
            if last.layer == layer and last.end == start:
                self._extents[-1] = HotExtent(layer, last.start, end, last.time_ms)
                return
        self._extents.append(HotExtent(layer, start, end, time_ms))


class _Blocks:
    """A set of blocks of one layer as sorted runs that neither overlap nor touch."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts = array("Q")
        self._ends = array("Q")

    def add(self, start: int, end: int) -> list[tuple[int, int]]:
        """Add the blocks `[start, end)`; returns the runs of them that are new."""
        if start >= end:
            return []
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        fresh, position = [], start
        for run in range(first, last):
            if self._starts[run] > position:
                fresh.append((position, self._starts[run]))
            position = max(position, self._ends[run])
        if position < end:
            fresh.append((position, end))
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = array("Q", (start,))
        self._ends[first:last] = array("Q", (end,))
        return fresh


def _place(extent: HotExtent) -> tuple[int, int]:
    return extent.layer, extent.start


def _made(
    layers: Sequence[HotLayer], extents: Iterable[HotExtent], workload: str, manifest: str, records: int
) -> HotSet:
    key = image_key([layer.digest for layer in layers])
    return HotSet(key, manifest, workload, tuple(layers), tuple(extents), records)


def _check_digest(field: str, digest: str) -> None:
    if _DIGEST.fullmatch(digest) is None:
        raise Corrupt(field, f"{digest[:100]!r} is not a sha256 digest")


def check_workload(workload: str) -> None:
    """Raises Corrupt unless this may be the name of a workload."""
    if _WORKLOAD.fullmatch(workload) is None:
        raise Corrupt("workload", f"{workload[:100]!r} is not a name: a-z, 0-9, then also . _ -, up to 64 characters")
