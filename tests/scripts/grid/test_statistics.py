"""Medians, spreads and paired ratios."""

from scripts.rig.grid.statistics import Spread, cells, ratio_to
from tests.scripts.grid.runs import a_run


def test_a_spread_is_written_short_when_all_look_the_same() -> None:
    spread = Spread.of([3.0, 1.0, 2.0])
    assert spread == Spread(1.0, 2.0, 3.0)
    assert spread.text(1) == "2.0 [1.0-3.0]"
    assert Spread(1.0, 1.001, 1.002).text(1) == "1.0"
    assert Spread(1e6, 2e6, 3e6).text(0, 1e-6) == "2 [1-3]"
    assert Spread.of([]) is None


def test_cells_keep_images_apart_and_systems_in_order() -> None:
    runs = [a_run("b"), a_run("new"), a_run("a"), a_run("a", image="gcc"), a_run("a", together=5), a_run("a", ok=False)]
    found = [(cell.image, cell.together, cell.system, cell.n, cell.failed) for cell in cells(runs, ["a", "b"])]
    assert found == [
        ("numpy", 1, "a", 1, 1),
        ("numpy", 1, "b", 1, 0),
        ("numpy", 1, "new", 1, 0),
        ("gcc", 1, "a", 1, 0),
        ("numpy", 5, "a", 1, 0),
    ]


def test_ratios_are_taken_within_rounds() -> None:
    """The machine was three times slower in round 2: the ratio of medians would be 0.2, 0.5 or 0.6."""
    runs = [
        a_run("overlayfs", 10, round=1), a_run("ours", 5, round=1),
        a_run("overlayfs", 30, round=2), a_run("ours", 15, round=2),
        a_run("ours", 2, round=3),
        a_run("overlayfs", 1, round=3, session="other"),
    ]  # fmt: skip
    overlayfs, ours = cells(runs, ["overlayfs", "ours"])
    assert ratio_to(ours, overlayfs) == 0.5
    assert ratio_to(overlayfs, overlayfs) == 1.0


def test_without_a_common_round_there_is_no_ratio() -> None:
    overlayfs, ours = cells([a_run("overlayfs", round=1), a_run("ours", round=2)], ["overlayfs", "ours"])
    assert ratio_to(ours, overlayfs) is None


def test_the_share_of_the_floor_is_the_median_of_shares() -> None:
    (cell,) = cells([a_run(ready_s=2.0), a_run(ready_s=4.0), a_run(ready_s=5.0), a_run(floor_s=None)], [])
    assert cell.share_of_floor == 0.25
    assert cell.spread(lambda run: run.demand_fetches) is None
