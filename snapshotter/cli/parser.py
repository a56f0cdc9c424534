"""The parser that reports mistakes as UserError in one line. It loads no command."""

import argparse
import sys
from typing import NoReturn

from snapshotter.errors import UserError

__all__ = ["Parser"]


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=100)


class Parser(argparse.ArgumentParser):
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
