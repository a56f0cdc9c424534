"""The table of all measurements: one row a figure, with its goal and whether it is met. It measures nothing."""

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Row", "table"]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `goal` is empty where there is none, and `met` None then."""

    what: str
    figure: str
    n: int
    goal: str = ""
    met: bool | None = None


def table(rows: Iterable[Row]) -> str:
    """A Markdown table, as docs/performance.md has it."""
    verdicts = {None: "", True: "met", False: "MISSED"}
    cells = [("what", "measured", "n", "goal", "")]
    cells += [(row.what, row.figure, str(row.n), row.goal, verdicts[row.met]) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(5)]
    lines = [_line(line, widths) for line in cells]
    return "\n".join([lines[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *lines[1:]])


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    return f"| {' | '.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))} |"
