"""The tree of all commands."""

import argparse
from collections.abc import Iterator
from importlib.metadata import version
from typing import cast

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
from snapshotter.cli.parser import Parser
from snapshotter.cli.tree import Commands

__all__ = ["build_parser", "walk"]


def build_parser() -> Parser:
    """The parser of all commands; parsed arguments carry the function to call as `run`."""
    parser = Parser(
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
