"""Plain text for people: aligned tables and sizes. Numbers are aligned right, all else left."""

from collections.abc import Sequence

__all__ = ["megabytes", "table"]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows under a head, columns two blanks apart; a column whose cells all start with a digit is aligned right."""
    columns = list(zip(head, *rows, strict=True))
    right = [all(cell[:1].isdigit() for cell in column[1:]) and len(rows) > 0 for column in columns]
    widths = [max(map(len, column)) for column in columns]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in (head, *rows)
    )


def megabytes(size: int | float) -> str:
    """Bytes as megabytes (10^6) with one decimal."""
    return f"{size / 1e6:.1f} MB"
