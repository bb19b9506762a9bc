/*
 * Frame codec: where every byte stands, and that nothing but a sound frame is taken for one.  The
 * offsets below are those of docs/PROTOCOL.md, the CRCs those of RFC 3720.
 */
#include "support.h"

TestSuite (frame, .timeout = 60);

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
    AT_ZERO_A = 76,
    AT_SENT_NS = 80,
    AT_APPLIED = 88,
    AT_PAYLOAD_BYTES = 96,
    AT_ZERO_B = 104,
    AT_PAYLOAD_CRC = 120,
    AT_HEADER_CRC = 124,
    COUNT = 5,
    SIZE = GQ_FRAME_HEADER_BYTES + COUNT * 4
};

/* One bit at a time, from the polynomial 0x1edc6f41 reflected: RFC 3720, 12.1. */
static uint32_t
crc_by_bits (const uint8_t *bytes, size_t size)
{
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < size; i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return ~crc;
}

static void
put (uint8_t *at, uint64_t value, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        at[i] = (uint8_t)(value >> 8 * i);
}

/* A header of our own making that was changed gets its checksum again. */
static void
seal (uint8_t *bytes)
{
    put (bytes + AT_HEADER_CRC, crc_by_bits (bytes, AT_HEADER_CRC), 4);
}

static gq_frame
sample (gq_frame_kind kind)
{
    gq_frame frame = support_frame (kind, UINT64_C (0x1122334455667788), COUNT);
    frame.actor = 0x0abc;
    frame.epoch = 0xdeadbeef;
    frame.term = 0xfeedf00d;
    frame.sequence = UINT64_C (0x0102030405060708);
    frame.version = UINT64_C (0x1112131415161718);
    frame.samples = 0x51525354;
    frame.sent_ns = UINT64_C (0x2122232425262728);
    frame.applied = UINT64_C (0x3132333435363738);
    for (uint8_t i = 0; i < GQ_RUN_ID_BYTES; i++)
        frame.run[i] = (uint8_t)(0xa0 + i);
    return frame;
}

static const uint8_t payload[GQ_ACK_BYTES] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 250};

/* A sound gradient frame in bytes[SIZE]. */
static void
make_sound (uint8_t *bytes)
{
    const gq_frame frame = sample (GQ_KIND_GRADIENT);
    memcpy (bytes + GQ_FRAME_HEADER_BYTES, payload, COUNT * 4);
    gq_frame_encode (&frame, bytes + GQ_FRAME_HEADER_BYTES, bytes);
}

static void
expect_same (const gq_frame *a, const gq_frame *b)
{
    cr_assert_eq (a->kind, b->kind);
    cr_assert_eq (a->encoding, b->encoding);
    cr_assert_eq (a->lane, b->lane);
    cr_assert_eq (a->actor, b->actor);
    cr_assert_eq (a->epoch, b->epoch);
    cr_assert_eq (a->term, b->term);
    cr_assert_eq (a->digest, b->digest);
    cr_assert_arr_eq (a->run, b->run, GQ_RUN_ID_BYTES);
    cr_assert_eq (a->sequence, b->sequence);
    cr_assert_eq (a->version, b->version);
    cr_assert_eq (a->count, b->count);
    cr_assert_eq (a->samples, b->samples);
    cr_assert_eq (a->sent_ns, b->sent_ns);
    cr_assert_eq (a->applied, b->applied);
    cr_assert_eq (a->payload_bytes, b->payload_bytes);
}

Test (frame, crc_gives_the_examples_of_rfc_3720)
{
    /* Appendix B.4. */
    uint8_t bytes[32];
    memset (bytes, 0, sizeof bytes);
    cr_assert_eq (gq_crc32c (bytes, 32), 0x8a9136aau);
    memset (bytes, 0xff, sizeof bytes);
    cr_assert_eq (gq_crc32c (bytes, 32), 0x62a8ab43u);
    for (uint8_t i = 0; i < 32; i++)
        bytes[i] = i;
    cr_assert_eq (gq_crc32c (bytes, 32), 0x46dd794eu);
    for (uint8_t i = 0; i < 32; i++)
        bytes[i] = (uint8_t)(31 - i);
    cr_assert_eq (gq_crc32c (bytes, 32), 0x113fdb5cu);
}

