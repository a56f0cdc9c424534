"""The requests in flight, in shared memory that outlives every process that works on them.

The supervisor makes the ring (an anonymous memfd) and hands it to each successor, so a request that the kernel has
given to a process which is then killed is found and answered by the next one: readers only wait.

Protocol. A slot's state is one byte, and each transition has exactly one process that may make it:

    FREE --block server: about to read a request into it--> OWNED
    OWNED --block server: answered it--> FREE
    OWNED --block server: a block is missing--> HANDED, then it rings the doorbell
    HANDED --fetch process: picked it up--> TAKEN
    TAKEN --fetch process: answered it--> FREE

Only the block server reads requests and it finishes one before the next, so at most one slot is OWNED. Before the read
the slot's length field is zeroed: a successor that finds an OWNED slot with length 0 knows that no request came, any
other it handles again. A new fetch process turns every TAKEN slot back into HANDED and works them off. Replies to a
request that was answered just before its process died are refused by the kernel with ENOENT, which is harmless.

The supervisor watches the fetch process here too. Its sweep beats once a second; who takes requests beats before each,
and is stuck when requests stay HANDED and no beat comes (it sleeps for as long as there are none).

Layout: `[header 4096][states, one byte a slot][scratch][slots, 128 bytes each]`. Header: flags u32 at 0 (bit 0: INIT
done, bit 1: resend agreed, bit 2: async direct I/O agreed), heartbeats u64 at 8 (block server), 24 (taking), 32
(sweep), number of the layout u32 at 16: a ring outlives even the version that made it. In a slot: at 96 the count of
restarts that found it OWNED (u8), at 104 when it was HANDED (f64, monotonic seconds). A slot holds a whole READ request
(80 bytes); what is longer (LOOKUP names, FORGETs) runs over into the scratch area, of which one is enough for the
reason above.
"""

import mmap
import os
import struct
from collections.abc import Iterator

from .abi import READ_REQUEST, REQUEST_BUFFER

__all__ = ["FREE", "HANDED", "OWNED", "TAKEN", "Ring"]

FREE, OWNED, HANDED, TAKEN = 0, 1, 2, 3

_SLOTS = 65536  # the kernel's bound on background requests (u16): the ring can never be too small for them
_SLOT = 128
_ATTEMPTS = 96
_HANDED_AT = 104
_HEADER = 4096
_STATES = _HEADER
_SCRATCH = _STATES + _SLOTS
_FIRST = _SCRATCH + REQUEST_BUFFER
_SIZE = _FIRST + _SLOTS * _SLOT
_INIT_DONE, _RESEND, _ASYNC_DIO = 1, 2, 4
_FLAGS = struct.Struct("=I")
_BEAT = struct.Struct("=Q")
_BEAT_AT, _TAKING_AT, _SWEEP_AT = 8, 24, 32
_SINCE = struct.Struct("=d")
_LAYOUT = struct.Struct("=I")
_LAYOUT_AT = 16
_THIS_LAYOUT = 1  # to be raised with any change of what stands above


