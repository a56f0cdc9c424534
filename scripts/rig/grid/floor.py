"""The physical limit of a cold start: what a node needs that knows everything, over this link.

    floor = max(t_warm, B_ws / rate) + N * RTT + slow start

Computing and transfer overlap perfectly. `t_warm`: the container once all is there. `B_ws`: bytes of the working set,
compressed. `N`: dependent round trips, each of which needs the answer to the one before: connect, resolve the manifest,
get it, get the config, get the index, get the data. Slow start: the round trips until a connection's window of ten
segments (14.6 kB), doubled with each, has grown to the bandwidth-delay product.
"""

import math
from dataclasses import dataclass

from scripts.rig.grid.network import Network

__all__ = ["ROUND_TRIPS", "WorkingSet", "floor_s", "slow_start_s"]

ROUND_TRIPS = 6
_FIRST_WINDOW = 14_600


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """What a container reads, and how long it takes once all of it is there.

    `files`, `regions` (runs of neighbouring pages) and `page_bytes` are what it touched with no read-ahead,
    `gzip_bytes` the regions by gzip -6, each for itself. `warm_s` is the shortest of `warm_runs` warm starts.
    """

    files: int
    regions: int
    page_bytes: int
    gzip_bytes: int
    warm_s: float
    warm_runs: int


def floor_s(working_set: WorkingSet, network: Network) -> float:
    """Seconds below which no cold start can be."""
    transfer_s = working_set.gzip_bytes / network.bytes_per_s
    return max(working_set.warm_s, transfer_s) + ROUND_TRIPS * network.rtt_s + slow_start_s(network)


def slow_start_s(network: Network) -> float:
    """Seconds that the first connection is slower than the link."""
    product = network.bytes_per_s * network.rtt_s
    return network.rtt_s * max(0.0, math.log2(product / _FIRST_WINDOW) - 1) if product > 0 else 0.0
