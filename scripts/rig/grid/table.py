"""Rows of text as a table for a terminal, or as Markdown. The first row is the head."""

from collections.abc import Sequence

__all__ = ["markdown_table", "text_table"]


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be, two blanks between them."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{' --- |' * len(rows[0])}", *lines[1:]])
