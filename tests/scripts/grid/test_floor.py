"""The physical limit, against figures worked out by hand."""

import pytest

from scripts.rig.errors import RigError
from scripts.rig.grid.floor import WorkingSet, floor_s, slow_start_s
from scripts.rig.grid.network import NETWORKS, Network, choose

SMALL = WorkingSet(171, 500, 18_000_000, 7_000_000, warm_s=0.4, warm_runs=5)


@pytest.mark.parametrize(("name", "round_trips"), [("dc", 3.10), ("metro", 3.10), ("wan", 4.42)])
def test_slow_start_in_round_trips(name: str, round_trips: float) -> None:
    network = NETWORKS[name]
    assert slow_start_s(network) / network.rtt_s == pytest.approx(round_trips, abs=0.01)


def test_a_short_link_has_no_slow_start() -> None:
    assert slow_start_s(Network("x", 10, 1)) == 0
    assert slow_start_s(Network("x", 1000, 0)) == 0


def test_the_slower_of_transfer_and_work_counts() -> None:
    metro = NETWORKS["metro"]
    assert floor_s(SMALL, metro) == pytest.approx(0.56 + 6 * 0.02 + slow_start_s(metro))
    dc = NETWORKS["dc"]  # 0.056 s on the wire
    assert floor_s(SMALL, dc) == pytest.approx(0.4 + 6 * 0.002 + slow_start_s(dc))


def test_networks_are_chosen_once_each_and_groups_unfolded() -> None:
    assert [network.name for network in choose(["metro", "sweep", "metro", "sweep-1"])] == [
        "metro", "sweep-1", "sweep-5", "sweep-20", "sweep-50", "sweep-100", "sweep-200",
    ]  # fmt: skip
    assert {(NETWORKS[name].mbit, NETWORKS[name].rtt_ms) for name in ("dc", "metro", "wan")} == {
        (1000, 2), (100, 20), (50, 100),
    }  # fmt: skip
    with pytest.raises(RigError, match="no network moon; there are dc, metro"):
        choose(["moon"])
