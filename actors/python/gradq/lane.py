"""How a gradient travels.  A lane gives vectors to build gradients in, and makes them frames.

Inline: header and vector in one message, through sockets.  The other, shm, is in lane_shm.py.
"""
import numpy

from .crc import crc32c
from .frame import BF16, HEADER_BYTES, INLINE, bf16, encode_header


def frame_of(vector: numpy.ndarray, encoding: int, **fields) -> tuple:
    """A frame with its bytes uninitialised but for the header; see Inline."""
    payload = bf16(vector) if encoding == BF16 else vector
    head = encode_header(crc32c(payload), encoding=encoding, lane=INLINE, count=vector.size,
                         payload_bytes=payload.nbytes, **fields)
    return head, payload


class Inline:
    name = "inline"

    def __init__(self, count: int, encoding: int):
        self.count, self.encoding = count, encoding
        self._frame = self._vector = None

    def reserve(self) -> numpy.ndarray:
        """f32[count] to build the next gradient in; the same one until it is sent."""
        if self._vector is None:
            # Built where it is sent from: 128 bytes before it are the header's.
            self._frame = numpy.empty(HEADER_BYTES + 4 * self.count, numpy.uint8)
            self._vector = self._frame[HEADER_BYTES:].view("<f4")
        return self._vector

    def seal(self, **fields):
        """The frame of what was built.  It may be built on, and sealed again, until note_sent."""
        head, payload = frame_of(self.reserve(), self.encoding, **fields)
        if self.encoding == BF16:
            return head + payload.tobytes()
        self._frame[:HEADER_BYTES] = numpy.frombuffer(head, numpy.uint8)
        return self._frame

    def note_sent(self):
        """What was sealed last went out: its bytes must stay, for it may go out again."""
        self._vector.flags.writeable = False
        self._frame = self._vector = None

    def settled(self, frame):
        """The frame is the buffer."""

    def close(self):
        pass
