"""Names for workloads that nobody has named: out of a container's arguments, the same on every node. Pure.

Equal arguments give equal names, different arguments different ones: `python train.py --lr 1` is `python-train-` and
the first six digits of `argv_digest`. The words are for people, the digits tell apart.
"""

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from .container import argv_digest

__all__ = ["workload_name"]

_SUFFIXES = {".py", ".pyc", ".sh", ".js", ".mjs", ".jar", ".rb", ".pl", ".exe"}
_WORD_MOST = 20
_DIGITS = 6


def workload_name(argv: Sequence[str]) -> str:
    """The name; `[a-z0-9][a-z0-9._-]{0,63}` whatever the arguments are."""
    operand = next((argument for argument in argv[1:] if argument and not argument.startswith("-")), "")
    words = [_word(argv[0] if argv else ""), _word(operand)]
    digits = argv_digest(argv).removeprefix("sha256:")[:_DIGITS]
    return "-".join([*(word for word in words if word), digits])


def _word(argument: str) -> str:
    """The first word of an argument (a script of a shell has many), less directories and a program's suffix."""
    words = argument.split()
    path = PurePosixPath(words[0] if words else "")
    name = path.stem if path.suffix in _SUFFIXES else path.name
    return re.sub(r"[^a-z0-9.]+", "-", name.lower())[:_WORD_MOST].strip("-.")
