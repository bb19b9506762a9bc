"""CRC-32C (Castagnoli; RFC 3720, B.4) of frames.

Four ways, all the same number.  The wheel `crc32c` computes it with the processor's own
instruction, ten bytes a nanosecond, and releases the GIL: `pip install gradq[fast]` brings it.  So
does ISA-L, which is there where gradq's programs are.  Without both short strings go through a
table, byte by byte, and long ones through NumPy: about 0.1 bytes a nanosecond, which is 30 ms for a
million parameters.  google-crc32c is as fast, but takes bytes only, and so would copy each vector.
"""
import ctypes
import functools

import numpy

ISAL = "libisal.so.2"
# ISA-L counts bytes in an int.
ISAL_BYTES_MAX = 1 << 30


def by_isal(name: str = ISAL):
    """A function of ISA-L's; OSError or AttributeError where it cannot be had."""
    function = ctypes.CDLL(name).crc32_iscsi
    function.restype, function.argtypes = ctypes.c_uint32, [ctypes.c_void_p, ctypes.c_int,
                                                            ctypes.c_uint32]

    def crc(data) -> int:
        array, register = numpy.frombuffer(memoryview(data).cast("B"), numpy.uint8), 0xFFFFFFFF
        for at in range(0, array.size, ISAL_BYTES_MAX):
            part = array[at:at + ISAL_BYTES_MAX]
            register = function(part.ctypes.data, part.size, register)
        return register ^ 0xFFFFFFFF
    return crc


try:
    from crc32c import crc32c as _accelerated
except ImportError:
    try:
        _accelerated = by_isal()
    except (OSError, AttributeError):
        _accelerated = None

POLYNOMIAL = 0x82F63B78  # 0x1EDC6F41, bits reversed
# Up to here the loop over bytes is faster than a dozen calls of NumPy.
SHORT_BYTES = 1024


def _byte_table() -> list:
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return table


_TABLE = _byte_table()


def by_table(data, crc: int = 0xFFFFFFFF) -> int:
    """Byte by byte."""
    for byte in memoryview(data).cast("B"):
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


@functools.lru_cache(maxsize=None)
def _shift_tables(level: int) -> list:
    """Four tables u32[256]: what 4 * 2^level zero bytes make of each byte of a register."""
    if level == 0:
        low = numpy.array(_TABLE, "u4")
        tables = [numpy.arange(256, dtype="u4") << numpy.uint32(8 * place) for place in range(4)]
        for _ in range(4):
            tables = [low[table & 255] ^ table >> 8 for table in tables]
        return tables
    half = _shift_tables(level - 1)
    return [_shifted(table, half) for table in half]


def _shifted(registers, tables: list):
    """Each register behind as many zero bytes as the tables are for; linear, so byte by byte."""
    return (tables[0][registers & 255] ^ tables[1][registers >> 8 & 255]
            ^ tables[2][registers >> 16 & 255] ^ tables[3][registers >> 24])


def by_numpy(data) -> int:
    """Words in pairs, then pairs of these, and so on.

    A CRC without its inversions is linear over GF(2): that of two halves is the first one shifted
    by the second one's length, exclusive-or the second one.  Halves of equal length share one
    shift, so each level is a few operations on whole arrays.  A word that has no partner gets
    zeros in front of it, which change nothing.
    """
    data = memoryview(data).cast("B")
    words = numpy.frombuffer(data, "<u4", len(data) // 4).astype("u4")
    rest = data[4 * words.size:]
    if words.size == 0:
        return by_table(rest)
    words[0] ^= 0xFFFFFFFF  # the initial value
    level = 0
    while words.size > 1:
        odd = words.size % 2
        joined = _shifted(words[odd::2], _shift_tables(level)) ^ words[odd + 1::2]
        words = numpy.concatenate((words[:1], joined)) if odd else joined
        level += 1
    register = int(_shifted(words, _shift_tables(0))[0])  # a word counts when it has passed through
    return by_table(rest, register)


def crc32c(data) -> int:
    """Of anything with a contiguous buffer."""
    if _accelerated is not None:
        return _accelerated(data)
    return (by_table if memoryview(data).nbytes <= SHORT_BYTES else by_numpy)(data)
