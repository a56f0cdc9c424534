"""The structs and constants of the EROFS format, as far as layer images use it (`docs/format-erofs.md`).

Only facts of the format, no policy; little-endian throughout. Used: extended (64-byte) inodes, flat-plain and
flat-inline layouts, inline xattrs, the superblock checksum. Not used: compact inodes, compression, chunks, shared
xattrs, long xattr prefixes, 48-bit addresses, more devices.
"""

import stat
import struct
from typing import Final

__all__ = [
    "CHECKSUM_OFFSET",
    "DIRENT",
    "FEATURES_COMPAT",
    "FILE_TYPES",
    "FORMAT_INLINE",
    "FORMAT_PLAIN",
    "INODE",
    "INODE_SIZE",
    "MAGIC",
    "SUPERBLOCK",
    "SUPERBLOCK_OFFSET",
    "XATTR_ENTRY",
    "XATTR_HEADER_SIZE",
    "XATTR_INDEXES",
    "checksum",
    "decode_device",
    "encode_device",
]

MAGIC: Final = 0xE0F5E1E2
SUPERBLOCK_OFFSET: Final = 1024

SUPERBLOCK: Final = struct.Struct("<IIIBBHQQIIII16s16sIHHHBBIQ24s")
"""magic, checksum, feature_compat, block size bits, extra slots, root nid, inodes, build time s and ns, blocks,
meta block, xattr block, uuid, volume name, feature_incompat, compression, devices, device slot, directory block bits,
xattr prefixes, their start, packed nid, reserved."""

CHECKSUM_OFFSET: Final = SUPERBLOCK_OFFSET + 4

FEATURES_COMPAT: Final = 0x1 | 0x2
"""The superblock's block has a checksum; inode times are mtimes."""

INODE: Final = struct.Struct("<HHHHQIIIIqII16s")
"""format, xattr count, mode, reserved, size, start block or device, ino, uid, gid, mtime s, mtime ns, nlink, reserved.
The kernel takes the seconds as a signed number, so times before 1970 round-trip."""

INODE_SIZE: Final = 64
FORMAT_PLAIN: Final = 1 | 0 << 1
"""Extended inode; the data is whole blocks from the start block on."""
FORMAT_INLINE: Final = 1 | 2 << 1
"""Extended inode; whole blocks as in plain, but the last partial one follows the inode and its xattrs."""

DIRENT: Final = struct.Struct("<QHBB")
"""nid, offset of the name in its block, file type, reserved."""

FILE_TYPES: Final = {
    stat.S_IFREG: 1,
    stat.S_IFDIR: 2,
    stat.S_IFCHR: 3,
    stat.S_IFBLK: 4,
    stat.S_IFIFO: 5,
    stat.S_IFLNK: 7,
}

XATTR_HEADER_SIZE: Final = 12
XATTR_ENTRY: Final = struct.Struct("<BBH")
"""Length of the name without its prefix, index of the prefix, length of the value; then name, value, zeros to 4."""

XATTR_INDEXES: Final = {
    b"user.": 1,
    b"system.posix_acl_access": 2,
    b"system.posix_acl_default": 3,
    b"trusted.": 4,
    b"security.": 6,
}


def encode_device(major: int, minor: int) -> int:
    """Linux's 32-bit encoding of a device number."""
    return (minor & 0xFF) | (major << 8) | ((minor & ~0xFF) << 12)


def decode_device(value: int) -> tuple[int, int]:
    """Major and minor of an encoded device number."""
    return (value >> 8) & 0xFFF, (value & 0xFF) | ((value >> 12) & 0xFFF00)


def checksum(first_block: bytes) -> int:
    """CRC32C of the first block from the superblock on, its checksum field taken as zero."""
    data = bytearray(first_block[SUPERBLOCK_OFFSET:])
    data[CHECKSUM_OFFSET - SUPERBLOCK_OFFSET : CHECKSUM_OFFSET - SUPERBLOCK_OFFSET + 4] = bytes(4)
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_CRC_TABLE = _crc_table()
