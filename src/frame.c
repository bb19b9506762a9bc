/*
 * Frame codec.  Every process meets a frame here first, so this file trusts nothing: it reads no
 * byte past the size it is given, and the fields it hands on are consistent with one another.
 */
#include "frame.h"

#include <isa-l/crc.h>
#include <stdbool.h>
#include <string.h>

/* Offsets on the wire; docs/PROTOCOL.md has the same table. */
enum {
    AT_MAGIC = 0,
    AT_PROTOCOL = 4,
    AT_KIND = 6,
    AT_ACTOR = 8,
    AT_EPOCH = 12,
    AT_TERM = 16,
    AT_ENCODING = 20,
    AT_LANE = 22,
    AT_DIGEST = 24,
    AT_RUN = 32,
    AT_SEQUENCE = 48,
    AT_VERSION = 56,
    AT_COUNT = 64,
    AT_SAMPLES = 72,
    AT_SLOT = 76, /* u32, lane shm; zero otherwise */
    AT_SENT_NS = 80,
    AT_APPLIED = 88,
    AT_PAYLOAD_BYTES = 96,
    AT_FLAGS = 104,      /* u32, lane shm: bit 0, finite; zero otherwise */
    AT_RESERVED_B = 108, /* 12 bytes, zero */
    AT_PAYLOAD_CRC = 120,
    AT_HEADER_CRC = 124
};

_Static_assert(AT_HEADER_CRC + 4 == GQ_FRAME_HEADER_BYTES, "header size");
_Static_assert(AT_RESERVED_B + 12 == AT_PAYLOAD_CRC, "header layout");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "payloads are little-endian floats used in place");

#define FLAG_FINITE 1u
/* Bytes that are copied while the first-level cache still has them for their checksum. */
#define COPIED 8192

static void
put16 (uint8_t *at, uint16_t value)
{
    memcpy (at, &value, sizeof value);
}

static void
put32 (uint8_t *at, uint32_t value)
{
    memcpy (at, &value, sizeof value);
}

static void
put64 (uint8_t *at, uint64_t value)
{
    memcpy (at, &value, sizeof value);
}

static uint16_t
get16 (const uint8_t *at)
{
    uint16_t value;
    memcpy (&value, at, sizeof value);
    return value;
}

static uint32_t
get32 (const uint8_t *at)
{
    uint32_t value;
    memcpy (&value, at, sizeof value);
    return value;
}

static uint64_t
get64 (const uint8_t *at)
{
    uint64_t value;
    memcpy (&value, at, sizeof value);
    return value;
}

/*
 * ISA-L's AVX-512 routine comes back without vzeroupper, which slows all SSE2 code after it (a pass
 * over 100,000 floats took 33 us instead of 8).
 */
#if defined(__x86_64__)
__attribute__ ((target ("avx"))) static void
clean_registers (void)
{
    __builtin_ia32_vzeroupper ();
}
#define CLEAN_REGISTERS() (__builtin_cpu_supports ("avx") ? clean_registers () : (void)0)
#else
#define CLEAN_REGISTERS() ((void)0)
#endif

uint32_t
gq_crc32c_more (uint32_t crc, const void *bytes, size_t size)
{
    /* ISA-L takes an int and does neither of the two inversions itself. */
    const size_t chunk_max = (size_t)1 << 30;
    unsigned char *at = (unsigned char *)(uintptr_t)bytes; /* ISA-L lacks the const */
    crc = ~crc;
    while (size > 0) {
        size_t chunk = size < chunk_max ? size : chunk_max;
        crc = crc32_iscsi (at, (int)chunk, crc);
        at += chunk;
        size -= chunk;
    }
    CLEAN_REGISTERS ();
    return ~crc;
}

/* a b modulo the polynomial; bit 31 is the coefficient of x^0, as in a CRC. */
static uint32_t
multiply (uint32_t a, uint32_t b)
{
    const uint32_t polynomial = UINT32_C (0x82f63b78);
    uint32_t product = 0;
    for (; a != 0; a <<= 1) {
        if (a >> 31 != 0)
            product ^= b;
        b = (b & 1) != 0 ? b >> 1 ^ polynomial : b >> 1;
    }
    return product;
}

