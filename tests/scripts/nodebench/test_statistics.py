"""Medians of paired ratios, their interval, and quantiles."""

import random

import pytest

from scripts.rig.nodebench.statistics import Latency, paired_ratio, quantile


def test_the_ratio_is_the_median_of_the_pairs_not_of_the_medians() -> None:
    found = paired_ratio([(1, 1), (2, 1), (30, 10), (8, 2), (500, 100)])
    assert (found.n, found.median) == (5, 3)
    assert found.low is not None and found.high is not None and 1 <= found.low <= 3 <= found.high <= 5


def test_few_pairs_have_no_interval() -> None:
    found = paired_ratio([(1, 2), (3, 2)])
    assert (found.median, found.low, found.high) == (1.0, None, None)
    assert str(found) == "1.000"


def test_the_interval_holds_the_truth_19_times_out_of_20() -> None:
    source = random.Random(7)
    held = 0
    for _ in range(100):
        found = paired_ratio([(source.gauss(1.1, 0.1), 1.0) for _ in range(20)])
        assert found.low is not None and found.high is not None
        held += found.low <= 1.1 <= found.high
    assert 88 <= held <= 99


def test_the_interval_narrows_with_more_pairs_and_is_the_same_each_time() -> None:
    source = random.Random(3)
    pairs = [(source.gauss(1, 0.1), 1.0) for _ in range(200)]
    few, many = paired_ratio(pairs[:20]), paired_ratio(pairs)
    assert few.low and few.high and many.low and many.high
    assert many.high - many.low < (few.high - few.low) / 2
    assert paired_ratio(pairs) == many


@pytest.mark.parametrize(
    ("share", "wanted"), [(0.0, 1), (0.01, 1), (0.011, 2), (0.5, 50), (0.99, 99), (0.999, 100), (1.0, 100)]
)
def test_quantiles_are_values_that_were_measured(share: float, wanted: int) -> None:
    assert quantile(range(1, 101), share) == wanted


def test_latencies_in_microseconds() -> None:
    values = [20_000] * 9_899 + [900_000] * 91 + [5_000_000] * 10
    found = Latency.of_ns(values)
    assert (found.n, found.median_us, found.p99_us, found.p999_us) == (10_000, 20, 900, 900)
    assert Latency.of_ns(values[1:]).p999_us is None, "ten outliers of fewer than 10,000 are no quantile"
    assert str(found) == "20.0 us, p99 900 us, p99.9 900 us"
