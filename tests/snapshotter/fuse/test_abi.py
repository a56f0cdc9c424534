"""The protocol's structures, against the sizes of include/uapi/linux/fuse.h and hand-made messages."""

import struct

import pytest

from snapshotter.fuse import abi


def _init(minor: int = 43, flags: int = 0xFFFFFFFF, flags2: int = 0xFFFFFFFF, major: int = 7) -> bytes:
    return struct.pack("=IIIII44x", major, minor, 131072, flags, flags2)


def test_sizes_are_those_of_the_kernel() -> None:
    assert abi.IN_HEADER.size == 40
    assert abi.OUT_HEADER.size == 16
    assert abi.READ_REQUEST.size == 80
    assert len(abi.init_reply(_init()).body) == 64
    assert len(abi.attr_reply(1, 0, directory=True)) == 104
    assert len(abi.entry_reply(256, 4096)) == 128
    assert len(abi.open_reply()) == 16
    assert len(abi.statfs_reply(1, 1)) == 80


def test_init_agrees_to_asynchronous_direct_reads_and_many_of_them() -> None:
    reply = abi.init_reply(_init())
    fields = struct.unpack_from("=IIIIHHIIHHI", reply.body)
    assert reply.async_dio and reply.resend
    assert fields[3] & (1 << 15)
    assert fields[4:6] == (65535, 65535)
    assert fields[10] == 1 << 7


def test_init_takes_only_what_the_kernel_offers() -> None:
    reply = abi.init_reply(_init(flags=1 << 22, flags2=0xFFFFFFFF))
    assert not reply.async_dio
    assert not reply.resend  # without INIT_EXT there are no further flags
    assert struct.unpack_from("=IIII", reply.body)[3] == 1 << 22


def test_request_timeouts_are_never_agreed_to() -> None:
    """They abort the whole connection (flag bit 42 = bit 10 of flags2)."""
    assert not struct.unpack_from("=IIIIHHIIHHI", abi.init_reply(_init()).body)[10] & (1 << 10)


@pytest.mark.parametrize(("major", "minor"), [(8, 1), (7, 30), (6, 99)])
def test_a_kernel_that_is_too_old_or_too_new_is_refused(major: int, minor: int) -> None:
    with pytest.raises(ValueError, match=r"7\.31"):
        abi.init_reply(_init(major=major, minor=minor))


def test_dirents_are_padded_to_eight_bytes() -> None:
    record = abi.dirent(5, 3, b"abc", directory=False)
    assert len(record) % 8 == 0
    assert struct.unpack_from("=QQII3s", record) == (5, 3, 3, 8, b"abc")


def test_names_are_forgotten_as_the_kernel_wants_it_said() -> None:
    """fuse_notify_inval_entry_out: parent, length without the zero, flags; unique 0, the code in the error's place."""
    message = abi.inval_entry(b"0123456789abcd")
    assert struct.unpack_from("=IiQQII", message) == (len(message), 3, 0, 1, 14, 0)
    assert message[32:] == b"0123456789abcd\0"


@pytest.mark.parametrize("nodes", [[], [7], [7, 1 << 63, 256]])
def test_a_batch_of_forgets(nodes: list[int]) -> None:
    body = struct.pack("=II", len(nodes), 0) + b"".join(struct.pack("=QQ", node, 3) for node in nodes)
    assert abi.forgotten(body) == nodes
