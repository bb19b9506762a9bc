"""Lane shm: memory shared with an optimizer on this host.  docs/PROTOCOL.md, "Lane shm".

A gradient is built in a slot of the actor's lane file, where the optimizer reads it, and the frame
is its header alone; weights are copied from the board.  The protocol's `ready`, its bell for a
sleeping optimizer and its word `finite` are optional, and not used here.

Memory ordering, from a language that has none.  Words are read and written through memoryviews of
native integers, each a single aligned load or store.  On x86-64 that is all that the protocol asks
for but one: a lease must be seen before `shown` is looked at again, so a lock is taken and released
in between, whose locked instruction is a full fence.  Other processors order less: they take lane
inline.
"""
import ctypes
import fcntl
import mmap
import os
import platform
import stat
import struct
import sys
import threading

import numpy

from .frame import F32, HEADER, HEADER_BYTES, SHM, Ack, Header, encode_header
from .lane import frame_of

SUPPORTED = (sys.platform == "linux" and platform.machine() == "x86_64"
             and struct.calcsize("P") == 8)
PAGE = 4096
# Lane file: whose it is, and offsets of words.
LANE = struct.Struct("<4sI16sIIQI4xQ")
SLOTS_AT = 3 * PAGE
BELL, BEAT, TERM, FENCED, TURN, ACK, ATTACHED, LEASE, WAITING, HOLDS = (
    64, 68, 72, 76, 80, 88, 192, 196, 200, 208)
LANE_ACK = struct.Struct("<QQQQIIQQ")  # an acknowledgement's payload, version, term
READS_MAX = 1000
# Board.
BOARD = struct.Struct("<4sI16sIIQQQQ")
SHOWN, VERSIONS = 64, 128
BLOCKS, BLOCKS_SHOWN = 12, 8
FUTEX_WAIT, SYS_FUTEX = 0, 202  # x86-64


def host() -> str:
    """Which boot of which machine this is; None where memory cannot be shared from Python."""
    if not SUPPORTED:
        return None
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except (OSError, ValueError):
        return None


def _pages(size: int) -> int:
    return (size + PAGE - 1) // PAGE * PAGE


