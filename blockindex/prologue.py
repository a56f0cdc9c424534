"""How our files begin, layer indexes and hot sets alike. `docs/format.md` describes the bytes for other readers.

    magic 8 | version u32 | 0 u32 | bytes of the head u64 | sha256 of the head 32

Knows nothing of heads. The head follows, and after it whatever the head speaks of.
"""

import struct
from dataclasses import dataclass
from hashlib import sha256

from blockindex.errors import Corrupt, Unsupported

__all__ = ["PROLOGUE_SIZE", "Prologue"]

_LAYOUT = struct.Struct("<8sIIQ32s")
PROLOGUE_SIZE = _LAYOUT.size


@dataclass(frozen=True, slots=True)
class Prologue:
    """The prologue of one kind of file, which messages call `kind`; `version` is what this code reads and writes."""

    kind: str
    magic: bytes
    version: int

    def encode(self, head: bytes) -> bytes:
        """The prologue before this head."""
        return _LAYOUT.pack(self.magic, self.version, 0, len(head), sha256(head).digest())

    def parse(self, data: bytes | bytearray, max_head: int) -> tuple[int, bytes]:
        """Where the head ends, and its digest, from the file's first PROLOGUE_SIZE bytes. Unsupported for a newer
        version; Corrupt for another kind of file, or a head longer than `max_head`."""
        if len(data) < PROLOGUE_SIZE:
            raise Corrupt("prologue", f"the file is shorter than {PROLOGUE_SIZE} bytes", len(data))
        magic, version, reserved, head_size, digest = _LAYOUT.unpack_from(data)
        if magic != self.magic:
            raise Corrupt("prologue", f"not a {self.kind} (wrong magic)", 0)
        if version > self.version:
            raise Unsupported(
                f"{self.kind} of format version {version}; this version reads up to {self.version}: upgrade bootseer, "
                "or build it again with this one"
            )
        if version != self.version or reserved:
            raise Corrupt("prologue", f"impossible version {version}.{reserved}", len(self.magic))
        if head_size > max_head:
            raise Corrupt("prologue", f"states a head of {head_size} bytes, more than {max_head}")
        return PROLOGUE_SIZE + head_size, digest
