"""What a run directory holds, read as docs/PROTOCOL.md describes it; never through gradq's code.

Wrong names the place of the first byte that does not fit.
"""
import ctypes
import json
import struct
from pathlib import Path
from typing import NamedTuple

import numpy

SEGMENT = struct.Struct("<II16sQI24sI")
RECORD = struct.Struct("<IIQQII")
SEGMENT_MAGIC, RECORD_MAGIC = 0x314a5147, 0x31435247
TERM, GRANT, GRADIENT, REFUSAL, NAMED = 1, 2, 3, 4, 5
FRAME = struct.Struct("<IHHIIIHHQ16sQQQIIQQQQQII")
FRAME_MAGIC, FRAME_BYTES = 0x31515247, 128
assert (SEGMENT.size, RECORD.size, FRAME.size) == (64, 32, FRAME_BYTES)

_isal = ctypes.CDLL("libisal.so.2")
_isal.crc32_iscsi.restype = ctypes.c_uint
_isal.crc32_iscsi.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_uint]
_xxhash = ctypes.CDLL("libxxhash.so.0")
_xxhash.XXH64.restype = ctypes.c_uint64
_xxhash.XXH64.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64]


class Wrong(Exception):
    """The run directory breaks a promise."""


def crc32c(data: bytes) -> int:
    return _isal.crc32_iscsi(data, len(data), 0xffffffff) ^ 0xffffffff


def xxh64(data: bytes) -> int:
    return _xxhash.XXH64(data, len(data), 0)


assert crc32c(b"123456789") == 0xe3069283  # RFC 3720's polynomial
assert xxh64(b"") == 0xef46db3751d8e999  # of xxHash's specification


class Record(NamedTuple):
    lsn: int
    kind: int
    payload: bytes
    crc: int
    place: str


def check(condition, place: str, text: str):
    if not condition:
        raise Wrong(f"{place}: {text}")


def read_segment(path: Path, run: bytes, last: Record):
    """Records of one segment, which has to follow `last` (None: whatever it begins with)."""
    data = path.read_bytes()
    check(len(data) >= SEGMENT.size, path.name, "no header")
    magic, version, of, first, chain, zero, crc = SEGMENT.unpack_from(data)
    check((magic, version, zero) == (SEGMENT_MAGIC, 1, bytes(24)), path.name, "header")
    check(crc == crc32c(data[:SEGMENT.size - 4]), path.name, "checksum of the header")
    check(of == run, path.name, "another run's")
    check(path.name == f"segment-{first:016}", path.name, f"begins with record {first}")
    if last is None:
        last = Record(first - 1, 0, b"", chain, path.name)
    check((first, chain) == (last.lsn + 1, last.crc), path.name, f"does not follow {last.place}")
    at = SEGMENT.size
    while at < len(data):
        place = f"{path.name}:{at}"
        check(len(data) - at >= RECORD.size, place, "torn")
        magic, kind, lsn, size, chain, crc = RECORD.unpack_from(data, at)
        payload = data[at + RECORD.size:at + RECORD.size + size]
        check(magic == RECORD_MAGIC and len(payload) == size, place, "torn, or no record")
        check(crc == crc32c(data[at:at + RECORD.size - 4] + payload), place, "checksum")
        check((lsn, chain) == (last.lsn + 1, last.crc), place, "does not follow the one before")
        last = Record(lsn, kind, payload, crc, place)
        yield last
        at += RECORD.size + size
        check(not any(data[at:at + -size % 8]), place, "padding")
        at += -size % 8


def newest(directory: Path, archive: Path, pattern: str) -> list:
    """Files of the run and, where they are gone there, the archive's; in order of their names."""
    found = {path.name: path for path in (archive.glob(pattern) if archive else ())}
    found.update((path.name, path) for path in directory.glob(pattern))
    return [found[name] for name in sorted(found)]


def read_journal(segments: list, run: bytes):
    last = None
    for path in segments:
        for last in read_segment(path, run, last):
            yield last


def read_checkpoint(path: Path) -> tuple:
    """(tensors in the order of their bytes, metadata)"""
    data = path.read_bytes()
    size, = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + size])
    meta = header.pop("__metadata__", {})
    body = data[8 + size:]
    order = sorted(header, key=lambda name: header[name]["data_offsets"])
    tensors = {name: numpy.frombuffer(body[slice(*header[name]["data_offsets"])], "<f4")
               for name in order}
    check(int(meta["data_xxh64"], 16) == xxh64(body), path.name, "checksum of the data")
    return tensors, meta