uint32_t
gq_crc32c_join (uint32_t crc, uint32_t behind, uint64_t size)
{
    /* A byte behind it multiplies a CRC by x^8: both inversions cancel out, as in zlib. */
    uint32_t power = UINT32_C (1) << 31, square = UINT32_C (1) << 23;
    for (; size != 0; size >>= 1) {
        if ((size & 1) != 0)
            power = multiply (power, square);
        square = multiply (square, square);
    }
    return multiply (power, crc) ^ behind;
}

uint32_t
gq_crc32c (const void *bytes, size_t size)
{
    return gq_crc32c_more (0, bytes, size);
}

uint32_t
gq_crc32c_copy (void *restrict to, const void *restrict from, size_t size)
{
    uint32_t crc = 0;
    for (size_t at = 0; at < size; at += COPIED) {
        const size_t piece = size - at < COPIED ? size - at : COPIED;
        memcpy ((uint8_t *)to + at, (const uint8_t *)from + at, piece);
        crc = gq_crc32c_more (crc, (const uint8_t *)to + at, piece);
    }
    return crc;
}

void
gq_frame_encode (const gq_frame *frame, const void *payload, uint8_t *header)
{
    gq_frame_encode_summed (
        frame, frame->lane == GQ_LANE_INLINE ? gq_crc32c (payload, frame->payload_bytes) : 0,
        header);
}

void
gq_frame_encode_summed (const gq_frame *frame, uint32_t payload_crc, uint8_t *header)
{
    memset (header, 0, GQ_FRAME_HEADER_BYTES);
    put32 (header + AT_MAGIC, GQ_FRAME_MAGIC);
    put16 (header + AT_PROTOCOL, GQ_PROTOCOL_VERSION);
    put16 (header + AT_KIND, frame->kind);
    put32 (header + AT_ACTOR, frame->actor);
    put32 (header + AT_EPOCH, frame->epoch);
    put32 (header + AT_TERM, frame->term);
    put16 (header + AT_ENCODING, frame->encoding);
    put16 (header + AT_LANE, frame->lane);
    put64 (header + AT_DIGEST, frame->digest);
    memcpy (header + AT_RUN, frame->run, GQ_RUN_ID_BYTES);
    put64 (header + AT_SEQUENCE, frame->sequence);
    put64 (header + AT_VERSION, frame->version);
    put64 (header + AT_COUNT, frame->count);
    put32 (header + AT_SAMPLES, frame->samples);
    put32 (header + AT_SLOT, frame->slot);
    put64 (header + AT_SENT_NS, frame->sent_ns);
    put64 (header + AT_APPLIED, frame->applied);
    put64 (header + AT_PAYLOAD_BYTES, frame->payload_bytes);
    put32 (header + AT_FLAGS, frame->finite ? FLAG_FINITE : 0);
    put32 (header + AT_PAYLOAD_CRC, payload_crc);
    put32 (header + AT_HEADER_CRC, gq_crc32c (header, AT_HEADER_CRC));
}

static void
read_fields (const uint8_t *at, gq_frame *frame)
{
    frame->kind = get16 (at + AT_KIND);
    frame->actor = get32 (at + AT_ACTOR);
    frame->epoch = get32 (at + AT_EPOCH);
    frame->term = get32 (at + AT_TERM);
    frame->encoding = get16 (at + AT_ENCODING);
    frame->lane = get16 (at + AT_LANE);
    frame->digest = get64 (at + AT_DIGEST);
    memcpy (frame->run, at + AT_RUN, GQ_RUN_ID_BYTES);
    frame->sequence = get64 (at + AT_SEQUENCE);
    frame->version = get64 (at + AT_VERSION);
    frame->count = get64 (at + AT_COUNT);
    frame->samples = get32 (at + AT_SAMPLES);
    frame->slot = get32 (at + AT_SLOT);
    frame->sent_ns = get64 (at + AT_SENT_NS);
    frame->applied = get64 (at + AT_APPLIED);
    frame->payload_bytes = get64 (at + AT_PAYLOAD_BYTES);
    frame->finite = get32 (at + AT_FLAGS) == FLAG_FINITE;
}

/* Of an element; 0: this frame may not have that encoding. */
static uint64_t
element_bytes (const gq_frame *frame)
{
    if (frame->encoding == GQ_ENCODING_F32)
        return sizeof (float);
    bool may_round = frame->kind == GQ_KIND_GRADIENT && frame->lane == GQ_LANE_INLINE;
    return frame->encoding == GQ_ENCODING_BF16 && may_round ? sizeof (uint16_t) : 0;
}

