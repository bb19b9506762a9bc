/*
 * Core and hop: a gradient whose payload lies in a slot of the broker's is the gradient that it
 * would be as a whole frame, and its slot is free when the core is done with it, and not before.
 */
#include "core_testing.h"

#include "log.h"
#include "memory_disk.h"

TestSuite (core_hop, .timeout = 60);

/* So large that in bf16 it goes by ticket as well. */
enum { COUNT = 2500, SEGMENT_BYTES = 1 << 20 };

/* Where a gradient is until its step is made. */
typedef enum mode { NOWHERE, IN_THE_JOURNAL, IN_SHARED_MEMORY, MODES } mode;

static char directory[64], lane_directory[80];
static gq_memory_disk *memory;
static gq_journal journal;
static gq_hop *broker;

static void
open_broker (void)
{
    char path[PATH_MAX];
    gq_error error = {""};
    gq_hop_identity identity = {.term = TERM, .digest = core.layout.digest, .count = COUNT};
    memcpy (identity.run, core.run, GQ_RUN_ID_BYTES);
    snprintf (path, sizeof path, "%s/" GQ_HOP_NAME, lane_directory);
    cr_assert_str_eq (gq_lanes_hop_path (core.lanes), path);
    cr_assert_eq (gq_hop_open (&broker, path, gq_lanes_board_path (core.lanes), &identity, &error),
                  GQ_OK, "%s", error.text);
}

static void
share (mode which)
{
    const gq_journal_end nothing = {0};
    memory = gq_memory_disk_new ();
    cr_assert_not_null (memory);
    cr_assert_eq (
        gq_journal_start (&journal, &memory->base, core.run, &nothing, SEGMENT_BYTES, NULL), GQ_OK);
    core.journal = which == NOWHERE ? NULL : &journal;
    core.name_gradients = which == IN_SHARED_MEMORY;
    support_directory (directory);
    snprintf (lane_directory, sizeof lane_directory, "%s/lane", directory);
    core.lane_directory = lane_directory;
    gq_core_share (&core);
    cr_assert_not_null (core.lanes);
    cr_assert_eq (core.live != NULL, which == IN_SHARED_MEMORY);
    open_broker ();
}

/* Weights 0 at version 0. */
static void
begin_large (const gq_core_config *config)
{
    static const float zero[COUNT];
    const gq_tensor_shape shape = {.name = "w", .rank = 1, .shape = {COUNT}};
    gq_layout layout;
    gq_error error;
    cr_assert_eq (gq_log_open ("test", "/dev/null", GQ_LOG_ERROR, &error), GQ_OK);
    begin_without_layout (config);
    cr_assert_eq (gq_layout_init (&layout, &shape, 1, NULL), GQ_OK);
    cr_assert_eq (gq_core_set_layout (&core, &layout), GQ_OK);
    gq_core_set_weights (&core, zero, 0, 0);
}

static void
begin_shared (mode which)
{
    begin_large (&plain);
    share (which);
}

static void
end_shared (void)
{
    gq_disk *disk = &memory->base;
    gq_hop_close (&broker);
    end ();
    disk->ops->close (&disk);
    if (access (lane_directory, F_OK) == 0)
        support_remove (lane_directory);
    cr_assert_eq (rmdir (directory), 0);
}

/* Number `sequence` of an actor, as a whole frame; yours to free. */
static uint8_t *
frame_of (uint32_t actor, uint64_t sequence, bool half, size_t *size)
{
    static float values[COUNT];
    static uint16_t halves[COUNT];
    const gradient g = of (actor, sequence, 0);
    gq_frame frame = header_of (&g);
    uint64_t seed = actor * 1000003 + sequence;
    frame.count = COUNT;
    frame.payload_bytes = sizeof values;
    /* Of very different sizes, so that another order gives other bits. */
    for (size_t i = 0; i < COUNT; i++)
        values[i] = ldexpf ((float)(int32_t)support_random (&seed),
                            -20 - (int)(support_random (&seed) % 24));
    if (!half)
        return support_message (&frame, values, size);
    const gq_frame other = support_bf16 (frame);
    gq_bf16_encode (values, halves, COUNT);
    return support_message (&other, halves, size);
}

/* As the broker does it. */
static gq_hop_ticket
put (const uint8_t *bytes, size_t size)
{
    gq_hop_ticket ticket = {.number = 0};
    cr_assert (gq_hop_put (broker, bytes, size, &ticket), "no slot is free");
    return ticket;
}

static gq_outcome
take_ticket (const uint8_t *header, const gq_hop_ticket *ticket, gq_status *reason)
{
    gq_frame read;
    uint8_t message[GQ_HOP_MESSAGE_BYTES];
    memcpy (message, header, GQ_FRAME_HEADER_BYTES);
    gq_hop_write (ticket, message);
    return gq_core_take (&core, message, sizeof message, &read, reason);
}

