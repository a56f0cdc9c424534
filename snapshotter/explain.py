"""Why a container's start took what it took: its reads that waited, by layer and by what ended the wait.

Pure accounting over three sources: the layers of the container's snapshot, the fetch process's journal from the
snapshot's creation on, and the prefetch of the image. A wait counts for every container that uses the layer meanwhile:
the kernel does not say who reads.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Explanation", "LayerShare", "explain", "time_waited"]

_LATE_S = 0.05


@dataclass(frozen=True, slots=True)
class LayerShare:
    """One layer's part. `waits` reads missed `missed_blocks` blocks and waited `waited_s` (time in which at least one
    did), the longest `longest_s`; `brought_by` counts these reads by the class of traffic that ended their wait,
    `bytes` what came of the layer's blob by class. `ready_s` and `mount_s` are what bringing the layer in and mounting
    it took at the pull; None where this daemon has not done it since it started."""

    digest: str
    name: str
    waits: int
    missed_blocks: int
    waited_s: float
    longest_s: float
    brought_by: Mapping[str, int]
    bytes: Mapping[str, int]
    ready_s: float | None
    mount_s: float | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """See the module. Times in seconds, `since` and `until` since 1970. `hot` is the prefetch of the image's hot
    blocks, as `bootseer status` has it, empty where there was none; `workload` is the container's, empty where it is
    not known; `whole` is false where the journal lacks the
    beginning."""

    container: str
    image: str
    since: float
    until: float
    whole: bool
    waited_s: float
    layers: Sequence[LayerShare]
    hot: Mapping[str, Any]
    findings: Sequence[str] = field(default_factory=tuple)
    workload: str = ""

    def as_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def explain(
    container: str,
    image: str,
    layers: Sequence[Mapping[str, Any]],
    journal: Mapping[str, Any],
    hot: Mapping[str, Any],
    since: float,
    until: float,
    workload: str = "",
) -> Explanation:
    """`layers`: {digest, name, ready_s, mount_s}, from the bottom up; `journal`: see `Journal.excerpt`."""
    shares = [_share(layer, journal) for layer in layers]
    waited_s = time_waited((it["at"], it["at"] + it["seconds"]) for it in journal["waits"])
    whole = journal["whole_since"] <= since
    findings = tuple(_findings(shares, hot, waited_s, whole))
    return Explanation(container, image, since, until, whole, waited_s, shares, hot, findings, workload)


def time_waited(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of the intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


def _share(layer: Mapping[str, Any], journal: Mapping[str, Any]) -> LayerShare:
    waits = [it for it in journal["waits"] if it["name"] == layer["name"]]
    brought_by: dict[str, int] = {}
    for wait in waits:
        brought_by[wait["brought_by"]] = brought_by.get(wait["brought_by"], 0) + 1
    came: dict[str, int] = {}
    for arrival in journal["arrivals"]:
        if arrival["name"] == layer["name"]:
            came[arrival["lane"]] = came.get(arrival["lane"], 0) + arrival["size"]
    return LayerShare(
        digest=layer["digest"],
        name=layer["name"],
        waits=len(waits),
        missed_blocks=sum(it["end"] - it["start"] for it in waits),
        waited_s=time_waited((it["at"], it["at"] + it["seconds"]) for it in waits),
        longest_s=max((it["seconds"] for it in waits), default=0.0),
        brought_by=brought_by,
        bytes=came,
        ready_s=layer["ready_s"],
        mount_s=layer["mount_s"],
    )


def _findings(shares: Sequence[LayerShare], hot: Mapping[str, Any], waited_s: float, whole: bool) -> Iterable[str]:
    """What an operator should know, the weightiest first."""
    if not whole:
        yield "the beginning is missing: the fetch process was restarted, or too much has happened since"
    waits = sum(share.waits for share in shares)
    if not waits:
        yield "no read waited: every block was on the node when it was read"
        return
    yield f"{waits} reads missed their blocks; for {waited_s:.2f} s at least one of them waited"
    demand = sum(share.brought_by.get("demand", 0) for share in shares)
    if not hot or hot.get("state") == "none":
        yield "the image has no hot set here: `bootseer record` makes one, `bootseer hotset export` publishes it"
    elif demand:
        yield f"{demand} of these reads were not in the hot set, or came before it: record it again if they are many"
    slow = max(shares, key=lambda share: share.waited_s)
    if slow.waited_s > _LATE_S and len(shares) > 1:
        yield f"most of the waiting was for layer {slow.digest.removeprefix('sha256:')[:12]}: {slow.waited_s:.2f} s"