Test (frame, crc_equals_the_one_made_bit_by_bit_at_every_length_and_alignment)
{
    static uint8_t bytes[1200];
    uint64_t seed = 3;
    printf ("seed %llu\n", (unsigned long long)seed);
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)support_random (&seed);
    for (size_t start = 0; start < 16; start++)
        for (size_t size = 0; size < 1100; size += size < 300 ? 1 : 37)
            cr_assert_eq (gq_crc32c (bytes + start, size), crc_by_bits (bytes + start, size),
                          "%zu bytes from %zu", size, start);
}

Test (frame, crc_of_two_parts_is_that_of_the_whole)
{
    uint8_t bytes[100];
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)(i * 37 + 11);
    for (size_t first = 0; first <= sizeof bytes; first++) {
        const uint32_t crc = gq_crc32c (bytes, first);
        cr_assert_eq (gq_crc32c_more (crc, bytes + first, sizeof bytes - first),
                      crc_by_bits (bytes, sizeof bytes), "%zu", first);
        cr_assert_eq (gq_crc32c_join (crc, gq_crc32c (bytes + first, sizeof bytes - first),
                                      sizeof bytes - first),
                      crc_by_bits (bytes, sizeof bytes), "%zu", first);
    }
}

Test (frame, crcs_are_joined_over_any_distance)
{
    uint8_t bytes[6] = {1, 2, 3};
    const size_t size = ((size_t)1 << 20) + 5;
    uint8_t *zeros = calloc (size, 1);
    cr_assert_not_null (zeros);
    const uint32_t crc = gq_crc32c (bytes, sizeof bytes);
    cr_assert_eq (gq_crc32c_join (crc, gq_crc32c (zeros, size), size),
                  gq_crc32c_more (crc, zeros, size));
    free (zeros);
}

Test (frame, every_header_byte_stands_where_the_protocol_says)
{
    const gq_frame frame = sample (GQ_KIND_GRADIENT);
    uint8_t expected[GQ_FRAME_HEADER_BYTES] = {0};
    uint8_t got[GQ_FRAME_HEADER_BYTES];
    memset (got, 0x5a, sizeof got);
    memcpy (expected + AT_MAGIC, "GRQ1", 4);
    put (expected + AT_PROTOCOL, 1, 2);
    put (expected + AT_KIND, 1, 2);
    put (expected + AT_ACTOR, frame.actor, 4);
    put (expected + AT_EPOCH, frame.epoch, 4);
    put (expected + AT_TERM, frame.term, 4);
    put (expected + AT_ENCODING, 1, 2);
    put (expected + AT_LANE, 0, 2);
    put (expected + AT_DIGEST, frame.digest, 8);
    memcpy (expected + AT_RUN, frame.run, GQ_RUN_ID_BYTES);
    put (expected + AT_SEQUENCE, frame.sequence, 8);
    put (expected + AT_VERSION, frame.version, 8);
    put (expected + AT_COUNT, COUNT, 8);
    put (expected + AT_SAMPLES, frame.samples, 4);
    put (expected + AT_SENT_NS, frame.sent_ns, 8);
    put (expected + AT_APPLIED, frame.applied, 8);
    put (expected + AT_PAYLOAD_BYTES, COUNT * 4, 8);
    put (expected + AT_PAYLOAD_CRC, crc_by_bits (payload, COUNT * 4), 4);
    seal (expected);
    gq_frame_encode (&frame, payload, got);
    for (size_t i = 0; i < sizeof got; i++)
        cr_assert_eq (got[i], expected[i], "byte %zu: %02x, not %02x", i, got[i], expected[i]);
}