class Ring:
    """One mapping of the ring. Any number of processes may map it; who may do what is the protocol above."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, _SIZE)
        self.memory = memoryview(self._map)
        self._idle = 0
        self._scratch = self.memory[_SCRATCH : _SCRATCH + REQUEST_BUFFER]

    @staticmethod
    def create() -> int:
        """A new, empty ring: its memfd (close-on-exec; caller owns it). Pages are taken as slots are first used."""
        fd = os.memfd_create("bootseer-ring")
        os.ftruncate(fd, _SIZE)
        os.pwrite(fd, _LAYOUT.pack(_THIS_LAYOUT), _LAYOUT_AT)
        return fd

    @staticmethod
    def fits(fd: int) -> bool:
        """Whether this code can go on with the ring of that memfd, which another version may have made."""
        written = os.pread(fd, _LAYOUT.size, _LAYOUT_AT)
        return os.fstat(fd).st_size == _SIZE and written == _LAYOUT.pack(_THIS_LAYOUT)

    def close(self) -> None:
        """Unmap; the ring itself lives on in its memfd."""
        self._scratch.release()
        self.memory.release()
        self._map.close()

    # -- block server ------------------------------------------------------------------------------------------------

    def claim(self) -> int:
        """The lowest FREE slot, now OWNED and with no request in it. BlockingIOError when all are in flight."""
        slot = self._map.find(b"\0", _STATES, _STATES + _SLOTS) - _STATES
        if slot < 0:
            raise BlockingIOError("every slot of the request ring is in flight")
        base = _FIRST + slot * _SLOT
        self.memory[base : base + 4] = b"\0\0\0\0"
        self._map[base + _ATTEMPTS] = 0
        self._map[_STATES + slot] = OWNED
        return slot

    def buffers(self, slot: int) -> tuple[memoryview, memoryview]:
        """Where the kernel is to put a request: the slot, then the scratch area."""
        base = _FIRST + slot * _SLOT
        return self.memory[base : base + READ_REQUEST.size], self._scratch

    def body(self, slot: int, start: int, end: int) -> bytes:
        """Bytes `[start, end)` of the slot's request, across slot and scratch."""
        base = _FIRST + slot * _SLOT
        head = bytes(self.memory[base + start : base + min(end, READ_REQUEST.size)])
        tail = bytes(self._scratch[max(start - READ_REQUEST.size, 0) : max(end - READ_REQUEST.size, 0)])
        return head + tail

    def owned(self) -> int | None:
        """The slot that a killed block server left, if it holds a request; an empty one is set free."""
        slot = self._map.find(bytes([OWNED]), _STATES, _STATES + _SLOTS) - _STATES
        if slot < 0:
            return None
        base = _FIRST + slot * _SLOT
        if bytes(self.memory[base : base + 4]) == b"\0\0\0\0":
            self.free(slot)
            return None
        self._map[base + _ATTEMPTS] = min(self._map[base + _ATTEMPTS] + 1, 255)
        return slot

    def attempts(self, slot: int) -> int:
        """How many successors have found this request unanswered."""
        return self._map[_FIRST + slot * _SLOT + _ATTEMPTS]

    def hand(self, slot: int, now: float) -> None:
        """OWNED -> HANDED at `now` (monotonic seconds); the caller rings the doorbell."""
        _SINCE.pack_into(self.memory, _FIRST + slot * _SLOT + _HANDED_AT, now)
        self._map[_STATES + slot] = HANDED

    # -- fetch process -----------------------------------------------------------------------------------------------

    def take(self) -> Iterator[int]:
        """Each HANDED slot, now TAKEN."""
        at = _STATES
        while (at := self._map.find(bytes([HANDED]), at, _STATES + _SLOTS)) >= 0:
            self._map[at] = TAKEN
            self._beat(_TAKING_AT)
            yield at - _STATES
            at += 1

    def inherit(self) -> None:
        """Start of a fetch process: what the one before had TAKEN and not answered is HANDED again."""
        at = _STATES
        while (at := self._map.find(bytes([TAKEN]), at, _STATES + _SLOTS)) >= 0:
            self._map[at] = HANDED

    def sweeps(self) -> None:
        """The fetch process's sweep is alive: called about once a second."""
        self._beat(_SWEEP_AT)

    def since(self, slot: int) -> float:
        """When the request was handed over, whichever fetch process of the time took it (monotonic seconds)."""
        return float(_SINCE.unpack_from(self.memory, _FIRST + slot * _SLOT + _HANDED_AT)[0])

    # -- both --------------------------------------------------------------------------------------------------------

    def request(self, slot: int) -> tuple[int, ...]:
        """The slot's request as `READ_REQUEST` unpacks it (the fields past the header mean that only for READ)."""
        return READ_REQUEST.unpack_from(self.memory, _FIRST + slot * _SLOT)

    def free(self, slot: int) -> None:
        """The request is answered; the slot may be used again at once."""
        self._map[_STATES + slot] = FREE

    def in_flight(self) -> int:
        """Requests that were handed over and are not answered yet."""
        states = self._map[_STATES : _STATES + _SLOTS]
        return states.count(HANDED) + states.count(TAKEN)

    def agreed(self, resend: bool, async_dio: bool) -> None:
        """Remember what INIT settled: it happens once, successors need it."""
        _FLAGS.pack_into(self.memory, 0, _INIT_DONE | (_RESEND if resend else 0) | (_ASYNC_DIO if async_dio else 0))

    @property
    def init_done(self) -> bool:
        """Whether the kernel's INIT has been answered."""
        return bool(_FLAGS.unpack_from(self.memory, 0)[0] & _INIT_DONE)

    @property
    def resend(self) -> bool:
        """Whether the kernel can be asked to send unanswered requests again."""
        return bool(_FLAGS.unpack_from(self.memory, 0)[0] & _RESEND)

    @property
    def async_dio(self) -> bool:
        """Whether direct reads are asynchronous; without it one missing block blocks a whole layer."""
        return bool(_FLAGS.unpack_from(self.memory, 0)[0] & _ASYNC_DIO)

    def beat(self) -> None:
        """The block server is alive and not stuck: called about once a second, and between requests."""
        self._beat(_BEAT_AT)

    def beats(self) -> int:
        """The block server's heartbeat: a count."""
        return self._beats(_BEAT_AT)

    def fetch_beats(self) -> tuple[int, int]:
        """The fetch process's heartbeats: of its sweep, and of who takes requests. The latter seems to beat while there
        is none to take."""
        idle = self._map.find(bytes([HANDED]), _STATES, _STATES + _SLOTS) < 0
        if idle:
            self._idle += 1
        return self._beats(_SWEEP_AT), self._beats(_TAKING_AT) + self._idle

    def _beat(self, at: int) -> None:
        _BEAT.pack_into(self.memory, at, self._beats(at) + 1)

    def _beats(self, at: int) -> int:
        return int(_BEAT.unpack_from(self.memory, at)[0])
