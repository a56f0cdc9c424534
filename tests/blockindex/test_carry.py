"""Hot sets carried over: blocks follow their files to where the new image shows them, and nowhere else."""

import io
import random
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockindex.builder import LayerBuilder
from blockindex.carry import Carried, Carrier, LayerTree
from blockindex.erofs import walk
from blockindex.errors import Unsupported
from blockindex.hotset import HotLayer, HotSet, from_touches, image_key
from blockindex.model import BLOCK


@dataclass(frozen=True)
class File:
    """`seed` and `size` say what is in it."""

    seed: int
    size: int
    mtime: int = 1

    @property
    def content(self) -> bytes:
        return random.Random(self.seed).randbytes(self.size)


@dataclass(frozen=True)
class Link:
    """A hard link to a file of the same layer, or a symlink."""

    target: str
    hard: bool = True


WHITEOUT, OPAQUE = "whiteout", "opaque"
Entries = Mapping[str, File | Link | str]
"""What a layer has at each path; WHITEOUT hides the path below, OPAQUE is a directory that hides what it held below."""


class Layer:
    """A layer of these entries, with its data region."""

    def __init__(self, entries: Entries) -> None:
        self.entries = entries
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as tar:
            for path, entry in entries.items():
                directory, _, base = path.rpartition("/")
                info = tarfile.TarInfo(path)
                if isinstance(entry, File):
                    info.size, info.mtime = entry.size, entry.mtime
                    tar.addfile(info, io.BytesIO(entry.content))
                    continue
                if isinstance(entry, Link):
                    info.type, info.linkname = tarfile.LNKTYPE if entry.hard else tarfile.SYMTYPE, entry.target
                    info.mtime = 1
                else:
                    name = f"{directory}/.wh.{base}" if entry == WHITEOUT else f"{path}/.wh..wh..opq"
                    info = tarfile.TarInfo(name.removeprefix("/"))
                tar.addfile(info)
        blob = stream.getvalue()
        builder = LayerBuilder("sha256:" + sha256(blob).hexdigest())
        parts = [(offset, bytes(data)) for offset, data in builder.feed(blob)]
        index = builder.finish()
        self.region = bytearray(index.data_size)
        for offset, data in parts:
            self.region[offset : offset + len(data)] = data
        self.tree = LayerTree(HotLayer(index.blob_digest, index.block_count, index.layout()), index.metadata)
        self.files = {it.path.decode()[1:]: it for it in walk(index.metadata) if it.data_offset is not None}

    def blocks(self, path: str) -> range:
        """Where a file lies."""
        entry = self.files[path]
        assert entry.data_offset is not None
        return range(entry.data_offset // BLOCK, (entry.data_offset + entry.size + BLOCK - 1) // BLOCK)

    def block(self, number: int) -> bytes:
        return bytes(self.region[number * BLOCK : (number + 1) * BLOCK])


def shown(layers: Sequence[Layer]) -> dict[str, tuple[int, File]]:
    """What unpacking the layers one after the other leaves: the regular files, with the layer that each comes from."""
    found: dict[str, tuple[int, File]] = {}

    def remove(path: str, itself: bool = True) -> None:
        for known in list(found):
            if known.startswith(f"{path}/") or (itself and known == path):
                del found[known]

    for number, layer in enumerate(layers):
        for path, entry in layer.entries.items():
            if entry in (WHITEOUT, OPAQUE):
                remove(path, itself=True)
        for path, entry in layer.entries.items():
            parts = path.split("/")
            for count in range(1, len(parts)):  # a directory takes the place of a file
                found.pop("/".join(parts[:count]), None)
            if entry == WHITEOUT:
                continue
            remove(path)
            target = layer.entries[entry.target] if isinstance(entry, Link) and entry.hard else entry
            if isinstance(target, File) and target.size:
                found[path] = number, target
            elif entry == OPAQUE:
                for below, file in layer.entries.items():
                    if below.startswith(f"{path}/") and isinstance(file, File) and file.size:
                        found[below] = number, file
    return found


def distinct(layers: Sequence[Layer]) -> list[LayerTree]:
    return [layer.tree for layer in layers]


def hot(layers: Sequence[Layer], *touches: tuple[int, int, int], workload: str = "default") -> HotSet:
    """(layer, first, end) touched one second after the other."""
    rows = [(*touch, 1000 * number) for number, touch in enumerate(touches)]
    return from_touches([layer.tree.layer for layer in layers], rows, workload=workload)


def all_of(layer: int, blocks: range) -> tuple[int, int, int]:
    return layer, blocks.start, blocks.stop


def carry(hotset: HotSet, old: Sequence[LayerTree], new: Sequence[LayerTree]) -> Carried:
    sizes: list[int] = []
    carrier = Carrier(old, new, sizes.append)
    assert sizes == [len(tree.metadata) for tree in (*old, *new)]
    return carrier.carry(hotset)


def carried(old: Sequence[Layer], new: Sequence[Layer], *touches: tuple[int, int, int]) -> Carried:
    result = carry(hot(old, *touches), distinct(old), distinct(new))
    result.hotset.validate()
    return result


def places(hotset: HotSet) -> list[tuple[int, int]]:
    """Every block in order, as (layer, block)."""
    return [(it.layer, block) for it in hotset.extents for block in range(it.start, it.end)]


def counts(result: Carried) -> tuple[int, int, int, int]:
    return result.kept, result.changed, result.moved, result.lost


BASE = Layer({"lib/libc": File(1, 20 * BLOCK), "bin/sh": File(2, 5 * BLOCK), "etc/conf": File(3, 100)})


def test_a_layer_that_both_images_have_is_carried_as_it_is() -> None:
    old, new = [BASE, Layer({"app": File(4, BLOCK)})], [BASE, Layer({"app2": File(5, BLOCK)})]
    result = carried(old, new, (0, 3, 6), (0, 22, 24), (0, 0, 1))
    assert [(it.layer, it.start, it.end, it.time_ms) for it in result.hotset.extents] == [
        (0, 3, 6, 0),
        (0, 22, 24, 1000),
        (0, 0, 1, 2000),
    ]
    assert counts(result) == (6, 0, 0, 0)
    key = image_key([it.tree.layer.digest for it in old])
    assert (result.hotset.carried_from, result.hotset.workload, result.hotset.records) == (key, "default", 1)
    assert result.hotset.image_key == image_key([it.tree.layer.digest for it in new]) != key


def test_a_file_that_an_upper_layer_replaces_counts_there() -> None:
    upper = Layer({"x": File(9, 3 * BLOCK), "lib/libc": File(1, 20 * BLOCK)})
    result = carried([BASE], [BASE, upper], (0, 3, 6))
    assert places(result.hotset) == [(1, upper.blocks("lib/libc").start + number) for number in (3, 4, 5)]


@pytest.mark.parametrize(
    "above",
    [
        {"lib/libc": WHITEOUT},
        {"lib": WHITEOUT},
        {"lib": OPAQUE},
        {"lib": File(8, 10)},
        {"lib": Link("bin", hard=False)},
        {"lib/libc": Link("/bin/sh", hard=False)},
        {"lib/libc": File(8, 0)},
        {"lib/libc/x": File(8, 10)},
    ],
)
def test_what_the_new_image_hides_is_lost(above: Entries) -> None:
    result = carried([BASE], [BASE, Layer(above)], (0, 3, 6), (0, 20, 21))
    assert places(result.hotset) == [(0, 20)]
    assert counts(result) == (1, 0, 0, 3)
    back = carried([BASE], [BASE, Layer(above), BASE_AGAIN], (0, 3, 6))
    assert places(back.hotset) == [(2, BASE_AGAIN.blocks("lib/libc").start + number) for number in (3, 4, 5)]


BASE_AGAIN = Layer({"first": File(7, BLOCK), "lib/libc": File(1, 20 * BLOCK)})


def test_a_changed_file_keeps_what_it_can() -> None:
    """Its tail stays its tail; what was hot as a whole is, up to twice the size."""
    old = Layer({"grown": File(1, 10 * BLOCK), "cut": File(2, 10 * BLOCK), "whole": File(3, 2 * BLOCK)})
    new = Layer({"whole": File(3, 9 * BLOCK), "cut": File(4, 4 * BLOCK - 9), "grown": File(5, 14 * BLOCK)})
    one, two, three = (old.blocks(name).start for name in ("grown", "cut", "whole"))
    touches = [(0, one + 2, one + 4), (0, one + 8, one + 10), (0, two + 3, two + 6), (0, two + 9, two + 10)]
    result = carried([old], [new], *touches, (0, three, three + 2), (0, two + 7, two + 8))
    grown, cut, whole = (new.blocks(name).start for name in ("grown", "cut", "whole"))
    wanted = [grown + 2, grown + 3, grown + 12, grown + 13, cut + 3, *range(whole, whole + 4)]
    assert places(result.hotset) == [(0, block) for block in wanted]
    assert counts(result) == (0, 11, 0, 0)


def test_same_size_and_another_time_counts_as_changed() -> None:
    old, new = (
        Layer({"a": File(1, BLOCK, 1), "b": File(2, BLOCK)}),
        Layer({"a": File(1, BLOCK, 2), "b": File(2, BLOCK)}),
    )
    assert counts(carried([old], [new], (0, 0, 2))) == (1, 1, 0, 0)


def test_a_moved_file_is_found_by_its_name() -> None:
    old = Layer({"opt/one/lib.so": File(1, 4 * BLOCK), "opt/one/other": File(2, BLOCK)})
    new = Layer({"opt/one/other": File(2, BLOCK), "usr/two/lib.so": File(1, 4 * BLOCK)})
    result = carried([old], [new], (0, 1, 3))
    assert places(result.hotset) == [(0, 2), (0, 3)] and counts(result) == (0, 0, 2, 0)


def test_of_several_the_likeliest_is_taken_for_the_moved_one() -> None:
    old = Layer({"p/3.11/json/__init__.py": File(1, 2 * BLOCK)})
    others = {"p/3.12/xml/__init__.py": File(4, 2 * BLOCK, 9), "q/__init__.py": File(5, 2 * BLOCK, 9)}
    for size, mtime in ((2 * BLOCK, 1), (2 * BLOCK, 9), (3 * BLOCK, 1)):
        new = Layer({**others, "p/3.12/json/__init__.py": File(1, size, mtime)} if size == 2 * BLOCK else {
            "p/3.12/json/__init__.py": File(1, size, mtime)
        })  # fmt: skip
        [extent] = carried([old], [new], (0, 0, 1)).hotset.extents
        assert extent.start == new.blocks("p/3.12/json/__init__.py").start


def test_no_file_that_was_there_before_is_taken_for_the_moved_one() -> None:
    twin = {"b/same": File(1, BLOCK)}
    old, new = Layer({"a/same": File(1, BLOCK), **twin}), Layer({"c": File(2, BLOCK), **twin})
    assert counts(carried([old], [new], (0, 0, 1))) == (0, 0, 0, 1)


def test_neither_is_one_of_another_size_and_directory() -> None:
    old, new = Layer({"a/same": File(1, BLOCK)}), Layer({"b/same": File(1, 2 * BLOCK)})
    assert counts(carried([old], [new], (0, 0, 1))) == (0, 0, 0, 1)


def test_hard_links_are_one_file_under_any_of_its_names() -> None:
    old = Layer({"a": File(1, 2 * BLOCK), "b": Link("a")})
    for new in (
        Layer({"x": File(2, BLOCK), "b": File(1, 2 * BLOCK)}),
        Layer({"b": File(1, 2 * BLOCK), "a": Link("b")}),
    ):
        result = carried([old], [new], (0, 0, 2))
        assert places(result.hotset) == [(0, block) for block in new.blocks("b")] and result.kept == 2


def test_blocks_of_no_file_and_layers_that_are_not_at_hand_are_lost() -> None:
    old = Layer({"a": File(1, BLOCK), "b": File(3, BLOCK)})
    replaced = Layer({"a/x": File(2, BLOCK), "a": File(1, BLOCK)})
    assert list(replaced.files) == ["a"], "what a later entry of the same tar replaces has its place, and no name"
    assert counts(carried([replaced], [old], (0, 0, 1))) == (0, 0, 0, 1)
    hotset = hot([BASE, old], (0, 0, 4), (1, 0, 1))
    result = carry(hotset, [old.tree], distinct([Layer({"x": File(3, 9)}), old]))
    assert counts(result) == (1, 0, 0, 4) and places(result.hotset) == [(1, 0)]
    assert counts(carry(hotset, [], distinct([old]))) == (1, 0, 0, 4), "the new image's layers are at hand"


def test_one_that_was_carried_is_carried_on() -> None:
    """Origin, workload and number of recordings stay; the manifest is another one."""
    first = replace(hot([BASE], (0, 0, 4), workload="serve"), records=7, manifest="sha256:" + "5" * 64)
    newer = [BASE, Layer({"x": File(3, 9)})]
    newest = [BASE, Layer({"y": File(3, 9)})]
    second = carry(first, distinct([BASE]), distinct(newer)).hotset
    third = carry(second, distinct(newer), distinct(newest)).hotset
    for it in (second, third):
        assert (it.carried_from, it.workload, it.records, it.manifest) == (first.image_key, "serve", 7, "")


def test_the_same_image_is_refused() -> None:
    with pytest.raises(Unsupported, match="is the key of both"):
        carried([BASE], [BASE], (0, 0, 1))


# --- any two images

PATHS = ["a", "a/c", "a/c/x", "a/c/y", "a/x", "a/y", "b/c/x", "b/x", "x"]
SIZES = [0, 9, BLOCK, 2 * BLOCK + 1, 5 * BLOCK]
FILES = st.builds(lambda seed, mtime: File(seed, SIZES[seed], mtime), st.integers(0, 4), st.integers(1, 2))
OTHERS: list[File | Link | str] = [WHITEOUT, OPAQUE, Link("/nowhere", hard=False)]
ENTRIES = st.one_of(FILES, FILES, FILES, st.sampled_from(OTHERS))


@st.composite
def entries(draw: st.DrawFn) -> Entries:
    """What can all be there at once: only directories hold something."""
    drawn = draw(st.dictionaries(st.sampled_from(PATHS), ENTRIES, min_size=3, max_size=7))
    solid = [path for path, entry in drawn.items() if entry != OPAQUE]
    return {path: it for path, it in drawn.items() if not any(path.startswith(f"{above}/") for above in solid)}


@st.composite
def images(draw: st.DrawFn) -> tuple[list[Entries], list[Entries]]:
    """Two images with some layers in common, none twice."""
    pool = draw(st.lists(entries(), min_size=3, max_size=4, unique_by=lambda it: tuple(it.items())))
    old = draw(st.lists(st.integers(0, len(pool) - 1), min_size=1, max_size=3, unique=True))
    new = draw(st.lists(st.integers(0, len(pool) - 1), min_size=2, max_size=3, unique=True))
    return [pool[number] for number in old], [pool[number] for number in new]


@settings(deadline=None, max_examples=40)
@given(both=images(), data=st.data())
def test_any_two_images(both: tuple[list[Entries], list[Entries]], data: st.DataObject) -> None:
    old, new = ([Layer(it) for it in image] for image in both)
    touches = []
    for number, layer in enumerate(old):
        for _ in range(4 if layer.tree.layer.blocks else 0):
            start = data.draw(st.integers(0, layer.tree.layer.blocks - 1))
            touches.append((number, start, data.draw(st.integers(start + 1, layer.tree.layer.blocks))))
    hotset = hot(old, *data.draw(st.permutations(touches)))
    if [it.tree.layer for it in old] == [it.tree.layer for it in new]:
        with pytest.raises(Unsupported):
            carry(hotset, distinct(old), distinct(new))
        return
    result = carry(hotset, distinct(old), distinct(new))
    result.hotset.validate()
    assert sum(counts(result)) == hotset.block_count
    files = shown(new)
    owners = {
        (number, block): (path, block - layer.blocks(path).start)
        for number, layer in enumerate(new)
        for path in layer.files
        for block in layer.blocks(path)
    }
    found = places(result.hotset)
    for layer_number, block in found:
        path, offset = owners[layer_number, block]  # KeyError: a block of no file
        assert files[path][0] == layer_number, f"the new image does not show this {path}"
        content = files[path][1].content[offset * BLOCK : (offset + 1) * BLOCK]
        assert new[layer_number].block(block) == content + bytes(-len(content) % BLOCK)
    order = []
    for old_number, layer in enumerate(old):
        for path in layer.files:
            entry = layer.entries[path]
            if path in files and files[path][1] == entry:
                new_number = files[path][0]
                for there, here in zip(layer.blocks(path), new[new_number].blocks(path), strict=True):
                    if (old_number, there) in (was := places(hotset)):
                        assert (new_number, here) in found, f"a hot block of {path}, which is the same, is not carried"
                        assert layer.block(there) == new[new_number].block(here)
                        order.append((was.index((old_number, there)), new_number, here))
    firsts = [(new_number, here) for _, new_number, here in sorted(order)]
    kept = [place for place in found if place in set(firsts)]
    if not result.changed and not result.moved:
        assert kept == list(dict.fromkeys(firsts)), "the order is that of the old set"
    times = {it.time_ms for it in hotset.extents}
    assert {it.time_ms for it in result.hotset.extents} <= times
