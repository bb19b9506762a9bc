"""Frames: a 128-byte header and a payload in one ZeroMQ message.  docs/PROTOCOL.md, "Frames".

The codec trusts nothing: what it hands on is whole, and its fields agree with one another.
"""
import struct
import time
from collections import namedtuple

import numpy

from .crc import crc32c

MAGIC, PROTOCOL = b"GRQ1", 1
GRADIENT, INIT, WEIGHTS, ACK = 1, 2, 3, 4
RAW, F32, BF16 = 0, 1, 2
ENCODINGS = {"f32": F32, "bf16": BF16}
INLINE, SHM = 0, 1
ACTORS_MAX, PARAMETERS_MAX = 4096, 1 << 31
REASONS = {4: "malformed", 5: "checksum", 6: "layout", 7: "count", 8: "nonfinite", 9: "stale",
           10: "run"}

HEADER = struct.Struct("<4sHHIIIHHQ16sQQQIIQQQI12sII")
HEADER_BYTES = HEADER.size
Header = namedtuple("Header", "magic protocol kind actor epoch term encoding lane digest run "
                    "sequence version count samples slot sent applied payload_bytes finite "
                    "reserved payload_crc header_crc")
CRC = struct.Struct("<I")
CRC_AT = HEADER_BYTES - CRC.size

ACK_PAYLOAD = struct.Struct("<QQQQII")
Ack = namedtuple("Ack", "cumulative beyond refused refused_sequence refused_reason held")

_ZERO = dict.fromkeys(Header._fields, 0)


def topic(kind: int, actor: int = None) -> bytes:
    """What to subscribe to: all frames of a kind, or those for one actor."""
    prefix = struct.pack("<4sHH", MAGIC, PROTOCOL, kind)
    return prefix if actor is None else prefix + struct.pack("<I", actor)


def encode_header(payload_crc: int, **fields) -> bytes:
    """128 bytes; fields that are not given are 0, `sent` is now."""
    fields = {**_ZERO, "magic": MAGIC, "protocol": PROTOCOL, "reserved": bytes(12),
              "sent": time.time_ns(), "payload_crc": payload_crc, **fields}
    head = HEADER.pack(*Header(**fields))[:CRC_AT]
    return head + CRC.pack(crc32c(head))


def _consistent(head: Header) -> bool:
    if head.actor >= ACTORS_MAX or head.reserved != bytes(12) or head.finite > 1:
        return False
    if head.lane == SHM:
        if head.kind != GRADIENT or head.encoding != F32:
            return False
    elif head.lane != INLINE or head.slot or head.finite:
        return False
    if head.kind == ACK:
        return (head.encoding == RAW and head.count == 0
                and head.payload_bytes == ACK_PAYLOAD.size)
    size = {F32: 4, BF16: 2 if head.kind == GRADIENT else 0}.get(head.encoding, 0)
    if not 1 <= head.count <= PARAMETERS_MAX or not size or head.payload_bytes != size * head.count:
        return False
    if head.kind == GRADIENT:
        return min(head.sequence, head.samples, head.epoch) >= 1
    return head.kind in (INIT, WEIGHTS)


def decode_header(data):
    """The Header of a whole frame, its payload unseen; None for what is no frame."""
    if len(data) < HEADER_BYTES:
        return None
    head = Header._make(HEADER.unpack_from(data))
    if (head.magic != MAGIC or head.protocol != PROTOCOL
            or head.header_crc != crc32c(bytes(data[:CRC_AT])) or not _consistent(head)):
        return None
    inside = 0 if head.lane == SHM else head.payload_bytes
    return head if len(data) - HEADER_BYTES == inside else None


def payload_is_whole(head: Header, data) -> bool:
    return head.payload_crc == crc32c(data[HEADER_BYTES:])


def decode_ack(data) -> Ack:
    """Of a whole acknowledgement."""
    return Ack(*ACK_PAYLOAD.unpack_from(data, HEADER_BYTES))


def bf16(vector: numpy.ndarray) -> numpy.ndarray:
    """u16[n] of f32[n]: upper halves, rounded to nearest, ties to even; a NaN is made quiet."""
    bits = vector.view("<u4")
    halves = bits + (bits >> 16 & 1) + numpy.uint32(0x7FFF) >> 16
    return numpy.where(numpy.isnan(vector), bits >> 16 | 0x40, halves).astype("<u2")
