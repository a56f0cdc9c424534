"""PAX extended header records: `LENGTH KEY=VALUE\\n`, bytes in, typed fields out.

Knows which keys matter to a layer; the others (atime, ctime, uname, comments, LIBARCHIVE.*, ACLs as text) are read over
as containerd does. Values are bytes, so an xattr may hold `=`, newlines and NULs. Names of xattrs are taken as they
stand (no %-decoding), again as containerd does.
"""

from dataclasses import dataclass, field
from typing import Final

from blockindex.errors import Corrupt

__all__ = ["XATTR_PREFIX", "Pax", "decimal", "global_path", "parse_pax"]

XATTR_PREFIX: Final = b"SCHILY.xattr."
_SPARSE_PREFIX: Final = b"GNU.sparse."
_PLAIN_KEYS: Final = frozenset((b"path", b"linkpath", b"size", b"uid", b"gid", b"mtime"))
_NS = 10**9


@dataclass(slots=True)
class Pax:
    """What the records say; None where there is no record (or the last one is empty, which means "as in the header").

    `sparse` holds the GNU.sparse.* records by the rest of their key, the last of each; `sparse_list` the values of
    GNU.sparse.offset and .numbytes (format 0.0) in order.
    """

    path: bytes | None = None
    linkpath: bytes | None = None
    size: int | None = None
    uid: int | None = None
    gid: int | None = None
    mtime_ns: int | None = None
    xattrs: dict[bytes, bytes] | None = None
    sparse: dict[bytes, bytes] = field(default_factory=dict)
    sparse_list: list[bytes] = field(default_factory=list)


def parse_pax(data: bytes, offset: int) -> Pax:
    """The records in `data`, the payload of an extended header at `offset` of the tar stream; Corrupt if malformed."""
    pax = Pax()
    for key, value, position in _records(data, offset):
        if key.startswith(XATTR_PREFIX):
            if pax.xattrs is None:
                pax.xattrs = {}
            pax.xattrs[key[len(XATTR_PREFIX) :]] = value
        elif key.startswith(_SPARSE_PREFIX):
            name = key[len(_SPARSE_PREFIX) :]
            if name in (b"offset", b"numbytes"):
                pax.sparse_list.append(value)
            else:
                pax.sparse[name] = value
        elif key in _PLAIN_KEYS:
            _set_plain(pax, key, value, position)
    return pax


def global_path(data: bytes, offset: int) -> bytes | None:
    """The path that the records in `data`, the payload of a global header, give the header itself."""
    found = None
    for key, value, position in _records(data, offset):
        if key == b"path":
            found = _without_nul(key, value, position)
    return found


def decimal(text: bytes, what: str, offset: int) -> int:
    """A decimal number without sign, as PAX writes them."""
    # Longer numbers cannot be sizes or offsets, and converting a huge one takes quadratic time.
    if not text.isdigit() or len(text) > 20:
        raise Corrupt("PAX record", f"{what} {text[:40]!r} is not a decimal number", offset)
    return int(text)


def _records(data: bytes, offset: int) -> list[tuple[bytes, bytes, int]]:
    records: list[tuple[bytes, bytes, int]] = []
    position = 0
    while position < len(data):
        space = data.find(b" ", position, position + 21)
        digits = data[position:space]
        if space < 0 or not digits.isdigit():
            raise Corrupt("PAX record", "does not start with its length", offset + position)
        end = position + int(digits)
        key, equals, value = data[space + 1 : end - 1].partition(b"=")
        if end > len(data) or end <= space + 1 or data[end - 1] != 0x0A or not equals or not key:
            raise Corrupt("PAX record", "length, `=` or newline is missing or wrong", offset + position)
        if b"\0" in key:
            raise Corrupt("PAX record", "NUL in a key", offset + position)
        records.append((key, value, offset + position))
        position = end
    return records


def _set_plain(pax: Pax, key: bytes, value: bytes, offset: int) -> None:
    """Note a record; the last one of a key counts, and an empty one means "as in the header"."""
    match key:
        case b"path" | b"linkpath":
            setattr(pax, key.decode(), _without_nul(key, value, offset))
        case b"mtime":
            pax.mtime_ns = _time_ns(value, offset) if value else None
        case b"uid" | b"gid":
            setattr(pax, key.decode(), _signed(value, key.decode(), offset) if value else None)
        case _:
            setattr(pax, key.decode(), decimal(value, key.decode(), offset) if value else None)


def _signed(value: bytes, what: str, offset: int) -> int:
    number = decimal(value.removeprefix(b"-"), what, offset)
    return -number if value.startswith(b"-") else number


def _without_nul(key: bytes, value: bytes, offset: int) -> bytes | None:
    if b"\0" in value:
        raise Corrupt("PAX record", f"NUL in {key.decode()}", offset)
    return value or None


def _time_ns(value: bytes, offset: int) -> int:
    """Seconds with a fraction as nanoseconds; digits below 1 ns are cut off, towards zero."""
    seconds, dot, fraction = value.removeprefix(b"-").partition(b".")
    if not seconds.isdigit() or len(seconds) > 20 or (dot and fraction and not fraction.isdigit()):
        raise Corrupt("PAX record", f"mtime {value[:40]!r} is not a time", offset)
    total = int(seconds) * _NS + int(fraction[:9].ljust(9, b"0"))
    return -total if value.startswith(b"-") else total
