/*
 * Fuzzer of the frame codec, the first code that a stranger's bytes meet.
 *
 * For any input: decoding reads nothing beyond it, a refused frame leaves the result untouched, and
 * an accepted one has the size that it names and encodes to the same header.  Random bytes do not
 * pass a checksum, so each input is tried a second time with both checksums made right.
 */
#include "fuzz_testing.h"

#include "frame.h"

/* docs/PROTOCOL.md: CRC32C of the payload, then of the header's first 124 bytes. */
#define AT_PAYLOAD_CRC 120
#define AT_HEADER_CRC  124

static void
check_ack (const uint8_t *payload)
{
    gq_ack ack, again;
    uint8_t bytes[GQ_ACK_BYTES], bytes_again[GQ_ACK_BYTES];
    gq_ack_decode (payload, &ack);
    gq_ack_encode (&ack, bytes);
    /* The last four bytes are reserved and written as zero. */
    REQUIRE (memcmp (bytes, payload, GQ_ACK_BYTES - 4) == 0);
    gq_ack_decode (bytes, &again);
    gq_ack_encode (&again, bytes_again);
    REQUIRE (memcmp (bytes, bytes_again, GQ_ACK_BYTES) == 0);
}

static void
check (const uint8_t *bytes, size_t size)
{
    gq_frame frame, untouched;
    uint8_t header[GQ_FRAME_HEADER_BYTES];

    memset (&frame, 0xa5, sizeof frame);
    memcpy (&untouched, &frame, sizeof frame);
    gq_status status = gq_frame_decode (bytes, size, &frame);
    if (status != GQ_OK) {
        REQUIRE (status == GQ_MALFORMED || status == GQ_CHECKSUM);
        REQUIRE (memcmp (&frame, &untouched, sizeof frame) == 0);
        return;
    }
    REQUIRE (size == GQ_FRAME_HEADER_BYTES + (frame.lane == GQ_LANE_SHM ? 0 : frame.payload_bytes));
    REQUIRE (frame.lane == GQ_LANE_SHM ? frame.kind == GQ_KIND_GRADIENT : frame.slot == 0);
    const int halves = frame.encoding == GQ_ENCODING_BF16;
    REQUIRE (!halves || (frame.kind == GQ_KIND_GRADIENT && frame.lane == GQ_LANE_INLINE));
    REQUIRE (frame.kind == GQ_KIND_ACK || frame.payload_bytes == frame.count * (halves ? 2 : 4));
    status = gq_frame_check_payload (bytes, size);
    REQUIRE (status == GQ_OK || status == GQ_CHECKSUM);
    if (status != GQ_OK)
        return;
    gq_frame_encode (&frame, bytes + GQ_FRAME_HEADER_BYTES, header);
    REQUIRE (memcmp (header, bytes, GQ_FRAME_HEADER_BYTES) == 0);
    if (frame.kind == GQ_KIND_ACK)
        check_ack (bytes + GQ_FRAME_HEADER_BYTES);
}

static void
put_crc (uint8_t *at, uint32_t crc)
{
    for (int i = 0; i < 4; i++)
        at[i] = (uint8_t)(crc >> (8 * i));
}

int
LLVMFuzzerTestOneInput (const uint8_t *data, size_t size)
{
    check (data, size);
    if (size < GQ_FRAME_HEADER_BYTES)
        return 0;
    uint8_t *bytes = malloc (size); /* of its own, so that its end is guarded too */
    if (bytes == NULL)
        return 0;
    memcpy (bytes, data, size);
    put_crc (bytes + AT_PAYLOAD_CRC,
             gq_crc32c (bytes + GQ_FRAME_HEADER_BYTES, size - GQ_FRAME_HEADER_BYTES));
    put_crc (bytes + AT_HEADER_CRC, gq_crc32c (bytes, AT_HEADER_CRC));
    check (bytes, size);
    free (bytes);
    return 0;
}
