"""The tree of commands, and the parser that reports mistakes as UserError in one line."""

import argparse
from collections.abc import Iterator
from importlib.metadata import version
from typing import NoReturn, cast

from snapshotter.cli import cache, config, doctor, hotset, index, lazy, mounts, pull, serve, status
from snapshotter.cli.tree import Commands
from snapshotter.errors import UserError

__all__ = ["build_parser", "walk"]


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=100)


class _Parser(argparse.ArgumentParser):
    """argparse's parser, but a mistake is one line, and help has the same width everywhere (the docs hold it)."""

    def __init__(
        self,
        prog: str | None = None,
        usage: str | None = None,
        description: str | None = None,
        allow_abbrev: bool = False,
    ) -> None:
        super().__init__(prog, usage, description, formatter_class=_Help, allow_abbrev=allow_abbrev)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see `{self.prog} --help`)")


def build_parser() -> "_Parser":
    """The parser of all commands; parsed arguments carry the function to call as `run`."""
    parser = _Parser(
        prog="bootseer",
        description="Start containers before their unmodified OCI image is on the node.",
    )
    parser.add_argument("--version", action="version", version=f"bootseer {version('bootseer')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for noun in (serve, status, pull, doctor, lazy, cache, index, hotset, mounts, config):
        noun.add(cast(Commands, commands))  # a group of our parsers is a group of parsers
    return parser


def walk(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """`parser` and all parsers of its commands, depth first."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from walk(child)
