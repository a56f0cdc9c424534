"""The emulated networks by name."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scripts.rig.errors import RigError

__all__ = ["GROUPS", "NETWORKS", "Network", "choose"]


@dataclass(frozen=True, slots=True)
class Network:
    """A link's rate in Mbit/s, all headers counted, and its round-trip time in ms."""

    name: str
    mbit: float
    rtt_ms: float

    @property
    def bytes_per_s(self) -> float:
        """The rate in bytes a second."""
        return self.mbit * 1e6 / 8

    @property
    def rtt_s(self) -> float:
        """The round-trip time in seconds."""
        return self.rtt_ms / 1000


_SWEEP = tuple(Network(f"sweep-{rtt_ms}", 100, rtt_ms) for rtt_ms in (1, 5, 20, 50, 100, 200))

NETWORKS: Mapping[str, Network] = {
    network.name: network
    for network in (Network("dc", 1000, 2), Network("metro", 100, 20), Network("wan", 50, 100), *_SWEEP)
}
"""The same region, a country, another continent; and one rate at six distances."""

GROUPS: Mapping[str, tuple[str, ...]] = {"sweep": tuple(network.name for network in _SWEEP)}
"""Names that stand for several."""


def choose(names: Iterable[str]) -> list[Network]:
    """The networks of these names, each once; RigError for an unknown one."""
    chosen: dict[str, Network] = {}
    for name in names:
        for each in GROUPS.get(name, (name,)):
            if each not in NETWORKS:
                raise RigError(f"no network {each}; there are {', '.join([*NETWORKS, *GROUPS])}")
            chosen[each] = NETWORKS[each]
    return list(chosen.values())
