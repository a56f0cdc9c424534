"""The help pages of all commands inside `docs/commands.md`, kept true: `python -m snapshotter.cli.reference FILE`.

A page lies between the line "<!-- help: bootseer NOUN VERB -->" and the end of the code block after it. The words
around the pages are written by hand and left alone.
"""

import re
import sys
from pathlib import Path

from snapshotter.cli.arguments import build_parser, walk
from snapshotter.errors import UserError

__all__ = ["pages", "refreshed"]

_BLOCK = re.compile(r"<!-- help: (?P<command>[a-z -]+) -->\n```text\n.*?```\n", re.DOTALL)


def pages() -> dict[str, str]:
    """The help page of every command, by its full name."""
    return {parser.prog: parser.format_help() for parser in walk(build_parser())}


def refreshed(document: str) -> str:
    """`document` with its pages made anew. UserError where it lacks a command or names one that does not exist."""
    current = pages()
    named = [match["command"] for match in _BLOCK.finditer(document)]
    if missing := [command for command in current if command not in named]:
        raise UserError(f"the document has no page for: {', '.join(missing)}")
    if unknown := [command for command in named if command not in current]:
        raise UserError(f"the document has pages for unknown commands: {', '.join(unknown)}")
    return _BLOCK.sub(lambda m: f"<!-- help: {m['command']} -->\n```text\n{current[m['command']]}```\n", document)


def main() -> None:
    """Rewrite the named file."""
    path = Path(sys.argv[1])
    path.write_text(refreshed(path.read_text()))


if __name__ == "__main__":
    main()