static gq_outcome
take_put (const uint8_t *bytes, size_t size, gq_status *reason)
{
    const gq_hop_ticket ticket = put (bytes, size);
    return take_ticket (bytes, &ticket, reason);
}

static gq_outcome
take_whole (const uint8_t *bytes, size_t size, gq_status *reason)
{
    gq_frame read;
    return gq_core_take (&core, bytes, size, &read, reason);
}

/* So many slots are free; what was done is not there any more after this. */
static void
expect_free (unsigned expected)
{
    static uint8_t bytes[GQ_FRAME_HEADER_BYTES + COUNT * sizeof (float)];
    gq_hop_ticket tickets[GQ_HOP_SLOTS + 1];
    unsigned count = 0;
    memset (bytes, 0xff, sizeof bytes);
    while (count <= GQ_HOP_SLOTS && gq_hop_put (broker, bytes, sizeof bytes, &tickets[count]))
        count++;
    cr_assert_eq (count, expected, "%u slots are free, not %u", count, expected);
    for (unsigned i = 0; i < count; i++)
        gq_hop_withdraw (broker, &tickets[i]);
}

static void
expect_no_step (void)
{
    const float *weights = gq_buffers_current (core.buffers);
    cr_assert_eq (core.version, 0);
    for (size_t i = 0; i < COUNT; i++)
        cr_assert_eq (weights[i], 0, "[%zu]: %.9g", i, (double)weights[i]);
}

/* ---- applied ---- */

/* Weights after some gradients of two actors. */
static void
weights_after (mode which, bool half, bool by_ticket, uint32_t aggregate, float weights[COUNT])
{
    enum { GRADIENTS = 6 };
    const gq_core_config config = {.aggregate = aggregate, .max_staleness = UINT64_MAX};
    begin_large (&config);
    share (which);
    for (uint64_t i = 0; i < GRADIENTS; i++) {
        size_t size;
        gq_status reason;
        uint8_t *bytes = frame_of (i % 2, i / 2 + 1, half, &size);
        const gq_outcome outcome =
            by_ticket ? take_put (bytes, size, &reason) : take_whole (bytes, size, &reason);
        cr_assert_eq (outcome, (i + 1) % aggregate == 0 ? GQ_OUTCOME_STEPPED : GQ_OUTCOME_HELD);
        if (aggregate == 1)
            cr_assert_eq (settled (i % 2), i / 2 + 1);
        expect_free (GQ_HOP_SLOTS);
        free (bytes);
    }
    cr_assert_eq (core.version, GRADIENTS / aggregate);
    cr_assert_eq (core.applied, GRADIENTS);
    cr_assert_eq (core.unsound, 0);
    memcpy (weights, gq_buffers_current (core.buffers), COUNT * sizeof *weights);
    end_shared ();
}

Test (core_hop, a_gradient_by_ticket_has_the_bits_of_a_whole_one)
{
    static float expected[COUNT], weights[COUNT];
    for (int half = 0; half < 2; half++)
        for (uint32_t aggregate = 1; aggregate <= 3; aggregate += 2) {
            weights_after (NOWHERE, half, false, aggregate, expected);
            cr_assert_neq (expected[COUNT - 1], 0);
            for (mode which = NOWHERE; which < MODES; which++) {
                weights_after (which, half, true, aggregate, weights);
                cr_assert (same_bits (weights, expected, COUNT), "mode %d, bf16 %d", which, half);
            }
        }
}

/* ---- ignored ---- */

Test (core_hop, a_ticket_of_a_slot_that_was_written_anew_is_ignored_and_its_gradient_comes_again)
{
    for (mode which = NOWHERE; which < MODES; which++) {
        size_t size, other_size;
        gq_status reason;
        begin_shared (which);
        uint8_t *bytes = frame_of (1, 1, false, &size);
        uint8_t *other = frame_of (2, 1, false, &other_size);
        const gq_hop_ticket stale = put (bytes, size);
        gq_hop_withdraw (broker, &stale);
        const gq_hop_ticket fresh = put (other, other_size);
        cr_assert_eq (fresh.slot, stale.slot);
        cr_assert_eq (take_ticket (bytes, &stale, &reason), GQ_OUTCOME_IGNORED);
        cr_assert_eq (reason, GQ_NOTFOUND);
        cr_assert_eq (core.malformed, 1);
        cr_assert_eq (settled (1), 0);
        cr_assert_eq (settled (2), 0);
        expect_no_step ();
        expect_free (GQ_HOP_SLOTS - 1);
        cr_assert_eq (take_whole (bytes, size, &reason), GQ_OUTCOME_STEPPED);
        cr_assert_eq (take_ticket (bytes, &stale, &reason), GQ_OUTCOME_IGNORED);
        cr_assert_eq (take_whole (bytes, size, &reason), GQ_OUTCOME_IGNORED);
        cr_assert_eq (core.version, 1);
        cr_assert_eq (settled (1), 1);
        cr_assert_eq (take_ticket (other, &fresh, &reason), GQ_OUTCOME_STEPPED);
        cr_assert_eq (settled (2), 1);
        expect_free (GQ_HOP_SLOTS);
        free (bytes);
        free (other);
        end_shared ();
    }
}

