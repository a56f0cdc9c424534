"""The tree of commands, and the parser that reports mistakes as UserError in one line."""

import argparse
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import NoReturn, cast

from snapshotter.cli import (
    alarm,
    artifact,
    cache,
    config,
    copy,
    doctor,
    explain,
    fetch,
    hotset,
    index,
    key,
    lazy,
    mounts,
    pull,
    record,
    serve,
    status,
    verify,
)
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

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]  # as argparse has it
        """As argparse does, but for a command that has `command` among its defaults, which gets what stands after `--`:
        argparse would take the words before the options and those after them as one."""
        words = list(sys.argv[1:] if args is None else args)
        if self.get_default("command") is None or "--" not in words:
            return super().parse_known_args(words, namespace)
        cut = words.index("--")
        found, unknown = super().parse_known_args(words[:cut], namespace)
        found.command = words[cut + 1 :]
        return found, unknown

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
    nouns = (
        serve,
        status,
        alarm,
        pull,
        fetch,
        doctor,
        explain,
        lazy,
        cache,
        verify,
        index,
        record,
        hotset,
        copy,
        artifact,
        key,
        mounts,
        config,
    )
    for noun in nouns:
        noun.add(cast(Commands, commands))  # a group of our parsers is a group of parsers
    return parser


def walk(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """`parser` and all parsers of its commands, depth first."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from walk(child)
