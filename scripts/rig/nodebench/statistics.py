"""Medians, quantiles, and the interval of a median of paired ratios. Knows nothing of what was measured."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["Latency", "PairedRatio", "paired_ratio", "quantile"]

_RESAMPLES = 4000
_TAIL = 0.025


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """Median of the ratios within `n` pairs, with its 95 % interval by the bootstrap; None with fewer than 5 pairs:
    such an interval would mean nothing."""

    n: int
    median: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.median:.3f}"
        return f"{self.median:.3f} [{self.low:.3f}-{self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Latency:
    """Quantiles of `n` latencies, in microseconds. p99.9 is None with fewer than 10,000: it would be a few outliers."""

    n: int
    median_us: float
    p99_us: float
    p999_us: float | None

    @staticmethod
    def of_ns(values: Sequence[int]) -> "Latency":
        """From latencies in nanoseconds."""
        ordered = sorted(values)
        p999 = quantile(ordered, 0.999) / 1000 if len(ordered) >= 10_000 else None
        return Latency(len(ordered), quantile(ordered, 0.5) / 1000, quantile(ordered, 0.99) / 1000, p999)

    def __str__(self) -> str:
        last = "-" if self.p999_us is None else f"{self.p999_us:.0f}"
        return f"{self.median_us:.1f} us, p99 {self.p99_us:.0f} us, p99.9 {last} us"


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the ascending values do not exceed."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def paired_ratio(pairs: Sequence[tuple[float, float]], seed: int = 0) -> PairedRatio:
    """Of pairs (ours, theirs): the median of ours / theirs. The same pairs give the same interval."""
    ratios = [ours / theirs for ours, theirs in pairs]
    if len(ratios) < 5:
        return PairedRatio(len(ratios), median(ratios), None, None)
    source = random.Random(seed)
    medians = sorted(median(source.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    return PairedRatio(len(ratios), median(ratios), quantile(medians, _TAIL), quantile(medians, 1 - _TAIL))
