"""The memory of credentials: what was written last is read, whoever was killed in between, and nothing else is left."""

import mmap
import os
import signal
from collections.abc import Iterator

import pytest

from snapshotter.supervise import memory as module
from snapshotter.supervise.memory import PassedMemory

pytestmark = pytest.mark.timeout(60)

A, B = [{"password": "s3cret-a" * 100}], [{"password": "s3cret-b"}]


@pytest.fixture
def fd() -> Iterator[int]:
    fd = PassedMemory.create()
    yield fd
    os.close(fd)


def _holds(fd: int, text: str) -> bool:
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as view:
        return view.find(text.encode()) >= 0


def test_what_was_written_last_is_read_by_every_copy(fd: int) -> None:
    assert PassedMemory(fd).read() == []
    copy = os.dup(fd)
    for rows in (A, B, [], A, A, B):
        PassedMemory(fd).write(rows)
        assert PassedMemory(copy).read() == rows
    os.close(copy)


def test_what_is_forgotten_is_nowhere(fd: int) -> None:
    memory = PassedMemory(fd)
    memory.write(A)
    assert _holds(fd, "s3cret-a")
    memory.write(B)
    assert not _holds(fd, "s3cret-a") and _holds(fd, "s3cret-b")
    memory.write([])
    assert not _holds(fd, "s3cret")


def test_a_writer_that_is_killed_at_any_moment_leaves_a_table_that_is_right(fd: int) -> None:
    """It ends itself before each of its steps in turn; the next writer goes on, and nothing of the torn one is left."""
    memory = PassedMemory(fd)
    ended = 0
    for step in range(10):
        memory.write(B)
        child = os.fork()
        if not child:
            _die_before(step)
            memory.write(A)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        ended += os.WIFSIGNALED(status)
        assert memory.read() in (A, B), step
        memory.write(B)
        assert memory.read() == B and not _holds(fd, "s3cret-a"), step
    assert ended == 4, "text, head, and a half cleared before and after"


def _die_before(step: int) -> None:
    left = [step]
    write, clear = os.pwrite, module._fallocate

    def counted(call):  # type: ignore[no-untyped-def]  # of either
        def run(*args):  # type: ignore[no-untyped-def]
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return call(*args)

        return run

    module.os.pwrite, module._fallocate = counted(write), counted(clear)  # type: ignore[attr-defined]  # in a child


def test_what_is_too_long_leaves_what_was_there(fd: int, caplog: pytest.LogCaptureFixture) -> None:
    memory = PassedMemory(fd)
    memory.write(B)
    memory.write([{"password": "s3cret-c" * (2 << 20)}])
    assert memory.read() == B and "credentials.not_kept" in caplog.text and "s3cret" not in caplog.text


def test_it_cannot_be_cut_off(fd: int) -> None:
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    assert PassedMemory.taken_from(fd) == fd


def test_another_descriptor_is_none(fd: int) -> None:
    assert PassedMemory.taken_from(-1) == -1
    with open("/dev/null") as other:
        assert PassedMemory.taken_from(other.fileno()) == -1
    unsealed = os.memfd_create("x")
    assert PassedMemory.taken_from(unsealed) == -1
    os.close(unsealed)


def test_damage_is_no_table(fd: int, caplog: pytest.LogCaptureFixture) -> None:
    memory = PassedMemory(fd)
    memory.write(A)
    os.pwrite(fd, b"?", 16 << 20 | 100)
    assert memory.read() == [] and "credentials.not_read" in caplog.text
    memory.write(B)
    assert memory.read() == B