Test (core_hop, a_duplicate_by_ticket_is_ignored_and_its_slot_is_free)
{
    for (mode which = NOWHERE; which < MODES; which++) {
        size_t size;
        gq_status reason;
        begin_shared (which);
        uint8_t *bytes = frame_of (1, 1, false, &size);
        cr_assert_eq (take_put (bytes, size, &reason), GQ_OUTCOME_STEPPED);
        for (uint64_t i = 1; i <= 2 * GQ_HOP_SLOTS; i++) {
            cr_assert_eq (take_put (bytes, size, &reason), GQ_OUTCOME_IGNORED);
            cr_assert_eq (reason, GQ_AGAIN);
            cr_assert_eq (core.ledger.duplicates, i);
        }
        cr_assert_eq (core.version, 1);
        expect_free (GQ_HOP_SLOTS);
        free (bytes);
        end_shared ();
    }
}

/* Whatever lies in a slot: it is settled with its actor or not, but the slot comes back. */
Test (core_hop, what_is_not_ours_or_no_gradient_leaves_its_slot_free)
{
    static const uint8_t nothing[GQ_FRAME_HEADER_BYTES + COUNT * sizeof (float)];
    size_t size;
    gq_status reason;
    gq_frame frame;
    begin_shared (NOWHERE);
    uint8_t *bytes = frame_of (1, 1, false, &size);
    const gq_hop_ticket empty = put (nothing, sizeof nothing);
    cr_assert_eq (take_ticket (bytes, &empty, &reason), GQ_OUTCOME_IGNORED);
    cr_assert_eq (reason, GQ_NOTFOUND);
    cr_assert_eq (gq_frame_decode_header (bytes, &frame), GQ_OK);
    frame.run[0]++;
    gq_frame_encode (&frame, bytes + GQ_FRAME_HEADER_BYTES, bytes);
    cr_assert_eq (take_put (bytes, size, &reason), GQ_OUTCOME_IGNORED);
    cr_assert_eq (reason, GQ_RUN);
    frame.run[0]--;
    frame.lane = GQ_LANE_SHM;
    uint8_t *message = frame_of (1, 1, false, &size);
    gq_frame_encode (&frame, NULL, bytes);
    const gq_hop_ticket shared = put (bytes, size);
    cr_assert_eq (take_ticket (message, &shared, &reason), GQ_OUTCOME_IGNORED);
    cr_assert_eq (reason, GQ_NOTFOUND);
    cr_assert_eq (core.malformed, 3);
    expect_no_step ();
    expect_free (GQ_HOP_SLOTS);
    free (bytes);
    free (message);
    end_shared ();
}

Test (core_hop, without_shared_memory_a_ticket_is_ignored)
{
    const gq_hop_ticket ticket = {.number = 1};
    size_t size;
    gq_status reason;
    begin_large (&plain);
    uint8_t *bytes = frame_of (1, 1, false, &size);
    cr_assert_eq (take_ticket (bytes, &ticket, &reason), GQ_OUTCOME_IGNORED);
    cr_assert_eq (reason, GQ_NOTFOUND);
    cr_assert_eq (core.malformed, 1);
    expect_no_step ();
    cr_assert_eq (take_whole (bytes, size, &reason), GQ_OUTCOME_STEPPED);
    cr_assert_eq (core.version, 1);
    free (bytes);
    end ();
}

/* ---- refused ---- */

static void
expect_refused_put (uint64_t sequence, const uint8_t *bytes, size_t size, gq_status expected)
{
    gq_status reason;
    cr_assert_eq (take_put (bytes, size, &reason), GQ_OUTCOME_REFUSED);
    cr_assert_eq (reason, expected, "%s", gq_status_name (reason));
    const gq_ack ack = gq_ledger_ack (&core.ledger, 1);
    cr_assert_eq (ack.cumulative, sequence, "settled, or its actor would wait for ever");
    cr_assert_eq (ack.refused_sequence, sequence);
    cr_assert_eq (ack.refused_reason, (uint32_t)expected);
    expect_no_step ();
    expect_free (GQ_HOP_SLOTS);
}