/* Do the fields of this kind agree with one another? */
static int
consistent (const gq_frame *frame)
{
    if (frame->actor >= GQ_ACTORS_MAX)
        return 0;
    /* Only gradients lie in slots, and only they name one. */
    if (frame->lane == GQ_LANE_SHM
            ? frame->kind != GQ_KIND_GRADIENT
            : frame->lane != GQ_LANE_INLINE || frame->slot != 0 || frame->finite)
        return 0;
    if (frame->kind == GQ_KIND_ACK)
        return frame->encoding == GQ_ENCODING_RAW && frame->count == 0 &&
               frame->payload_bytes == GQ_ACK_BYTES;
    if (frame->count == 0 || frame->count > GQ_PARAMETERS_MAX || element_bytes (frame) == 0 ||
        frame->payload_bytes != frame->count * element_bytes (frame))
        return 0;
    switch (frame->kind) {
    case GQ_KIND_GRADIENT:
        return frame->sequence >= 1 && frame->samples >= 1 && frame->epoch >= 1;
    case GQ_KIND_INIT:
    case GQ_KIND_WEIGHTS:
        return 1;
    default:
        return 0;
    }
}

gq_status
gq_frame_decode_header (const void *header, gq_frame *frame)
{
    const uint8_t *at = header;
    if (get32 (at + AT_MAGIC) != GQ_FRAME_MAGIC || get16 (at + AT_PROTOCOL) != GQ_PROTOCOL_VERSION)
        return GQ_MALFORMED;
    if (get32 (at + AT_HEADER_CRC) != gq_crc32c (at, AT_HEADER_CRC))
        return GQ_CHECKSUM;
    if (get32 (at + AT_FLAGS) > FLAG_FINITE || get32 (at + AT_RESERVED_B) != 0 ||
        get64 (at + AT_RESERVED_B + 4) != 0)
        return GQ_MALFORMED;
    gq_frame read;
    read_fields (at, &read);
    if (!consistent (&read))
        return GQ_MALFORMED;
    *frame = read;
    return GQ_OK;
}

gq_status
gq_frame_decode (const void *bytes, size_t size, gq_frame *frame)
{
    gq_frame read;
    if (size < GQ_FRAME_HEADER_BYTES)
        return GQ_MALFORMED;
    gq_status status = gq_frame_decode_header (bytes, &read);
    if (status == GQ_OK &&
        size - GQ_FRAME_HEADER_BYTES != (read.lane == GQ_LANE_SHM ? 0 : read.payload_bytes))
        status = GQ_MALFORMED;
    if (status == GQ_OK)
        *frame = read;
    return status;
}

uint32_t
gq_frame_payload_crc (const void *header)
{
    return get32 ((const uint8_t *)header + AT_PAYLOAD_CRC);
}

gq_status
gq_frame_check_payload (const void *bytes, size_t size)
{
    const uint8_t *at = bytes;
    uint32_t crc = gq_crc32c (at + GQ_FRAME_HEADER_BYTES, size - GQ_FRAME_HEADER_BYTES);
    return gq_frame_payload_crc (bytes) == crc ? GQ_OK : GQ_CHECKSUM;
}

void
gq_ack_encode (const gq_ack *ack, uint8_t *bytes)
{
    put64 (bytes, ack->cumulative);
    put64 (bytes + 8, ack->beyond);
    put64 (bytes + 16, ack->refused);
    put64 (bytes + 24, ack->refused_sequence);
    put32 (bytes + 32, ack->refused_reason);
    put32 (bytes + 36, ack->held);
}

void
gq_ack_decode (const uint8_t *bytes, gq_ack *ack)
{
    ack->cumulative = get64 (bytes);
    ack->beyond = get64 (bytes + 8);
    ack->refused = get64 (bytes + 16);
    ack->refused_sequence = get64 (bytes + 24);
    ack->refused_reason = get32 (bytes + 32);
    ack->held = get32 (bytes + 36);
}

void
gq_topic (gq_frame_kind kind, uint32_t actor, uint8_t topic[GQ_TOPIC_ACTOR_BYTES])
{
    put32 (topic + AT_MAGIC, GQ_FRAME_MAGIC);
    put16 (topic + AT_PROTOCOL, GQ_PROTOCOL_VERSION);
    put16 (topic + AT_KIND, (uint16_t)kind);
    put32 (topic + AT_ACTOR, actor);
}
