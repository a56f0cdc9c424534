"""Which files hold which blocks: the same answer as the tree's walk gives, and no other exception than Corrupt."""

import random

import pytest

from blockindex.erofs import FilePart, FilePlaces, walk
from blockindex.errors import Corrupt
from blockindex.model import BLOCK
from tests.blockindex.layers import archive
from tests.blockindex.tarcases import END, Layer, file, header, unpack


def wide_layer() -> Layer:
    """A directory that takes several blocks, and a deep path."""
    names = b"".join(file(b"wide/%04d" % number, b"x" * (number % 3)) for number in range(700))
    return unpack(header(b"wide/", b"5", mode=0o755) + names + file(b"a/b/c/d", b"y" * 9000) + END)


def by_walk(metadata: bytes, start: int, end: int) -> set[tuple[frozenset[bytes], int, int]]:
    """What `parts` has to say of a run: each file's names, and the part of it."""
    names: dict[int, set[bytes]] = {}
    sizes: dict[int, int] = {}
    for entry in walk(metadata):
        if entry.data_offset is not None:
            names.setdefault(entry.data_offset // BLOCK, set()).add(entry.path[1:])
            sizes[entry.data_offset // BLOCK] = -(-entry.size // BLOCK)
    return {
        (frozenset(names[at]), (max(at, start) - at) * BLOCK, (min(at + size, end) - max(at, start)) * BLOCK)
        for at, size in sizes.items()
        if max(at, start) < min(at + size, end)
    }


@pytest.mark.parametrize("layer", [unpack(archive()), wide_layer()], ids=["random", "wide"])
def test_each_run_is_given_as_the_parts_of_files_that_it_is(layer: Layer) -> None:
    places = FilePlaces(layer.metadata)
    blocks = max(entry.data_offset // BLOCK for entry in layer.entries.values() if entry.data_offset is not None) + 3
    by_path = {path: names for names, *_ in by_walk(layer.metadata, 0, blocks) for path in names}
    rng = random.Random(1)
    runs = [(0, blocks), (blocks, blocks + 9), *((at, at + rng.randrange(1, 9)) for at in range(0, blocks, 5))]
    for run in runs:
        parts = list(places.parts([run]))
        assert [part.offset for part in parts[1:]] == [0] * len(parts[1:]), "files are in the order of their blocks"
        found = {(by_path[part.path], part.offset, part.size) for part in parts}
        assert found == by_walk(layer.metadata, *run) and len(found) == len(parts)


def test_a_file_in_the_middle_of_a_run() -> None:
    layer = unpack(file(b"one", b"1" * 5000) + file(b"two", b"2" * BLOCK) + file(b"three", b"3") + END)
    parts = list(FilePlaces(layer.metadata).parts([(1, 4)]))
    assert parts == [FilePart(b"one", BLOCK, BLOCK), FilePart(b"two", 0, BLOCK), FilePart(b"three", 0, BLOCK)]


def test_a_layer_without_files_has_no_parts() -> None:
    assert list(FilePlaces(unpack(header(b"d/", b"5") + END).metadata).parts([(0, 100)])) == []


@pytest.mark.parametrize("metadata", [b"", bytes(BLOCK), bytes(2 * BLOCK)])
def test_what_is_no_tree_is_corrupt(metadata: bytes) -> None:
    with pytest.raises(Corrupt):
        FilePlaces(metadata)


@pytest.mark.parametrize("seed", range(4))
def test_damage_is_corrupt_or_harmless(seed: int) -> None:
    """Metadata may be asked for before they are judged."""
    layer, rng, refused = wide_layer(), random.Random(seed), 0
    for _ in range(150):
        damaged = bytearray(layer.metadata)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(BLOCK if rng.random() < 0.9 else 0, len(damaged))
            damaged[at : at + 4] = rng.choice([b"\xff" * 4, bytes(4), rng.randbytes(4)])[: len(damaged) - at]
        try:
            list(FilePlaces(bytes(damaged)).parts([(0, 10_000)]))
        except Corrupt:
            refused += 1
    assert refused, "nothing was damaged enough"


def test_a_directory_with_two_names_does_not_go_round_for_ever() -> None:
    layer = unpack(header(b"d/", b"5", mode=0o755) + header(b"d/e/", b"5", mode=0o755) + END)
    outer, inner = (layer.entries[path].nid for path in (b"/d", b"/d/e"))
    looped = layer.metadata.replace(inner.to_bytes(8, "little"), outer.to_bytes(8, "little"))
    with pytest.raises(Corrupt, match="two names"):
        FilePlaces(looped)
