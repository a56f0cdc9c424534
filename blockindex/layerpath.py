"""What a tar entry's name means in a layer: its place below the root, and whether it is a whiteout.

Text only: knows no tree, and follows no symlink. Names are bytes.
"""

from enum import Enum
from typing import Final

__all__ = ["MAX_IMPLIED_PATH", "MAX_PATH", "WHITEOUT", "WHITEOUT_META", "Role", "clean_path", "role_of", "show_path"]

MAX_PATH: Final = 32767
"""Bytes of the longest path that is served. Beyond 4095 (Linux's PATH_MAX) containerd cannot unpack a layer; a kernel
that has such a tree walks it in steps, as the tools do that make one."""

MAX_IMPLIED_PATH: Final = 3583
"""Bytes of the longest path of an implied directory: it is looked up by its path in the layers below, 512 bytes are for
where these are mounted."""

WHITEOUT: Final = b".wh."
WHITEOUT_META: Final = b".wh..wh."
_OPAQUE_NAME: Final = b".wh..wh..opq"


class Role(Enum):
    """What an entry's name makes of it, before its type counts."""

    ENTRY = "entry"
    ROOT = "root"
    WHITEOUT = "whiteout"
    OPAQUE = "opaque"


def clean_path(path: bytes) -> list[bytes]:
    """`path` as components below the layer's root; `..` is resolved by the text alone and stops at the root."""
    plain = path.removeprefix(b"./")
    if b"//" not in plain and b"/." not in plain and plain[:1] not in (b"", b".", b"/"):  # nearly all
        parts = plain.split(b"/")
        if not parts[-1]:
            parts.pop()
        return parts
    return _clean_odd_path(path)


def _clean_odd_path(path: bytes) -> list[bytes]:
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
    """The role of the entry called `parts` (as `clean_path` returns them). aufs's metadata are ordinary entries: there
    may be hard links to them, so the tree takes them out only in the end."""
    if not parts:
        return Role.ROOT
    base = parts[-1]
    if base == _OPAQUE_NAME:
        return Role.OPAQUE
    if any(part.startswith(WHITEOUT_META) for part in parts):
        return Role.ENTRY
    return Role.WHITEOUT if base.startswith(WHITEOUT) else Role.ENTRY


def show_path(parts: list[bytes]) -> str:
    """`parts` for a message, not too long."""
    path = "/" + b"/".join(parts).decode("utf-8", "backslashreplace")
    return path if len(path) <= 200 else path[:200] + "..."
