"""Made-up runs for tests of what is done with them."""

from typing import Any

from scripts.rig.grid.run import Run

__all__ = ["a_run"]


def a_run(system: str = "overlayfs", ready_s: float = 10.0, **changed: Any) -> Run:
    """A good run of numpy at metro; `changed` are fields, or further ones."""
    values: dict[str, Any] = {
        "image": "numpy", "network": "metro", "system": system, "t_ready_s": ready_s, "t_pull_s": ready_s / 2,
        "t_warm_s": 0.5, "bytes": 8_000_000, "requests": 12, "demand_fetches": None, "floor_s": 1.0, "ok": True,
    }  # fmt: skip
    more = {"session": "s", "round": 1}
    for name, value in changed.items():
        (values if name in values else more)[name] = value
    return Run(**values, more=more)
