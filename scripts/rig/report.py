"""What the demo says at its end: a table for people, a JSON document for programs. It measures nothing."""

import json
from collections.abc import Sequence
from statistics import median

from scripts.rig.coldstart import ColdStart, System
from scripts.rig.oci import Layout

__all__ = ["document", "table"]


def document(layout: Layout, mbit: float, rtt_ms: float, runs: Sequence[ColdStart]) -> str:
    """The JSON document: the image (bytes of its layer blobs), the link, and one element per cold start.

    `ready_s` is seconds from the order to pull until the container's ready line, `bytes` what the node received from
    the link until then, `requests` HTTP requests to the registry.
    """
    content = {
        "image": {"layers": len(layout.layers), "bytes": layout.size},
        "link": {"mbit": _plain(mbit), "rtt_ms": _plain(rtt_ms)},
        "runs": [
            {
                "system": run.system.value,
                "ready_s": round(run.ready_s, 4),
                "bytes": run.size,
                "requests": run.requests,
                "output_ok": run.output_ok,
            }
            for run in runs
        ],
    }
    return json.dumps(content, indent=1) + "\n"


def table(runs: Sequence[ColdStart]) -> str:
    """Medians with [lowest-highest] for each system, in the order of `System`; a ratio only beside overlayfs."""
    reference = [run.ready_s for run in runs if run.system is System.OVERLAYFS]
    rows = [("system", "n", "ready, s", "x overlayfs", "MB on the wire", "requests")]
    for system in System:
        mine = [run for run in runs if run.system is system]
        if not mine:
            continue
        ready = [run.ready_s for run in mine]
        ratio = f"{median(ready) / median(reference):.2f}" if reference else "-"
        sizes = _spread([run.size / 1e6 for run in mine], 1)
        requests = _spread([float(run.requests) for run in mine], 0)
        rows.append((system.value, str(len(mine)), _spread(ready, 2), ratio, sizes, requests))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _spread(values: Sequence[float], digits: int) -> str:
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), median(values), max(values)))
    return middle if low == high else f"{middle} [{low}-{high}]"


def _plain(value: float) -> float | int:
    return int(value) if value == int(value) else value
