"""POSIX ACLs as Linux keeps them in xattrs: what unpacking one and then setting the mode leaves.

Bytes in, bytes out: a header of 4 bytes (version 2), then 8 bytes an entry: tag, permissions, id, little-endian. Knows
nothing of trees. What a kernel would refuse raises ValueError: it could be stored, but no file could be opened through
it.
"""

import struct
from typing import Final

__all__ = ["ACL_ACCESS", "ACL_DEFAULT", "checked_acl", "with_mode"]

ACL_ACCESS: Final = b"system.posix_acl_access"
ACL_DEFAULT: Final = b"system.posix_acl_default"

_HEADER: Final = b"\2\0\0\0"
_ENTRY: Final = struct.Struct("<HHI")
_USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 1, 2, 4, 8, 16, 32
_ORDER: Final = (_USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER)
_NO_ID: Final = 0xFFFFFFFF

_Entries = list[tuple[int, int, int]]


def checked_acl(value: bytes) -> bytes | None:
    """`value` if a kernel would take it, None if that would remove the ACL (no entries); ValueError else."""
    if value[:4] != _HEADER or len(value) % _ENTRY.size != len(_HEADER):
        raise ValueError("is no POSIX ACL of version 2")
    entries = _entries(value)
    if not entries:
        return None
    tags = [tag for tag, _, _ in entries]
    named = any(tag in (_USER, _GROUP) for tag in tags)
    if any(
        tag not in _ORDER or rights > 7 or (tag in (_USER, _GROUP) and who == _NO_ID) for tag, rights, who in entries
    ):
        raise ValueError("has an impossible entry")
    if [_ORDER.index(tag) for tag in tags] != sorted(_ORDER.index(tag) for tag in tags):
        raise ValueError("has its entries out of order")
    if any(tags.count(tag) != 1 for tag in (_USER_OBJ, _GROUP_OBJ, _OTHER)) or tags.count(_MASK) not in (named, 1):
        raise ValueError("lacks an entry, or has one twice")
    return value


def with_mode(value: bytes, mode: int) -> bytes | None:
    """The access ACL `value`, which `checked_acl` passed, after chmod to `mode`: owner, others, and the mask (or the
    group, where there is no mask) follow it. None if the mode says it all then."""
    entries = _entries(value)
    tags = {tag for tag, _, _ in entries}
    if tags == {_USER_OBJ, _GROUP_OBJ, _OTHER}:
        return None
    new = {_USER_OBJ: mode >> 6 & 7, _MASK if _MASK in tags else _GROUP_OBJ: mode >> 3 & 7, _OTHER: mode & 7}
    return _HEADER + b"".join(_ENTRY.pack(tag, new.get(tag, rights), who) for tag, rights, who in entries)


def _entries(value: bytes) -> _Entries:
    return list(_ENTRY.iter_unpack(value[len(_HEADER) :]))