def _open(path: str, flags: int, size_min: int) -> int:
    """A descriptor of a regular file of that size or more; OSError, ValueError."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode) or info.st_size < size_min:
        os.close(descriptor)
        raise ValueError(f"{path} is no file of {size_min} bytes or more")
    return descriptor


class Board:
    """Whole versions, to read.  ValueError: it is not the board of this run and term."""

    def __init__(self, path: str, run: bytes, term: int, digest: int, count: int):
        block_bytes = _pages(HEADER_BYTES + 4 * count)
        size = PAGE + BLOCKS * block_bytes
        descriptor = _open(path, os.O_RDONLY, size)
        try:
            self._map = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        wanted = (b"GQB1", 1, run, term, BLOCKS, digest, count, block_bytes, PAGE)
        if BOARD.unpack_from(self._map) != wanted:
            raise ValueError(f"{path} is not this run's board of term {term}")
        self.term, self._count, self._block_bytes = term, count, block_bytes
        bytes_ = memoryview(self._map)
        self._shown = bytes_[SHOWN:SHOWN + 4].cast("I")
        self._versions = bytes_[VERSIONS:VERSIONS + 8 * BLOCKS_SHOWN].cast("Q")
        self._fence = threading.Lock()

    def newest(self):
        """(term, version) that is shown, not leased; None: none is."""
        shown = self._shown[0]
        return (self.term, self._versions[shown]) if shown < BLOCKS_SHOWN else None

    def copy(self, lease: memoryview):
        """((term, version), f32[count]) of the block that is shown, leased for the time of a copy;
        None: none is."""
        for _ in range(READS_MAX):
            shown = self._shown[0]
            if shown >= BLOCKS_SHOWN:
                return None
            lease[0] = 1 + shown
            with self._fence:  # the lease is seen before `shown` is read again
                pass
            if self._shown[0] == shown:
                age = self.term, self._versions[shown]
                at = PAGE + shown * self._block_bytes + HEADER_BYTES
                vector = numpy.empty(self._count, numpy.float32)
                vector[:] = numpy.frombuffer(self._map, "<f4", self._count, at)
                lease[0] = 0
                return age, vector
        lease[0] = 0
        return None


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class Shm:
    """One life of an actor on this lane.  paths: (lane file, board) of hello's answer.  OSError,
    ValueError: why it is not to be had."""

    name = "shm"

    def __init__(self, paths: tuple, grant, digest: int, count: int, window: int):
        path, self._board_path = paths
        self._grant, self._digest, self.count = grant, digest, count
        self._slot_bytes = _pages(4 * count)
        self._descriptor = _open(path, os.O_RDWR, SLOTS_AT + self._slot_bytes)
        try:
            self._attach(path, window)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _attach(self, path: str, window: int):
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{path} is another process's") from None
        try:
            # One that was removed before it was locked: nobody would see what is leased.
            if self.removed():
                raise ValueError(f"{path} was removed: this actor came too late")
            self._map = mmap.mmap(self._descriptor, 0)
            *identity, slots, slot_bytes = LANE.unpack_from(self._map)
            grant = self._grant
            if (identity != [b"GQF1", 1, grant.run, grant.actor, grant.epoch, self.count]
                    or slot_bytes != self._slot_bytes or not window < slots <= 65
                    or len(self._map) < SLOTS_AT + slots * slot_bytes):
                raise ValueError(f"{path} is not the lane file of actor {grant.actor}, epoch "
                                 f"{grant.epoch}, with {window + 1} slots")
            self._free, self._reserved = list(range(slots)), None
            self._begin_words(slots)
            self.board = self._open_board()
            self._word(ATTACHED)[0] = 1
        except BaseException:
            # The mapping may hold a descriptor of its own: closing ours would not unlock it.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            raise

    def _begin_words(self, slots: int):
        self._bytes = memoryview(self._map)
        self._bell, self._beat, self._turn = map(self._word, (BELL, BEAT, TURN))
        self._term, self._fenced = self._word(TERM), self._word(FENCED)
        self._lease, self._waiting = self._word(LEASE), self._word(WAITING)
        self._ack = self._bytes[ACK:ACK + LANE_ACK.size]
        self._holds = self._bytes[HOLDS:HOLDS + 8 * slots].cast("Q")
        self._futex = ctypes.c_uint32.from_buffer(self._map, BELL)
        self._libc = ctypes.CDLL(None)

    def _word(self, at: int) -> memoryview:
        return self._bytes[at:at + 4].cast("I")

    def _open_board(self) -> Board:
        return Board(self._board_path, self._grant.run, self._term[0], self._digest, self.count)

    # Gradients

    def _slot(self, index: int) -> numpy.ndarray:
        return numpy.frombuffer(self._map, "<f4", self.count, SLOTS_AT + index * self._slot_bytes)

    def reserve(self) -> numpy.ndarray:
        """f32[count] in a slot that is not in use: there is one more than the window has places."""
        if self._reserved is None:
            index = self._free.pop(0)
            self._holds[index] = 0
            self._reserved = index, self._slot(index)
        return self._reserved[1]

    def seal(self, sequence: int, **fields) -> bytes:
        """The descriptor of what was built; its slot holds `sequence` from now on."""
        index, _ = self._reserved
        self._holds[index] = sequence
        return encode_header(0, encoding=F32, lane=SHM, slot=index, count=self.count,
                             payload_bytes=4 * self.count, sequence=sequence, **fields)

    def note_sent(self):
        """Nobody writes the slot until the gradient is settled."""
        self._reserved[1].flags.writeable = False
        self._reserved = None

    def settled(self, frame: bytes):
        self._free.append(Header._make(HEADER.unpack(frame)).slot)

    def to_inline(self, frame: bytes) -> bytes:
        """The same gradient with its vector, under the same number."""
        head = Header._make(HEADER.unpack(frame))
        head, payload = frame_of(
            self._slot(head.slot), F32, kind=head.kind, actor=head.actor, epoch=head.epoch,
            term=head.term, digest=head.digest, run=head.run, sequence=head.sequence,
            version=head.version, samples=head.samples, sent=head.sent)
        return head + payload.tobytes()

    # What the optimizer says

    @property
    def said(self) -> tuple:
        """Rises with each change of what follows; the second at least once a second."""
        return self._bell[0], self._beat[0]

    @property
    def term(self) -> int:
        """Of the optimizer that serves this file."""
        return self._term[0]

    @property
    def fenced(self) -> bool:
        return self._fenced[0] != 0

    def ack(self):
        """((term, version), Ack), whole; None: there is none, or its writer died in between."""
        for _ in range(READS_MAX):
            turn, data = self._turn[0], bytes(self._ack)
            if turn % 2 == 0 and self._turn[0] == turn:
                *ack, version, term = LANE_ACK.unpack(data)
                return ((term, version), Ack(*ack)) if term else None
        return None

    def follow_board(self) -> bool:
        """Is the board that of the optimizer that serves us?  False: it cannot be opened (yet)."""
        if self.board.term != self.term:
            try:
                self.board = self._open_board()
            except (OSError, ValueError):
                return False
        return True

    def newest(self):
        return self.board.newest()

    def weights(self):
        """((term, version), f32[count]) of the newest version, a copy; None."""
        return self.board.copy(self._lease)

    def sleep(self, seen: int, wait_s: float):
        """Until the bell is no longer `seen`."""
        self._waiting[0] = 1
        if self._bell[0] == seen:
            self._libc.syscall(
                ctypes.c_long(SYS_FUTEX), ctypes.byref(self._futex), ctypes.c_int(FUTEX_WAIT),
                ctypes.c_uint32(seen), ctypes.byref(_Timespec(0, int(1e9 * wait_s))), None, 0)
        self._waiting[0] = 0

    def removed(self) -> bool:
        return os.fstat(self._descriptor).st_nlink == 0

    def close(self):
        """The optimizer removes the file once it is unlocked.  Vectors that were given out stay
        mapped."""
        if self._descriptor >= 0:
            self._lease[0] = 0
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1