Test (core_hop, a_payload_that_is_damaged_or_not_finite_is_refused_and_its_slot_is_free)
{
    for (mode which = NOWHERE; which < MODES; which++)
        for (int half = 0; half < 2; half++) {
            static const uint8_t nan[4] = {0, 0, 0xc0, 0x7f};
            uint64_t sequence = 0;
            begin_shared (which);
            for (size_t i = 0; i < 3; i++) {
                size_t size;
                uint8_t *bytes = frame_of (1, ++sequence, half, &size);
                const size_t payload = size - GQ_FRAME_HEADER_BYTES;
                const size_t at[] = {0, payload / 8 * 4, payload - 4};
                bytes[GQ_FRAME_HEADER_BYTES + at[i]] ^= 4;
                expect_refused_put (sequence, bytes, size, GQ_CHECKSUM);
                free (bytes);
                bytes = frame_of (1, ++sequence, half, &size);
                gq_frame frame;
                cr_assert_eq (gq_frame_decode (bytes, size, &frame), GQ_OK);
                memcpy (bytes + GQ_FRAME_HEADER_BYTES + at[i], nan, sizeof nan);
                gq_frame_encode (&frame, bytes + GQ_FRAME_HEADER_BYTES, bytes);
                expect_refused_put (sequence, bytes, size, GQ_NONFINITE);
                free (bytes);
            }
            end_shared ();
        }
}

Test (core_hop, a_gradient_of_another_layout_is_refused_and_its_slot_is_free)
{
    for (mode which = NOWHERE; which < MODES; which++) {
        size_t size;
        gq_frame frame;
        begin_shared (which);
        uint8_t *bytes = frame_of (1, 1, false, &size);
        cr_assert_eq (gq_frame_decode (bytes, size, &frame), GQ_OK);
        frame.digest++;
        gq_frame_encode (&frame, bytes + GQ_FRAME_HEADER_BYTES, bytes);
        expect_refused_put (1, bytes, size, GQ_LAYOUT);
        frame.digest--;
        frame.sequence++;
        frame.count--;
        frame.payload_bytes -= sizeof (float);
        gq_frame_encode (&frame, bytes + GQ_FRAME_HEADER_BYTES, bytes);
        expect_refused_put (2, bytes, size, GQ_COUNT);
        free (bytes);
        end_shared ();
    }
}

/* ---- blocked ---- */

/* A gradient by ticket while the journal has no room, which is *room_bytes afterwards. */
static uint8_t *
begin_blocked (mode which, size_t *size, gq_hop_ticket *ticket, uint64_t *room_bytes)
{
    gq_status reason;
    begin_shared (which);
    uint8_t *bytes = frame_of (1, 1, false, size);
    *room_bytes = memory->room_bytes;
    memory->room_bytes = memory->written_bytes + 8;
    *ticket = put (bytes, *size);
    for (int i = 0; i < 2; i++) {
        cr_assert_eq (take_ticket (bytes, ticket, &reason), GQ_OUTCOME_BLOCKED);
        cr_assert_eq (reason, GQ_FULL);
        expect_free (GQ_HOP_SLOTS - 1);
    }
    return bytes;
}

/* It is tried again with the same message. */
Test (core_hop, while_the_journal_is_full_the_slot_is_kept)
{
    for (mode which = IN_THE_JOURNAL; which < MODES; which++) {
        size_t size;
        uint64_t room_before;
        gq_hop_ticket ticket;
        gq_status reason;
        uint8_t *bytes = begin_blocked (which, &size, &ticket, &room_before);
        expect_no_step ();
        memory->room_bytes = room_before;
        cr_assert_eq (take_ticket (bytes, &ticket, &reason), GQ_OUTCOME_STEPPED);
        cr_assert_eq (core.version, 1);
        expect_free (GQ_HOP_SLOTS);
        free (bytes);
        end_shared ();
    }
}

/* It is tried again with the same message, whose slot is nobody's any more. */
Test (core_hop, what_is_blocked_is_lost_with_its_broker_and_comes_again)
{
    for (mode which = IN_THE_JOURNAL; which < MODES; which++) {
        size_t size;
        uint64_t room_before;
        gq_hop_ticket ticket;
        gq_status reason;
        uint8_t *bytes = begin_blocked (which, &size, &ticket, &room_before);
        gq_hop_close (&broker);
        open_broker ();
        expect_free (GQ_HOP_SLOTS - 1);
        memory->room_bytes = room_before;
        cr_assert_eq (take_ticket (bytes, &ticket, &reason), GQ_OUTCOME_IGNORED);
        cr_assert_eq (reason, GQ_NOTFOUND);
        expect_no_step ();
        expect_free (GQ_HOP_SLOTS);
        cr_assert_eq (take_whole (bytes, size, &reason), GQ_OUTCOME_STEPPED);
        cr_assert_eq (core.version, 1);
        free (bytes);
        end_shared ();
    }
}
