"""What the runs of one `scripts/bench run` share: links, servers, images, and what is made of images beforehand.

All links are open at the same time, each with a registry and a file server of its own; the registries share one
store, so an image is pushed once. What an image needs (indexes, hot set, a peer's form, the working set) is made when
it is first asked for, over the fastest link, and kept for the session; the working set is kept in the cache.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from scripts.rig import artifacts
from scripts.rig.coldstart import DEADLINE_S, Bench, Extras, System, cold_start
from scripts.rig.errors import RigError
from scripts.rig.fileserver import FileServer
from scripts.rig.grid import machine, workingset
from scripts.rig.grid.floor import WorkingSet
from scripts.rig.grid.network import Network
from scripts.rig.image import CACHE, Recipe, build
from scripts.rig.link import Link
from scripts.rig.oci import Layout
from scripts.rig.registry import Registry
from scripts.rig.workspace import Workspace

__all__ = ["Session", "Stage"]

_WARM_RUNS = 5


@dataclass(frozen=True, slots=True)
class Stage:
    """One open link, what its test said, and the servers behind it."""

    network: Network
    link: Link
    tested: str
    registry: Registry
    files: FileServer


class Session:
    """Everything for runs on these networks. All of it ends with `close`, or when it is left. With `any_link`, links
    that are not what they should be are used all the same. Without `background` see `Bench`."""

    def __init__(
        self,
        networks: Sequence[Network],
        progress: Callable[[str], None],
        cache: Path = CACHE,
        any_link: bool = False,
        background: bool = True,
    ) -> None:
        self._any_link = any_link
        self._background = background
        self._progress = progress
        self._cache = cache
        self._layouts: dict[str, Layout] = {}
        self._references: dict[str, str] = {}
        self._ready: dict[str, Bench] = {}
        self._sets: dict[str, WorkingSet] = {}
        self._stack = ExitStack()
        try:
            self.workspace = self._stack.enter_context(Workspace())
            self.stages: Mapping[str, Stage] = {each.name: self._open(each) for each in networks}
        except BaseException:
            self._stack.close()
            raise

    def bench(self, recipe: Recipe, network: Network, system: System) -> Bench:
        """Everything for cold starts of this image on this network with this system."""
        self._ready[recipe.name] = self._prepare(recipe, system, self._ready.get(recipe.name))
        stage = self.stages[network.name]
        return replace(
            self._ready[recipe.name],
            link=stage.link,
            registry=stage.registry,
            files=stage.files,
            deadline_s=self._deadline_s(recipe, network),
            background=self._background,
        )

    def working_set(self, recipe: Recipe, again: bool = False) -> WorkingSet:
        """The image's working set, from the cache unless it is to be measured `again`."""
        found = self._sets.get(recipe.name) or (None if again else workingset.load(recipe, self._cache))
        if found is None:
            found = self._measure(recipe)
            workingset.save(recipe, found, machine.describe(), self._cache)
        self._sets[recipe.name] = found
        return found

    def layout(self, recipe: Recipe) -> Layout:
        """The image, built if it is not in the cache."""
        if recipe.image not in self._layouts:
            self._layouts[recipe.image] = build(recipe, self.workspace.env, self._progress, self._cache)
        return self._layouts[recipe.image]

    def close(self) -> None:
        """End everything. Safe to call twice."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _fastest(self) -> Stage:
        return max(self.stages.values(), key=lambda stage: (stage.network.mbit, -stage.network.rtt_ms))

    def _open(self, network: Network) -> Stage:
        link = Link(self.workspace, network.mbit, network.rtt_ms, f"link-{network.name}")
        self._stack.callback(link.close)
        tested = link.tested(self._any_link)
        self._progress(f"{network.name}: {tested}")
        first: Registry | None = getattr(self, "_first", None)
        registry = Registry(self.workspace, link, f"registry-{network.name}", first)
        self._stack.callback(registry.close)
        self._first = first or registry
        files = FileServer(self.workspace, link, f"files-{network.name}")
        self._stack.callback(files.close)
        return Stage(network, link, tested, registry, files)

    def _bare(self, recipe: Recipe, stage: Stage) -> Bench:
        """The image in the registry, and nothing else."""
        layout = self.layout(recipe)
        if recipe.image not in self._references:
            self._references[recipe.image] = self._first.push(layout, f"bench/{recipe.image}")
        reference = self._references[recipe.image]
        deadline_s = self._deadline_s(recipe, stage.network)
        return Bench(self.workspace, stage.link, stage.registry, stage.files, recipe, reference, deadline_s=deadline_s)

    def _prepare(self, recipe: Recipe, system: System, bench: Bench | None) -> Bench:
        """`bench`, and what the system needs beside it."""
        link, say = self._fastest.link, self._say(recipe)
        bench = bench or self._bare(recipe, self._fastest)
        ours = bench.references
        if system in (System.BOOTSEER, System.BOOTSEER_HOT) and System.BOOTSEER.value not in ours:
            reference = artifacts.publish_indexes(self.workspace, link, bench.reference, say)
            bench = _with(bench, System.BOOTSEER, reference)
        if system is System.BOOTSEER_HOT and system.value not in ours:
            reference = artifacts.publish_hot_set(self.workspace, link, recipe, bench.reference, say)
            bench = _with(bench, system, reference)
        if system is System.ORACLE and bench.working_set_bytes is None:
            bench = replace(bench, working_set_bytes=self.working_set(recipe).gzip_bytes)
        if system.peer is not None and system.value not in ours:
            reference = artifacts.convert(self.workspace, link, system.peer, bench.reference)
            bench = _with(bench, system, reference)
        return bench

    def _measure(self, recipe: Recipe) -> WorkingSet:
        started = time.monotonic()
        self._progress(f"{recipe.name}: measuring the working set, once")
        touched = workingset.touched(recipe, self.layout(recipe), self.workspace)
        bench = self._bare(recipe, self._fastest)
        result = cold_start(bench, System.OVERLAYFS, f"floor-{recipe.name}", Extras(warm=_WARM_RUNS))
        if not result.output_ok:
            raise RigError(f"the container of {recipe.name} said {result.line!r}")
        found = WorkingSet(**asdict(touched), warm_s=min(result.warm_s), warm_runs=len(result.warm_s))
        self._progress(
            f"{recipe.name}: reads {found.page_bytes / 1e6:.2f} MB in {found.regions} regions of {found.files} files, "
            f"{found.gzip_bytes / 1e6:.2f} MB gzip, warm start {found.warm_s:.2f} s "
            f"({time.monotonic() - started:.0f} s)"
        )
        return found

    def _deadline_s(self, recipe: Recipe, network: Network) -> float:
        """Three times the time on the wire beside the usual deadline."""
        return DEADLINE_S + 3 * self.layout(recipe).size / network.bytes_per_s

    def _say(self, recipe: Recipe) -> Callable[[str], None]:
        return lambda text: self._progress(f"{recipe.name}: {text}")

    def __repr__(self) -> str:
        return f"<Session {', '.join(self.stages)} {len(self._ready)} images>"


def _with(bench: Bench, system: System, reference: str) -> Bench:
    """`bench`, in which the system pulls this reference."""
    return replace(bench, references={**bench.references, system.value: reference})
