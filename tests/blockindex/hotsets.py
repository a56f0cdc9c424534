"""Hot sets for tests: small ones by hand, and a Hypothesis strategy."""

from dataclasses import replace
from hashlib import sha256
from itertools import accumulate

from hypothesis import strategies as st

from blockindex.hotset import HotExtent, HotLayer, HotSet, image_key
from blockindex.model import BLOCK


def layer_digest(number: int) -> str:
    return f"sha256:{sha256(b'layer %d' % number).hexdigest()}"


def hotset(
    blocks: tuple[int, ...],
    *extents: tuple[int, int, int, int],
    workload: str = "default",
    manifest: str = "",
    records: int = 1,
) -> HotSet:
    """A set of layers of so many blocks; extents are (layer, start, end, time_ms)."""
    layers = tuple(
        HotLayer(layer_digest(number), count, layer_digest(-number - 1)) for number, count in enumerate(blocks)
    )
    key = image_key([layer.digest for layer in layers])
    return HotSet(key, manifest, workload, layers, tuple(HotExtent(*it) for it in extents), records)


def block_content(layer: int, block: int) -> bytes:
    """One block, of the same size wherever it is."""
    return (b"%d:%d;" % (layer, block) * BLOCK)[:BLOCK]


def read_blocks(extent: HotExtent) -> bytes:
    """For `write_pack`."""
    return b"".join(block_content(extent.layer, block) for block in range(extent.start, extent.end))


@st.composite
def hotsets(draw: st.DrawFn) -> HotSet:
    """Any valid set of up to 4 layers."""
    blocks = tuple(draw(st.lists(st.integers(0, 300), max_size=4)))
    runs: list[tuple[int, int, int]] = []
    for layer, count in enumerate(blocks):
        cuts = sorted(draw(st.sets(st.integers(0, count), max_size=12)))
        runs += [(layer, start, end) for start, end in zip(cuts[::2], cuts[1::2], strict=False)]
    runs = draw(st.permutations(runs))
    gaps = draw(st.lists(st.integers(0, 5000), min_size=len(runs), max_size=len(runs)))
    times = accumulate(gaps)
    extents = [(*run, time_ms) for run, time_ms in zip(runs, times, strict=True)]
    manifest = draw(st.sampled_from(["", layer_digest(99)]))
    made = hotset(blocks, *extents, manifest=manifest, records=draw(st.integers(1, 1000)))
    argvs = tuple(layer_digest(number) for number in range(draw(st.integers(0, 3))))
    return replace(made, carried_from=draw(st.sampled_from(["", layer_digest(98)])), argvs=argvs)