Test (frame, every_kind_survives_a_round_trip)
{
    static const gq_frame_kind kinds[] = {GQ_KIND_GRADIENT, GQ_KIND_INIT, GQ_KIND_WEIGHTS,
                                          GQ_KIND_ACK};
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        const gq_frame frame = sample (kinds[i]);
        gq_frame read = {0};
        size_t size;
        uint8_t *bytes = support_message (&frame, payload, &size);
        cr_assert_eq (gq_frame_decode (bytes, size, &read), GQ_OK, "kind %d", (int)kinds[i]);
        expect_same (&frame, &read);
        cr_assert_eq (gq_frame_check_payload (bytes, size), GQ_OK);
        free (bytes);
    }
}

Test (frame, no_truncation_is_a_frame_and_none_is_read_past_its_end)
{
    uint8_t bytes[SIZE];
    uint8_t *end = support_guarded_end (SIZE);
    gq_frame read;
    make_sound (bytes);
    for (size_t size = 0; size < SIZE; size++) {
        memcpy (end - size, bytes, size);
        cr_assert_neq (gq_frame_decode (end - size, size, &read), GQ_OK, "%zu bytes", size);
    }
    memcpy (end - SIZE, bytes, SIZE);
    cr_assert_eq (gq_frame_decode (end - SIZE, SIZE, &read), GQ_OK);
    cr_assert_eq (gq_frame_check_payload (end - SIZE, SIZE), GQ_OK);
}

