"""What a tar entry's name means in a layer: its place below the root, and whether it is a whiteout.

Text only: knows no tree, and follows no symlink. Names are bytes.
"""

from enum import Enum
from typing import Final

__all__ = ["MAX_PATH", "WHITEOUT", "WHITEOUT_META", "Role", "clean_path", "role_of"]

MAX_PATH: Final = 4095
"""Bytes of the longest path that unpacking could make."""

WHITEOUT: Final = b".wh."
WHITEOUT_META: Final = b".wh..wh."
_OPAQUE_NAME: Final = b".wh..wh..opq"


class Role(Enum):
    """What an entry's name makes of it, before its type counts."""

    ENTRY = "entry"
    ROOT = "root"
    WHITEOUT = "whiteout"
    OPAQUE = "opaque"
    IGNORED = "ignored"


def clean_path(path: bytes) -> list[bytes]:
    """`path` as components below the layer's root; `..` is resolved by the text alone and stops at the root."""
    if b".." not in path:
        return [part for part in path.split(b"/") if part and part != b"."]
    parts: list[bytes] = []
    for part in path.split(b"/"):
        if part == b"..":
            if parts:
                parts.pop()
        elif part and part != b".":
            parts.append(part)
    return parts


def role_of(parts: list[bytes]) -> Role:
    """The role of the entry called `parts` (as `clean_path` returns them)."""
    if not parts:
        return Role.ROOT
    base = parts[-1]
    if base == _OPAQUE_NAME:
        return Role.OPAQUE
    if any(part.startswith(WHITEOUT_META) for part in parts):
        return Role.IGNORED
    return Role.WHITEOUT if base.startswith(WHITEOUT) else Role.ENTRY
