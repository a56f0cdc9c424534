"""The plots of a report as SVG: the same runs give the same bytes.

1. `ready-NETWORK.svg`: bars of pull and run for each system, one group an image, with the physical limit as a tick.
2. `rtt-IMAGE.svg`: time to ready against round-trip time, where an image was started at several distances of one rate.
3. `bytes-NETWORK.svg`: bytes received until ready, with the whole image as a tick.

Needs no display. Imports matplotlib, so only the report imports this, and only when it draws.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from scripts.rig.coldstart import System
from scripts.rig.grid.network import NETWORKS
from scripts.rig.grid.run import Run
from scripts.rig.grid.statistics import Cell, Spread, cells

__all__ = ["draw"]

_ORDER = tuple(system.value for system in System)
_COLOURS = {
    "overlayfs": "#9a9a9a",
    "bootseer-first": "#9cc4e4",
    "bootseer": "#3b8bc4",
    "bootseer-hot": "#d1495b",
    "oracle": "#3d3d3d",
    "stargz": "#e3b23c",
}
_OTHER = "#7b6d8d"


def draw(runs: Sequence[Run], directory: Path) -> list[Path]:
    """Draw what these runs give into `directory`, which is made; the files. Runs of several containers at once are left
    out."""
    found = [cell for cell in cells([run for run in runs if run.together == 1], _ORDER) if cell.runs]
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    with mpl.rc_context():
        _set_style()
        for network in dict.fromkeys(cell.network for cell in found):
            mine = [cell for cell in found if cell.network == network]
            if not network.startswith("sweep"):
                written.append(_save(_bars(mine, network), directory / f"ready-{network}.svg"))
                written.append(_save(_bytes(mine, network), directory / f"bytes-{network}.svg"))
        for image in dict.fromkeys(cell.image for cell in found):
            mine = [cell for cell in found if cell.image == image and cell.network.startswith("sweep")]
            if len({cell.network for cell in mine}) > 1:
                written.append(_save(_distance(mine, image), directory / f"rtt-{image}.svg"))
    return written


def _set_style() -> None:
    """Nobody's own settings: the same runs give the same bytes."""
    mpl.rcdefaults()
    mpl.rcParams["svg.hashsalt"] = "bootseer"
    mpl.rcParams["font.size"] = 9.0
    mpl.rcParams["axes.spines.top"] = mpl.rcParams["axes.spines.right"] = False
    mpl.rcParams["legend.frameon"] = False


def _bars(found: Sequence[Cell], network: str) -> Figure:
    figure, axes = _axes(found)
    for position, cell in _positions(found):
        colour = _COLOURS.get(cell.system, _OTHER)
        ready = median(run.ready_s for run in cell.runs)
        pull = median(run.t_pull_s or 0.0 for run in cell.runs)
        axes.bar(position, min(pull, ready), width=0.8, color=colour, alpha=0.45)
        axes.bar(position, max(0.0, ready - pull), bottom=min(pull, ready), width=0.8, color=colour)
        spread = cell.spread(lambda run: run.t_ready_s)
        assert spread is not None
        axes.vlines(position, spread.low, spread.high, color="black", linewidth=0.8)
        axes.annotate(f"{ready:.2f}", (position, spread.high), ha="center", va="bottom", fontsize=7)
        floors = [run.floor_s for run in cell.runs if run.floor_s is not None]
        if floors:
            axes.hlines(median(floors), position - 0.45, position + 0.45, color="black", linewidth=1.2)
    axes.set_ylabel("seconds to ready (light: pull; line: physical limit)")
    _finish(axes, found, _described(network))
    return figure


def _bytes(found: Sequence[Cell], network: str) -> Figure:
    figure, axes = _axes(found)
    for position, cell in _positions(found):
        size = median(run.bytes or 0 for run in cell.runs) / 1e6
        axes.bar(position, size, width=0.8, color=_COLOURS.get(cell.system, _OTHER))
        axes.annotate(f"{size:.1f}", (position, size), ha="center", va="bottom", fontsize=7)
        whole = [int(run.more["image_bytes"]) for run in cell.runs if "image_bytes" in run.more]
        if whole:
            axes.hlines(median(whole) / 1e6, position - 0.45, position + 0.45, color="black", linewidth=1.2)
    axes.set_yscale("log")
    axes.set_ylabel("MB received until ready (line: the image)")
    _finish(axes, found, _described(network))
    return figure


def _distance(found: Sequence[Cell], image: str) -> Figure:
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    limits: dict[float, float] = {}
    for system in dict.fromkeys(cell.system for cell in found):
        points: list[tuple[float, Spread]] = []
        for cell in found:
            spread = cell.spread(lambda run: run.t_ready_s)
            if cell.system == system and spread is not None and cell.network in NETWORKS:
                points.append((NETWORKS[cell.network].rtt_ms, spread))
                floors = [run.floor_s for run in cell.runs if run.floor_s is not None]
                if floors:
                    limits[NETWORKS[cell.network].rtt_ms] = median(floors)
        points.sort(key=lambda point: point[0])
        colour = _COLOURS.get(system, _OTHER)
        x = [rtt_ms for rtt_ms, _ in points]
        axes.plot(x, [spread.middle for _, spread in points], marker="o", color=colour, label=system)
        axes.fill_between(
            x, [s.low for _, s in points], [s.high for _, s in points], color=colour, alpha=0.2, linewidth=0
        )
    if limits:
        rtts = sorted(limits)
        axes.plot(rtts, [limits[rtt] for rtt in rtts], color="black", linestyle="--", label="physical limit")
    axes.set_xscale("log")
    axes.set_yscale("log")
    distances = sorted({NETWORKS[cell.network].rtt_ms for cell in found if cell.network in NETWORKS})
    axes.set_xticks(distances, [f"{rtt_ms:g}" for rtt_ms in distances])
    axes.set_xlabel("round-trip time, ms")
    axes.set_ylabel("seconds to ready")
    axes.set_title(f"{image}, 100 Mbit/s")
    axes.minorticks_off()
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=7)
    return figure


def _axes(found: Sequence[Cell]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(max(5.0, 0.45 * len(found) + 2.0), 4.0), layout="constrained")
    return figure, figure.add_subplot()


def _positions(found: Sequence[Cell]) -> list[tuple[float, Cell]]:
    """Each cell's place on the axis: a gap between images."""
    images = list(dict.fromkeys(cell.image for cell in found))
    return [(number + images.index(cell.image), cell) for number, cell in enumerate(_by_image(found))]


def _by_image(found: Sequence[Cell]) -> list[Cell]:
    return [cell for image in dict.fromkeys(cell.image for cell in found) for cell in found if cell.image == image]


def _finish(axes: Axes, found: Sequence[Cell], title: str) -> None:
    places: dict[str, list[float]] = {}
    for position, cell in _positions(found):
        places.setdefault(cell.image, []).append(position)
    axes.set_xticks([sum(values) / len(values) for values in places.values()], list(places))
    axes.set_title(title)
    systems = dict.fromkeys(cell.system for cell in found)
    axes.legend(handles=[Patch(color=_COLOURS.get(name, _OTHER), label=name) for name in systems], fontsize=7)


def _described(name: str) -> str:
    network = NETWORKS.get(name)
    return name if network is None else f"{name}: {network.mbit:g} Mbit/s, {network.rtt_ms:g} ms"


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    return path
