"""Which workload a container is. The first of these that answers:

1. the operator's rules (`rules`);
2. the arguments: a hot set of the image on this node whose recorded containers had the same (a set that a person has
   named is found again so);
3. a name made from the arguments (`naming`), which other nodes and their artifacts use too. An image gets only so many:
   what differs at every start is a number, not the work, and such containers are `default`.

Decides only; remembers of the sets on this node which arguments they have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blockindex.hotset import DEFAULT_WORKLOAD
from snapshotter.hotstore import HotStore

from .container import Container, argv_digest
from .naming import workload_name
from .rules import Rule, first_fitting

__all__ = ["Choice", "WorkloadChoice"]

_MOST_NAMED = 32
"""Workloads of an image that are named by their arguments: a node's disk and its registry are not to fill with them."""

_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Choice:
    """A workload, the digest of the container's arguments, and why: "rule", "recorded", "arguments" or "too many"."""

    workload: str
    argv: str
    why: str


class WorkloadChoice:
    """See the module. Thread-safe."""

    def __init__(self, rules: Sequence[Rule], hotsets: HotStore) -> None:
        self._rules = rules
        self._hotsets = hotsets
        self._argvs: dict[Path, tuple[int, tuple[str, ...]]] = {}  # of a file: time of modification, its arguments

    def choose(self, container: Container, image_key: str) -> Choice:
        """The workload of a container of this image."""
        digest = argv_digest(container.argv)
        named = first_fitting(self._rules, container)
        if named is not None:
            return Choice(named, digest, "rule")
        files = self._hotsets.find(image_key)
        same = [it for it, path in files.items() if digest in self._argvs_of(image_key, it, path)]
        name = workload_name(container.argv)
        if same:  # the set that a person has named, else the one of that name, else `default`
            order = sorted(same, key=lambda it: (it == DEFAULT_WORKLOAD, it == name, it))
            return Choice(order[0], digest, "recorded")
        if name not in files and len(files) >= _MOST_NAMED:
            return Choice(DEFAULT_WORKLOAD, digest, "too many")
        return Choice(name, digest, "arguments")

    def _argvs_of(self, image_key: str, workload: str, path: Path) -> tuple[str, ...]:
        try:
            written = path.stat().st_mtime_ns
        except OSError:  # it has just been removed
            return ()
        known = self._argvs.get(path)
        if known is None or known[0] != written:
            pack = self._hotsets.load(image_key, workload)
            if len(self._argvs) >= _REMEMBERED:
                self._argvs.clear()
            known = self._argvs[path] = written, () if pack is None else pack.hotset.argvs
        return known[1]
