"""Whether recordings agree: by the blocks that are in both, after small gaps were closed."""

import pytest

from blockindex.hotset import HotLayer, HotSet, from_touches
from snapshotter.publish.agreement import agree, jaccard

LAYER = HotLayer("sha256:" + "1" * 64, 1000, "sha256:" + "2" * 64)


def recorded(*runs: tuple[int, int], layer: HotLayer = LAYER) -> HotSet:
    return from_touches([layer], [(0, start, end, number) for number, (start, end) in enumerate(runs)])


@pytest.mark.parametrize(
    ("left", "right", "share"),
    [
        ([(0, 100)], [(0, 100)], 1.0),
        ([(0, 100)], [(0, 90)], 0.9),
        ([(0, 100)], [(100, 200)], 0.0),
        ([(0, 50), (51, 100)], [(0, 100)], 1.0),
        ([(0, 50), (60, 100)], [(0, 100)], 0.9),
        ([(90, 100), (0, 10)], [(0, 10), (20, 50)], 0.2),
        ([], [], 0.0),
    ],
)
def test_jaccard(left: list[tuple[int, int]], right: list[tuple[int, int]], share: float) -> None:
    assert jaccard(recorded(*left), recorded(*right)) == jaccard(recorded(*right), recorded(*left)) == share


def test_of_other_layers_nothing_is_alike() -> None:
    other = HotLayer(LAYER.digest, LAYER.blocks, "sha256:" + "3" * 64)
    assert jaccard(recorded((0, 9)), recorded((0, 9), layer=other)) == 0


def test_the_newest_agree_each_with_each() -> None:
    a, b, c = recorded((0, 94)), recorded((0, 100)), recorded((6, 100))
    assert agree([a, b], 2) and agree([b, c], 2) and not agree([a, c], 2)
    assert not agree([a, b, c], 3), "the first and the third do not"
    assert agree([a, b, c], 2), "older ones do not count"
    assert not agree([a], 2) and not agree([], 2)
