"""Medians, spreads and paired ratios over runs. A run that is not ok is counted, and takes part in nothing else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from scripts.rig.grid.run import Run

__all__ = ["Cell", "Spread", "cells", "ratio_to"]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and extremes of the values of some runs."""

    low: float
    middle: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread | None":
        """None of no values."""
        return Spread(min(values), median(values), max(values)) if values else None

    def text(self, digits: int, scale: float = 1.0) -> str:
        """`median [lowest-highest]`, or one number if they look the same."""
        low, middle, high = (f"{value * scale:.{digits}f}" for value in (self.low, self.middle, self.high))
        return middle if low == high else f"{middle} [{low}-{high}]"


@dataclass(frozen=True, slots=True)
class Cell:
    """All runs of one system with one image on one network, `together` containers at once."""

    image: str
    network: str
    together: int
    system: str
    runs: tuple[Run, ...]
    failed: int

    @property
    def n(self) -> int:
        """How many of them count."""
        return len(self.runs)

    def spread(self, value: Callable[[Run], float | None]) -> Spread | None:
        """The spread of what `value` gives of each run, None left out."""
        return Spread.of([number for run in self.runs if (number := value(run)) is not None])

    @property
    def share_of_floor(self) -> float | None:
        """The median of floor / time to ready: 1 is the physical limit."""
        shares = [run.floor_s / run.ready_s for run in self.runs if run.floor_s is not None]
        return median(shares) if shares else None


def cells(runs: Sequence[Run], order: Sequence[str]) -> list[Cell]:
    """The runs by image, network and system; images and networks as they come, systems in `order`, then others."""
    found: dict[tuple[str, str, int], dict[str, list[Run]]] = {}
    for run in runs:
        systems = found.setdefault((run.image, run.network, run.together), {})
        systems.setdefault(run.system, []).append(run)
    rank = {system: number for number, system in enumerate(order)}
    result = []
    for (image, network, together), systems in found.items():
        for system in sorted(systems, key=lambda name: (rank.get(name, len(rank)), name)):
            good = tuple(run for run in systems[system] if run.ok)
            result.append(Cell(image, network, together, system, good, len(systems[system]) - len(good)))
    return result


def ratio_to(cell: Cell, other: Cell) -> float | None:
    """The median of the ratios (time to ready of `cell` / of `other`) within the rounds that have both, if any have."""
    reference: dict[tuple[object, ...], list[float]] = {}
    for run in other.runs:
        reference.setdefault(run.group, []).append(run.ready_s)
    ratios = [run.ready_s / median(reference[run.group]) for run in cell.runs if run.group in reference]
    return median(ratios) if ratios else None
