"""The command line: `bootseer NOUN VERB`. Parses, builds objects, runs; what a command does lies in the packages below.

One file per noun; each has a function `add(commands)` that declares its commands and names the function to run. Modules
of the daemon are imported inside those functions: `bootseer status` must not load what `bootseer serve` needs, and the
supervisor forks from a process that has loaded little.

Exit codes: 0 done, 1 it did not work, 2 a mistake in the call or the configuration, 130 interrupted. A failure that we
know is one line on stderr; a traceback is a bug of ours.
"""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn, cast

from snapshotter.cli.parser import Parser
from snapshotter.errors import SnapshotterError, UserError

__all__ = ["entry", "main"]

_INTERRUPTED = 130
_PIPE_CLOSED = 141  # what a shell reports for a program that SIGPIPE ended


def main(argv: Sequence[str]) -> int:
    """Run one command line (without the program's name) and return its exit code."""
    try:
        args = _parser(argv).parse_args(argv)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except UserError as error:
        return _fail(str(error), error.exit_code)
    except SnapshotterError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit: give it somewhere to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), sys.stdout.fileno())
        return _PIPE_CLOSED


def _parser(argv: Sequence[str]) -> Parser:
    """The parser of all commands; for the daemon, which readers may be waiting for, of that one: the modules of the
    others take 0.2 s to load."""
    if argv[:1] == ["serve"]:
        from snapshotter.cli import serve
        from snapshotter.cli.tree import Commands

        parser = Parser(prog="bootseer")
        serve.add(cast(Commands, parser.add_subparsers(metavar="COMMAND", required=True)))
        return parser
    from snapshotter.cli.arguments import build_parser

    return build_parser()


def entry() -> NoReturn:
    """The program `bootseer`."""
    sys.exit(main(sys.argv[1:]))


def _fail(message: str, code: int) -> int:
    print(f"bootseer: {' '.join(message.split())}", file=sys.stderr)
    return code