Test (frame, a_header_alone_is_read_as_the_one_of_a_whole_frame)
{
    uint8_t bytes[SIZE];
    uint8_t *header = support_guarded_end (GQ_FRAME_HEADER_BYTES) - GQ_FRAME_HEADER_BYTES;
    gq_frame whole, alone;
    make_sound (bytes);
    memcpy (header, bytes, GQ_FRAME_HEADER_BYTES);
    cr_assert_eq (gq_frame_decode (bytes, SIZE, &whole), GQ_OK);
    cr_assert_eq (gq_frame_decode_header (header, &alone), GQ_OK);
    expect_same (&alone, &whole);
    for (size_t bit = 0; bit < 8 * GQ_FRAME_HEADER_BYTES; bit++) {
        header[bit / 8] ^= (uint8_t)(1u << bit % 8);
        cr_assert_neq (gq_frame_decode_header (header, &alone), GQ_OK, "bit %zu", bit);
        header[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    header[AT_COUNT]++; /* no longer what the payload's bytes hold */
    seal (header);
    cr_assert_eq (gq_frame_decode_header (header, &alone), GQ_MALFORMED);
    expect_same (&alone, &whole);
}

Test (frame, bytes_after_the_payload_make_it_malformed)
{
    uint8_t bytes[SIZE + 64] = {0};
    gq_frame read;
    make_sound (bytes);
    for (size_t more = 1; more <= 64; more++)
        cr_assert_eq (gq_frame_decode (bytes, SIZE + more, &read), GQ_MALFORMED, "%zu more", more);
}

Test (frame, every_flipped_bit_is_noticed)
{
    uint8_t bytes[SIZE];
    gq_frame read;
    make_sound (bytes);
    for (size_t bit = 0; bit < 8 * SIZE; bit++) {
        bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
        if (bit / 8 < GQ_FRAME_HEADER_BYTES)
            cr_assert_neq (gq_frame_decode (bytes, SIZE, &read), GQ_OK, "bit %zu", bit);
        else
            cr_assert_eq (gq_frame_check_payload (bytes, SIZE), GQ_CHECKSUM, "bit %zu", bit);
        bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    cr_assert_eq (gq_frame_decode (bytes, SIZE, &read), GQ_OK);
}

Test (frame, every_field_refuses_what_it_may_not_hold_though_the_checksum_is_right)
{
    static const struct {
        const char *what;
        size_t at, bytes;
        uint64_t value;
    } wrong[] = {
        {"magic 0", AT_MAGIC, 4, 0},
        {"another magic", AT_MAGIC, 4, GQ_FRAME_MAGIC + 1},
        {"magic, big end first", AT_MAGIC, 4, 0x47525131},
        {"protocol 0", AT_PROTOCOL, 2, 0},
        {"protocol 2", AT_PROTOCOL, 2, 2},
        {"kind 0", AT_KIND, 2, 0},
        {"kind 5", AT_KIND, 2, 5},
        {"kind 257", AT_KIND, 2, 257},
        {"ack with a vector", AT_KIND, 2, GQ_KIND_ACK},
        {"first actor past the last", AT_ACTOR, 4, GQ_ACTORS_MAX},
        {"actor -1", AT_ACTOR, 4, UINT32_MAX},
        {"epoch 0", AT_EPOCH, 4, 0},
        {"raw vector", AT_ENCODING, 2, GQ_ENCODING_RAW},
        {"bf16 of twice the size", AT_ENCODING, 2, GQ_ENCODING_BF16},
        {"encoding 3", AT_ENCODING, 2, 3},
        {"encoding -1", AT_ENCODING, 2, UINT16_MAX},
        {"lane 1", AT_LANE, 2, 1},
        {"lane 65535", AT_LANE, 2, 65535},
        {"sequence 0", AT_SEQUENCE, 8, 0},
        {"count 0", AT_COUNT, 8, 0},
        {"one element less", AT_COUNT, 8, COUNT - 1},
        {"one element more", AT_COUNT, 8, COUNT + 1},
        {"count -1", AT_COUNT, 8, UINT64_MAX},
        /* Four times these is COUNT * 4 again, modulo 2^64. */
        {"count that wraps once", AT_COUNT, 8, (UINT64_C (1) << 62) + COUNT},
        {"count that wraps twice", AT_COUNT, 8, (UINT64_C (2) << 62) + COUNT},
        {"no samples", AT_SAMPLES, 4, 0},
        {"first reserved word", AT_ZERO_A, 4, 1},
        {"its last byte", AT_ZERO_A + 3, 1, 0x80},
        {"other reserved bytes", AT_ZERO_B, 8, 1},
        {"their second half", AT_ZERO_B + 8, 8, 1},
        {"their last byte", AT_ZERO_B + 15, 1, 0x80},
        {"payload a byte short", AT_PAYLOAD_BYTES, 8, COUNT * 4 - 1},
        {"payload a byte long", AT_PAYLOAD_BYTES, 8, COUNT * 4 + 1},
        {"payload of 0", AT_PAYLOAD_BYTES, 8, 0},
        {"payload of 2^64 - 1", AT_PAYLOAD_BYTES, 8, UINT64_MAX},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        uint8_t bytes[SIZE];
        gq_frame read;
        make_sound (bytes);
        put (bytes + wrong[i].at, wrong[i].value, wrong[i].bytes);
        seal (bytes);
        cr_assert_eq (gq_frame_decode (bytes, SIZE, &read), GQ_MALFORMED, "%s", wrong[i].what);
    }
}

Test (frame, only_a_gradient_of_lane_inline_may_be_bf16_and_it_has_two_bytes_an_element)
{
    static const gq_frame_kind kinds[] = {GQ_KIND_INIT, GQ_KIND_WEIGHTS, GQ_KIND_ACK};
    const gq_frame good = support_bf16 (sample (GQ_KIND_GRADIENT));
    gq_frame frame, read;
    size_t size;
    uint8_t *bytes = support_message (&good, payload, &size);
    cr_assert_eq (size, GQ_FRAME_HEADER_BYTES + 2 * COUNT);
    cr_assert_eq (gq_frame_decode (bytes, size, &read), GQ_OK);
    expect_same (&good, &read);
    cr_assert_eq (gq_frame_check_payload (bytes, size), GQ_OK);
    for (uint64_t wrong = 0; wrong <= 4 * COUNT; wrong++) {
        frame = good;
        frame.payload_bytes = wrong;
        gq_frame_encode (&frame, payload, bytes);
        cr_assert_eq (gq_frame_decode_header (bytes, &read),
                      wrong == 2 * COUNT ? GQ_OK : GQ_MALFORMED, "%d bytes", (int)wrong);
    }
    frame = good, frame.count = 0, frame.payload_bytes = 0;
    gq_frame_encode (&frame, payload, bytes);
    cr_assert_eq (gq_frame_decode_header (bytes, &read), GQ_MALFORMED);
    /* Twice this is 2 COUNT again, modulo 2^64. */
    frame = good, frame.count = (UINT64_C (1) << 63) + COUNT;
    gq_frame_encode (&frame, payload, bytes);
    cr_assert_eq (gq_frame_decode_header (bytes, &read), GQ_MALFORMED);
    frame = good, frame.lane = GQ_LANE_SHM;
    gq_frame_encode (&frame, NULL, bytes);
    cr_assert_eq (gq_frame_decode_header (bytes, &read), GQ_MALFORMED, "shared memory is f32");
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        frame = good, frame.kind = (uint16_t)kinds[i];
        gq_frame_encode (&frame, payload, bytes);
        cr_assert_eq (gq_frame_decode_header (bytes, &read), GQ_MALFORMED, "kind %d",
                      (int)kinds[i]);
    }
    free (bytes);
}

Test (frame, what_only_gradients_need_may_be_zero_in_weights)
{
    gq_frame frame = sample (GQ_KIND_WEIGHTS), read;
    frame.epoch = frame.samples = 0;
    frame.sequence = 0;
    size_t size;
    uint8_t *bytes = support_message (&frame, payload, &size);
    cr_assert_eq (gq_frame_decode (bytes, size, &read), GQ_OK);
    free (bytes);
}

Test (frame, an_ack_of_any_other_size_is_malformed)
{
    uint8_t bytes[GQ_FRAME_HEADER_BYTES + 64] = {0};
    gq_frame frame = sample (GQ_KIND_ACK), read;
    for (size_t size = 0; size <= 64; size++) {
        frame.payload_bytes = size;
        gq_frame_encode (&frame, bytes + GQ_FRAME_HEADER_BYTES, bytes);
        cr_assert_eq (gq_frame_decode (bytes, GQ_FRAME_HEADER_BYTES + size, &read),
                      size == GQ_ACK_BYTES ? GQ_OK : GQ_MALFORMED, "%zu bytes", size);
    }
}

Test (frame, a_frame_that_is_refused_leaves_the_result_untouched)
{
    uint8_t bytes[SIZE];
    gq_frame read, before;
    memset (&read, 0x77, sizeof read);
    memset (&before, 0x77, sizeof before);
    make_sound (bytes);
    put (bytes + AT_COUNT, COUNT + 1, 8);
    cr_assert_eq (gq_frame_decode (bytes, SIZE, &read), GQ_CHECKSUM);
    seal (bytes);
    cr_assert_eq (gq_frame_decode (bytes, SIZE, &read), GQ_MALFORMED);
    cr_assert_arr_eq ((uint8_t *)&read, (uint8_t *)&before, sizeof read);
}

/* Fields taken from small, large and right values alike, so that many combinations are sound. */
static uint64_t
any_value (uint64_t *seed, uint64_t right)
{
    static const uint64_t values[] = {0, 1, 2, 4, 40, GQ_ACTORS_MAX, UINT64_MAX};
    const uint64_t pick = support_random (seed) % 16;
    return pick < 7 ? values[pick] : pick < 15 ? right : support_random (seed);
}

Test (frame, whatever_decodes_is_consistent)
{
    enum { ROUNDS = 200000 };
    uint64_t seed = 11;
    size_t sound = 0, halves = 0;
    printf ("seed %llu\n", (unsigned long long)seed);
    for (size_t i = 0; i < ROUNDS; i++) {
        uint8_t bytes[SIZE];
        gq_frame frame;
        make_sound (bytes);
        put (bytes + AT_KIND, any_value (&seed, GQ_KIND_GRADIENT), 2);
        put (bytes + AT_ACTOR, any_value (&seed, 7), 4);
        put (bytes + AT_EPOCH, any_value (&seed, 1), 4);
        put (bytes + AT_ENCODING, any_value (&seed, GQ_ENCODING_F32), 2);
        put (bytes + AT_LANE, any_value (&seed, 0), 2);
        put (bytes + AT_SEQUENCE, any_value (&seed, 1), 8);
        put (bytes + AT_COUNT, any_value (&seed, COUNT), 8);
        put (bytes + AT_SAMPLES, any_value (&seed, 1), 4);
        put (bytes + AT_PAYLOAD_BYTES, any_value (&seed, COUNT * 4), 8);
        /* In bf16 these are the bytes of twice as many elements. */
        if (support_random (&seed) % 4 == 0)
            put (bytes + AT_COUNT, 2 * COUNT, 8);
        put (bytes + AT_HEADER_CRC, gq_crc32c (bytes, AT_HEADER_CRC), 4);
        if (gq_frame_decode (bytes, SIZE, &frame) != GQ_OK)
            continue;
        sound++;
        cr_assert (frame.actor < GQ_ACTORS_MAX && frame.lane == 0);
        cr_assert (frame.kind >= 1 && frame.kind <= 3, "an ack has no room for a vector");
        cr_assert (frame.payload_bytes == COUNT * 4);
        halves += frame.encoding == GQ_ENCODING_BF16;
        if (frame.encoding == GQ_ENCODING_BF16)
            cr_assert (frame.count == 2 * COUNT && frame.kind == GQ_KIND_GRADIENT);
        else
            cr_assert (frame.count == COUNT && frame.encoding == GQ_ENCODING_F32);
        cr_assert (frame.kind != GQ_KIND_GRADIENT ||
                   (frame.epoch > 0 && frame.sequence > 0 && frame.samples > 0));
    }
    cr_assert (sound > 0 && sound < ROUNDS, "%zu of %d sound", sound, (int)ROUNDS);
    cr_assert (halves > 0 && halves < sound, "%zu of them bf16", halves);
}

Test (frame, an_ack_survives_a_round_trip_and_fills_all_of_its_bytes)
{
    const gq_ack ack = {.cumulative = UINT64_C (0x0102030405060708),
                        .beyond = UINT64_C (0x1112131415161718),
                        .refused = UINT64_C (0x2122232425262728),
                        .refused_sequence = UINT64_C (0x3132333435363738),
                        .refused_reason = 0x41424344,
                        .held = 0x51525354};
    uint8_t bytes[GQ_ACK_BYTES], expected[GQ_ACK_BYTES] = {0};
    gq_ack read = {0};
    memset (bytes, 0x5a, sizeof bytes);
    put (expected, ack.cumulative, 8);
    put (expected + 8, ack.beyond, 8);
    put (expected + 16, ack.refused, 8);
    put (expected + 24, ack.refused_sequence, 8);
    put (expected + 32, ack.refused_reason, 4);
    put (expected + 36, ack.held, 4);
    gq_ack_encode (&ack, bytes);
    cr_assert_arr_eq (bytes, expected, GQ_ACK_BYTES);
    gq_ack_decode (bytes, &read);
    cr_assert_eq (read.cumulative, ack.cumulative);
    cr_assert_eq (read.beyond, ack.beyond);
    cr_assert_eq (read.refused, ack.refused);
    cr_assert_eq (read.refused_sequence, ack.refused_sequence);
    cr_assert_eq (read.refused_reason, ack.refused_reason);
    cr_assert_eq (read.held, ack.held);
}

Test (frame, a_topic_is_the_beginning_of_the_frames_it_selects)
{
    gq_frame frame = sample (GQ_KIND_ACK);
    uint8_t topic[GQ_TOPIC_ACTOR_BYTES];
    size_t size;
    uint8_t *bytes = support_message (&frame, payload, &size);
    gq_topic (GQ_KIND_ACK, frame.actor, topic);
    cr_assert_arr_eq (bytes, topic, GQ_TOPIC_ACTOR_BYTES);
    gq_topic (GQ_KIND_ACK, frame.actor + 1, topic);
    cr_assert_arr_eq (bytes, topic, GQ_TOPIC_KIND_BYTES);
    cr_assert_arr_neq (bytes, topic, GQ_TOPIC_ACTOR_BYTES);
    gq_topic (GQ_KIND_WEIGHTS, frame.actor, topic);
    cr_assert_arr_neq (bytes, topic, GQ_TOPIC_KIND_BYTES);
    free (bytes);
}
