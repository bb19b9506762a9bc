/*
 * Hop: the message that holds a ticket, the slots that it is for, and the words by which broker and
 * optimizer keep out of each other's way.  Both sides in one process: each has opened the file by
 * itself, so its lock is its own.
 */
#include "support.h"

#include "board.h"
#include "hop.h"
#include "shm.h"

TestSuite (hop, .timeout = 60);

/* A vector of two pages, but for some bytes. */
enum { COUNT = 2000, VECTOR_BYTES = COUNT * 4, SLOT_BYTES = 2 * GQ_SHM_PAGE };

static const gq_hop_identity ours = {.run = {1, 2}, .term = 4, .digest = 5, .count = COUNT};

static char directory[64], path[PATH_MAX], board_path[PATH_MAX];
static gq_board *board;
static gq_hop *optimizer, *broker;
static uint8_t bytes[GQ_FRAME_HEADER_BYTES + SLOT_BYTES + 1];

static void
begin (void)
{
    const gq_board_config config = {.run = {1, 2}, .term = 4, .digest = 5, .count = COUNT};
    gq_error error = {""};
    support_directory (directory);
    snprintf (path, sizeof path, "%s/broker", directory);
    snprintf (board_path, sizeof board_path, "%s/board", directory);
    cr_assert_eq (gq_board_create (&board, board_path, &config, &error), GQ_OK, "%s", error.text);
    cr_assert_eq (gq_hop_create (&optimizer, path, &ours, &error), GQ_OK, "%s", error.text);
    cr_assert_eq (gq_hop_open (&broker, path, board_path, &ours, &error), GQ_OK, "%s", error.text);
}

static void
end (void)
{
    gq_hop_close (&broker);
    gq_hop_close (&optimizer);
    gq_board_close (&board);
    support_remove (directory);
}

/* The broker has died, and another one comes. */
static void
change_broker (void)
{
    gq_error error = {""};
    gq_hop_close (&broker);
    cr_assert_eq (gq_hop_open (&broker, path, board_path, &ours, &error), GQ_OK, "%s", error.text);
}

/* All `size` bytes are `value`. */
static bool
put (uint8_t value, size_t size, gq_hop_ticket *ticket)
{
    memset (bytes, value, sizeof bytes);
    return gq_hop_put (broker, bytes, size, ticket);
}

static gq_hop_ticket
must_put (uint8_t value)
{
    gq_hop_ticket ticket = {.number = 0};
    cr_assert (put (value, GQ_FRAME_HEADER_BYTES + VECTOR_BYTES, &ticket));
    cr_assert_lt (ticket.slot, GQ_HOP_SLOTS);
    cr_assert_neq (ticket.number, 0);
    return ticket;
}

static void
expect_all (const uint8_t *taken, uint8_t value, size_t size)
{
    cr_assert_not_null (taken);
    for (size_t i = 0; i < size; i++)
        cr_assert_eq (taken[i], value, "[%zu]: %u, not %u", i, taken[i], value);
}

static void
expect_taken (const gq_hop_ticket *ticket, uint8_t value)
{
    expect_all (gq_hop_take (optimizer, ticket), value, GQ_FRAME_HEADER_BYTES + VECTOR_BYTES);
}

/* As many as this can be put now, and no more; they are withdrawn again. */
static void
expect_free (unsigned expected)
{
    gq_hop_ticket tickets[GQ_HOP_SLOTS + 1];
    unsigned count = 0;
    while (count <= GQ_HOP_SLOTS && put (0xee, GQ_FRAME_HEADER_BYTES, &tickets[count]))
        count++;
    cr_assert_eq (count, expected, "%u slots are free, not %u", count, expected);
    for (unsigned i = 0; i < count; i++)
        gq_hop_withdraw (broker, &tickets[i]);
}

/* ---- the message ---- */

/* What goes through the socket for this frame, whose payload is zero. */
static void
message_of (const gq_frame *frame, const gq_hop_ticket *ticket,
            uint8_t message[GQ_HOP_MESSAGE_BYTES])
{
    gq_frame_encode_summed (frame, 7, message);
    gq_hop_write (ticket, message);
}

static bool
is_read (const void *message, size_t size)
{
    gq_frame frame;
    gq_hop_ticket ticket;
    return gq_hop_read (message, size, &frame, &ticket);
}

Test (hop, a_message_says_what_was_written_and_is_no_frame)
{
    const gq_hop_ticket written = {.number = UINT64_C (0x123456789abcdef0), .slot = 2};
    gq_frame frame = support_frame (GQ_KIND_GRADIENT, 5, COUNT), read;
    gq_hop_ticket ticket;
    uint8_t message[GQ_HOP_MESSAGE_BYTES];
    frame.actor = 9;
    frame.sequence = 77;
    memset (message, 0xff, sizeof message);
    message_of (&frame, &written, message);
    cr_assert_eq (sizeof message, 144);
    cr_assert (gq_hop_read (message, sizeof message, &read, &ticket));
    cr_assert_eq (ticket.number, written.number);
    cr_assert_eq (ticket.slot, written.slot);
    cr_assert_eq (read.actor, 9);
    cr_assert_eq (read.sequence, 77);
    cr_assert_eq (read.payload_bytes, VECTOR_BYTES);
    cr_assert_eq (gq_frame_payload_crc (message), 7);
    for (size_t i = GQ_HOP_MESSAGE_BYTES - 4; i < GQ_HOP_MESSAGE_BYTES; i++)
        cr_assert_eq (message[i], 0, "reserved");
    cr_assert_eq (gq_frame_decode (message, sizeof message, &read), GQ_MALFORMED);
}

Test (hop, what_has_another_size_is_no_message_and_is_not_read)
{
    const gq_hop_ticket ticket = {.number = 1};
    const gq_frame frame = support_frame (GQ_KIND_GRADIENT, 5, COUNT);
    const size_t size_max = GQ_FRAME_HEADER_BYTES + VECTOR_BYTES;
    for (size_t size = 0; size <= size_max; size += size < 300 ? 1 : 700) {
        uint8_t message[GQ_HOP_MESSAGE_BYTES];
        uint8_t *guarded = support_guarded_end (size_max) - size;
        message_of (&frame, &ticket, message);
        memcpy (guarded, message, size < sizeof message ? size : sizeof message);
        cr_expect_eq (is_read (guarded, size), size == GQ_HOP_MESSAGE_BYTES, "%zu bytes", size);
    }
}

Test (hop, small_vectors_and_those_of_lane_shm_come_without_a_ticket)
{
    const gq_hop_ticket ticket = {.number = 1};
    uint8_t message[GQ_HOP_MESSAGE_BYTES];
    const struct {
        gq_frame frame;
        bool read;
    } cases[] = {
        {support_frame (GQ_KIND_GRADIENT, 5, GQ_HOP_PAYLOAD_MIN / 4), true},
        {support_frame (GQ_KIND_GRADIENT, 5, GQ_HOP_PAYLOAD_MIN / 4 - 1), false},
        {support_bf16 (support_frame (GQ_KIND_GRADIENT, 5, GQ_HOP_PAYLOAD_MIN / 2)), true},
        {support_bf16 (support_frame (GQ_KIND_GRADIENT, 5, GQ_HOP_PAYLOAD_MIN / 2 - 1)), false},
        {support_frame (GQ_KIND_WEIGHTS, 5, COUNT), true},
        {support_frame (GQ_KIND_ACK, 5, 0), false}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        gq_frame frame = cases[i].frame;
        if (frame.kind != GQ_KIND_GRADIENT)
            frame.sequence = frame.samples = frame.epoch = 0;
        if (frame.kind == GQ_KIND_ACK)
            frame.epoch = 1;
        message_of (&frame, &ticket, message);
        cr_expect_eq (is_read (message, sizeof message), cases[i].read, "%zu", i);
    }
    gq_frame shared = support_frame (GQ_KIND_GRADIENT, 5, COUNT);
    shared.lane = GQ_LANE_SHM;
    gq_frame_encode (&shared, NULL, message);
    gq_frame decoded;
    cr_assert_eq (gq_frame_decode_header (message, &decoded), GQ_OK, "it is sound");
    gq_hop_write (&ticket, message);
    cr_assert (!is_read (message, sizeof message));
}

Test (hop, no_damage_of_a_header_is_passed_over)
{
    const gq_hop_ticket ticket = {.number = 1};
    const gq_frame frame = support_frame (GQ_KIND_GRADIENT, 5, COUNT);
    uint8_t message[GQ_HOP_MESSAGE_BYTES];
    message_of (&frame, &ticket, message);
    for (size_t bit = 0; bit < 8 * GQ_FRAME_HEADER_BYTES; bit++) {
        message[bit / 8] ^= (uint8_t)(1u << bit % 8);
        cr_expect (!is_read (message, sizeof message), "bit %zu", bit);
        message[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    cr_assert (is_read (message, sizeof message));
}

/* ---- slots ---- */

Test (hop, what_was_put_can_be_taken_until_it_is_done, .init = begin, .fini = end)
{
    for (unsigned i = 0; i < 3 * GQ_HOP_SLOTS; i++) {
        const gq_hop_ticket ticket = must_put ((uint8_t)(i + 1));
        expect_taken (&ticket, (uint8_t)(i + 1));
        expect_taken (&ticket, (uint8_t)(i + 1));
        expect_free (GQ_HOP_SLOTS - 1);
        gq_hop_done (optimizer, &ticket);
        expect_free (GQ_HOP_SLOTS);
    }
}

Test (hop, a_vector_begins_on_a_page_and_slots_do_not_overlap, .init = begin, .fini = end)
{
    gq_hop_ticket tickets[GQ_HOP_SLOTS];
    const size_t size = GQ_FRAME_HEADER_BYTES + SLOT_BYTES;
    for (uint8_t i = 0; i < GQ_HOP_SLOTS; i++)
        cr_assert (put ((uint8_t)(i + 1), size, &tickets[i]));
    for (uint8_t i = 0; i < GQ_HOP_SLOTS; i++) {
        const uint8_t *taken = gq_hop_take (optimizer, &tickets[i]);
        expect_all (taken, (uint8_t)(i + 1), size);
        cr_assert_eq ((uintptr_t)(taken + GQ_FRAME_HEADER_BYTES) % GQ_SHM_PAGE, 0);
    }
}

Test (hop, while_all_slots_are_on_the_way_nothing_is_put, .init = begin, .fini = end)
{
    gq_hop_ticket tickets[GQ_HOP_SLOTS], more;
    for (uint8_t i = 0; i < GQ_HOP_SLOTS; i++)
        tickets[i] = must_put ((uint8_t)(i + 1));
    cr_assert (!put (99, GQ_FRAME_HEADER_BYTES, &more));
    expect_taken (&tickets[1], 2);
    cr_assert (!put (99, GQ_FRAME_HEADER_BYTES, &more), "taken is not done");
    gq_hop_done (optimizer, &tickets[1]);
    more = must_put (99);
    cr_assert_eq (more.slot, tickets[1].slot);
    cr_assert (!put (98, GQ_FRAME_HEADER_BYTES, &tickets[1]));
    expect_taken (&tickets[0], 1);
    expect_taken (&tickets[2], 3);
    expect_taken (&more, 99);
}

Test (hop, what_could_not_be_sent_is_withdrawn, .init = begin, .fini = end)
{
    for (unsigned i = 0; i < 2 * GQ_HOP_SLOTS; i++) {
        const gq_hop_ticket ticket = must_put (5);
        gq_hop_withdraw (broker, &ticket);
        cr_assert_null (gq_hop_take (optimizer, &ticket));
    }
    expect_free (GQ_HOP_SLOTS);
}

Test (hop, a_ticket_of_a_slot_that_was_written_anew_is_worth_nothing, .init = begin, .fini = end)
{
    const gq_hop_ticket stale = must_put (1);
    gq_hop_withdraw (broker, &stale);
    const gq_hop_ticket fresh = must_put (2);
    cr_assert_eq (fresh.slot, stale.slot);
    cr_assert_null (gq_hop_take (optimizer, &stale));
    gq_hop_done (optimizer, &stale);
    expect_free (GQ_HOP_SLOTS - 1);
    expect_taken (&fresh, 2);
    gq_hop_done (optimizer, &stale);
    expect_free (GQ_HOP_SLOTS - 1);
    expect_taken (&fresh, 2);
    gq_hop_done (optimizer, &fresh);
    gq_hop_done (optimizer, &fresh);
    gq_hop_done (optimizer, &stale);
    expect_free (GQ_HOP_SLOTS);
}

Test (hop, tickets_that_nobody_gave_are_worth_nothing, .init = begin, .fini = end)
{
    const gq_hop_ticket sound = must_put (1);
    const gq_hop_ticket wrong[] = {{.number = sound.number, .slot = GQ_HOP_SLOTS},
                                   {.number = sound.number, .slot = UINT32_MAX},
                                   {.number = sound.number, .slot = sound.slot + 1},
                                   {.number = sound.number + 1, .slot = sound.slot},
                                   {.number = 0, .slot = GQ_HOP_SLOTS},
                                   {.number = 0, .slot = sound.slot + 1}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        cr_expect_null (gq_hop_take (optimizer, &wrong[i]), "%zu", i);
        gq_hop_done (optimizer, &wrong[i]);
        expect_free (GQ_HOP_SLOTS - 1);
    }
    expect_taken (&sound, 1);
    gq_hop_done (optimizer, &sound);
    expect_free (GQ_HOP_SLOTS);
}

/* 0 says that nothing is taken, or held: it is no gradient's number. */
Test (hop, number_0_takes_nothing_and_ends_nothing, .init = begin, .fini = end)
{
    for (uint32_t i = 0; i < GQ_HOP_SLOTS; i++) {
        const gq_hop_ticket none = {.number = 0, .slot = i};
        cr_assert_null (gq_hop_take (optimizer, &none), "an empty slot");
        const gq_hop_ticket ticket = must_put (1);
        expect_taken (&ticket, 1);
        gq_hop_done (optimizer, &ticket);
        const gq_hop_ticket same = {.number = 0, .slot = ticket.slot};
        gq_hop_done (optimizer, &same);
        expect_free (GQ_HOP_SLOTS);
    }
}

Test (hop, a_frame_that_is_too_large_for_a_slot_is_not_put, .init = begin, .fini = end)
{
    gq_hop_ticket ticket;
    cr_assert (!put (1, GQ_FRAME_HEADER_BYTES + SLOT_BYTES + 1, &ticket));
    cr_assert (!gq_hop_put (broker, bytes, SIZE_MAX, &ticket));
    expect_free (GQ_HOP_SLOTS);
    cr_assert (put (1, GQ_FRAME_HEADER_BYTES + SLOT_BYTES, &ticket));
}

/* ---- lives ---- */

Test (hop, one_broker_has_it_at_a_time, .init = begin, .fini = end)
{
    gq_hop *second = optimizer;
    gq_error error = {""};
    const gq_hop_ticket ticket = must_put (1);
    cr_assert_eq (gq_hop_open (&second, path, board_path, &ours, &error), GQ_AGAIN);
    cr_assert_not_null (strstr (error.text, path), "%s", error.text);
    cr_assert_null (second);
    expect_taken (&ticket, 1);
    gq_hop_done (optimizer, &ticket);
    gq_hop_close (&broker);
    cr_assert_null (broker);
    cr_assert_eq (gq_hop_open (&second, path, board_path, &ours, &error), GQ_OK, "%s", error.text);
    gq_hop_close (&second);
}

/* The promise that a step and the journal rest on. */
Test (hop, no_broker_writes_what_the_optimizer_has_taken, .init = begin, .fini = end)
{
    gq_hop_ticket more;
    const gq_hop_ticket waits = must_put (6), ticket = must_put (7);
    const uint8_t *taken = gq_hop_take (optimizer, &ticket);
    for (int brokers = 0; brokers < 3; brokers++) {
        change_broker ();
        cr_assert_null (gq_hop_take (optimizer, &waits), "it was on its way and is lost");
        for (uint8_t i = 0; i < GQ_HOP_SLOTS - 1; i++) {
            more = must_put ((uint8_t)(100 + i));
            cr_assert_neq (more.slot, ticket.slot);
        }
        cr_assert (!put (200, GQ_FRAME_HEADER_BYTES + VECTOR_BYTES, &more));
        cr_assert (!put (200, GQ_FRAME_HEADER_BYTES + VECTOR_BYTES, &more), "nor later");
        expect_all (taken, 7, GQ_FRAME_HEADER_BYTES + VECTOR_BYTES);
    }
    gq_hop_done (optimizer, &ticket);
    more = must_put (201);
    cr_assert_eq (more.slot, ticket.slot);
    cr_assert (!put (202, GQ_FRAME_HEADER_BYTES + VECTOR_BYTES, &more));
}

/* Taken again after its broker has gone, it might be written at any time: so it is not. */
Test (hop, what_a_broker_had_on_the_way_is_lost_with_it, .init = begin, .fini = end)
{
    const gq_hop_ticket ticket = must_put (7);
    change_broker ();
    cr_assert_null (gq_hop_take (optimizer, &ticket));
    gq_hop_done (optimizer, &ticket);
    expect_free (GQ_HOP_SLOTS);
}

Test (hop, numbers_never_come_again_whatever_broker_gives_them, .init = begin, .fini = end)
{
    uint64_t last = 0;
    for (int brokers = 0; brokers < 5; brokers++) {
        for (int i = 0; i < 4; i++) {
            const gq_hop_ticket ticket = must_put (1);
            cr_assert_gt (ticket.number, last);
            last = ticket.number;
            if (i == 3)
                continue; /* stays on the way */
            expect_taken (&ticket, 1);
            gq_hop_done (optimizer, &ticket);
        }
        change_broker ();
    }
}

Test (hop, the_optimizer_sees_whether_a_broker_is_there, .init = begin, .fini = end)
{
    cr_assert (gq_hop_attached (optimizer));
    gq_hop_close (&broker);
    cr_assert (!gq_hop_attached (optimizer));
    change_broker ();
    cr_assert (gq_hop_attached (optimizer));
    gq_hop_close (&optimizer);
    cr_assert_eq (gq_hop_create (&optimizer, path, &ours, NULL), GQ_OK);
    cr_assert (!gq_hop_attached (optimizer), "it has the file of the life before");
    gq_hop *looks;
    cr_assert_eq (gq_hop_look (&looks, path, &ours, NULL), GQ_OK);
    cr_assert (!gq_hop_attached (optimizer), "who looks is no broker");
    gq_hop_close (&looks);
}

/* The broker before the newer file was made keeps its own: neither disturbs the other. */
Test (hop, a_new_life_has_a_file_of_its_own, .init = begin, .fini = end)
{
    gq_hop *dead = optimizer, *earlier = broker;
    const gq_hop_ticket ticket = must_put (1);
    cr_assert_eq (gq_hop_create (&optimizer, path, &ours, NULL), GQ_OK);
    cr_assert_null (gq_hop_take (optimizer, &ticket));
    broker = NULL;
    change_broker ();
    const gq_hop_ticket other = must_put (2);
    expect_taken (&other, 2);
    expect_all (gq_hop_take (dead, &ticket), 1, GQ_FRAME_HEADER_BYTES + VECTOR_BYTES);
    gq_hop_remove (dead);
    cr_assert_eq (access (path, F_OK), 0, "the name is not its file's any more");
    gq_hop_close (&dead);
    gq_hop_close (&earlier);
    gq_hop_remove (optimizer);
    cr_assert_neq (access (path, F_OK), 0);
}

/* ---- files that are not what they should be ---- */

static gq_status
open_as (const gq_hop_identity *identity)
{
    gq_hop *hop = optimizer;
    gq_error error = {""};
    gq_hop_close (&broker);
    const gq_status status = gq_hop_open (&hop, path, board_path, identity, &error);
    cr_assert ((status == GQ_OK) == (hop != NULL));
    cr_assert (status == GQ_OK || error.text[0] != '\0');
    gq_hop_close (&hop);
    return status;
}

static gq_status
look_as (const gq_hop_identity *identity)
{
    gq_hop *hop = optimizer;
    const gq_status status = gq_hop_look (&hop, path, identity, NULL);
    cr_assert ((status == GQ_OK) == (hop != NULL));
    gq_hop_close (&hop);
    return status;
}

Test (hop, of_another_run_term_or_model_is_not_taken, .init = begin, .fini = end)
{
    gq_hop_identity wrong[] = {ours, ours, ours, ours, ours};
    wrong[0].term++;
    wrong[1].run[3]++;
    wrong[2].digest++;
    wrong[3].count--;    /* of as many pages */
    wrong[4].count *= 2; /* more than there are */
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        cr_expect_eq (open_as (&wrong[i]), GQ_MALFORMED, "%zu", i);
        cr_expect_eq (look_as (&wrong[i]), i == 0 ? GQ_OK : GQ_MALFORMED, "%zu", i);
    }
    cr_assert_eq (open_as (&ours), GQ_OK);
}

Test (hop, one_that_is_not_there_or_was_cut_short_is_not_taken, .init = begin, .fini = end)
{
    uint8_t *whole;
    const size_t size = support_read (path, &whole);
    cr_assert_eq (size, (1 + 3 * GQ_HOP_SLOTS) * GQ_SHM_PAGE);
    gq_hop_close (&broker);
    for (size_t cut = 0; cut < size; cut += cut < 64 ? 1 : 4031) {
        support_write (path, whole, cut);
        cr_expect_eq (open_as (&ours), GQ_MALFORMED, "%zu bytes", cut);
        cr_expect_eq (look_as (&ours), GQ_MALFORMED, "%zu bytes", cut);
    }
    memset (whole, 0, GQ_SHM_PAGE);
    support_write (path, whole, size);
    cr_assert_eq (open_as (&ours), GQ_MALFORMED, "only zeros");
    free (whole);
    cr_assert_eq (unlink (path), 0);
    cr_assert_eq (open_as (&ours), GQ_NOTFOUND);
    cr_assert_eq (look_as (&ours), GQ_NOTFOUND);
}

Test (hop, without_the_board_there_is_none, .init = begin, .fini = end)
{
    gq_hop *second = optimizer;
    cr_assert_eq (unlink (board_path), 0);
    cr_assert_eq (open_as (&ours), GQ_NOTFOUND);
    cr_assert (!gq_hop_attached (optimizer), "what was not opened is not locked");
    support_write (board_path, "no board", 8);
    cr_assert_eq (open_as (&ours), GQ_MALFORMED);
    cr_assert_eq (gq_hop_create (&second, "/nowhere/at/all", &ours, NULL), GQ_IO);
    cr_assert_null (second);
}

/* ---- recovery ---- */

Test (hop, who_looks_sees_what_was_taken_and_nothing_else, .init = begin, .fini = end)
{
    gq_hop *looks;
    gq_hop_identity any = ours;
    const gq_hop_ticket first = must_put (1), second = must_put (2), third = must_put (3);
    cr_assert (first.slot != second.slot && second.slot != third.slot && first.slot != third.slot);
    expect_taken (&second, 2);
    expect_taken (&third, 3);
    gq_hop_done (optimizer, &third);
    any.term = 0;
    gq_hop_close (&optimizer); /* killed */
    cr_assert_eq (gq_hop_look (&looks, path, &any, NULL), GQ_OK);
    cr_assert_null (gq_hop_taken (looks, first.slot), "its message may be on its way");
    cr_assert_null (gq_hop_taken (looks, third.slot));
    expect_all (gq_hop_taken (looks, second.slot), 2, GQ_FRAME_HEADER_BYTES + VECTOR_BYTES);
    /* The broker lives on. */
    gq_hop_ticket more;
    cr_assert (put (9, GQ_FRAME_HEADER_BYTES, &more));
    cr_assert (!put (9, GQ_FRAME_HEADER_BYTES, &more));
    expect_all (gq_hop_taken (looks, second.slot), 2, GQ_FRAME_HEADER_BYTES + VECTOR_BYTES);
    gq_hop_close (&looks);
}

/* ---- weights ---- */

/* As the optimizer shows them: with a checksum that means nothing. */
static void
show (uint32_t block, const gq_frame *frame, uint64_t version)
{
    float *vector = (float *)(void *)(gq_board_block (board, block) + GQ_FRAME_HEADER_BYTES);
    for (size_t i = 0; i < COUNT; i++)
        vector[i] = (float)i + (float)version;
    gq_frame_encode_summed (frame, 0xbad, gq_board_block (board, block));
    gq_board_show (board, block, version);
}

static gq_frame
weights_of (uint64_t version)
{
    gq_frame frame = support_frame (GQ_KIND_WEIGHTS, 5, COUNT);
    frame.epoch = 0;
    frame.sequence = frame.samples = 0;
    frame.term = 4;
    frame.version = version;
    frame.applied = 3 * version;
    return frame;
}

Test (hop, weights_that_are_shown_are_a_whole_frame, .init = begin, .fini = end)
{
    const size_t size = gq_hop_weights_bytes (broker);
    uint8_t *frame = support_guarded_end (size) - size;
    cr_assert_eq (size, GQ_FRAME_HEADER_BYTES + VECTOR_BYTES);
    cr_assert_eq (gq_hop_weights (broker, frame), GQ_NOTFOUND);
    for (uint32_t block = 0; block < GQ_BOARD_BLOCKS; block++) {
        gq_frame read;
        const gq_frame shown = weights_of (1000 + block);
        show (block, &shown, shown.version);
        cr_assert_eq (gq_hop_weights (broker, frame), GQ_OK);
        cr_assert_eq (gq_frame_decode (frame, size, &read), GQ_OK);
        cr_assert_eq (gq_frame_check_payload (frame, size), GQ_OK);
        cr_assert (read.version == shown.version && read.applied == shown.applied &&
                   read.term == 4 && read.kind == GQ_KIND_WEIGHTS);
        cr_assert_arr_eq (frame + GQ_FRAME_HEADER_BYTES,
                          gq_board_block (board, block) + GQ_FRAME_HEADER_BYTES, VECTOR_BYTES);
        cr_assert_eq (gq_hop_leased (optimizer), GQ_LEASE_NONE);
    }
}

/* The file is the optimizer's, but what is in it is anybody's. */
Test (hop, what_is_shown_and_is_no_such_frame_is_not_sent, .init = begin, .fini = end)
{
    static uint8_t frame[GQ_FRAME_HEADER_BYTES + VECTOR_BYTES];
    gq_frame wrong[] = {weights_of (6), weights_of (7), weights_of (7)};
    wrong[1].kind = GQ_KIND_INIT;
    wrong[2].count--;
    wrong[2].payload_bytes -= sizeof (float);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        show (2, &wrong[i], 7);
        cr_expect_eq (gq_hop_weights (broker, frame), GQ_MALFORMED, "%zu", i);
        cr_expect_eq (gq_hop_leased (optimizer), GQ_LEASE_NONE, "%zu", i);
    }
    const gq_frame right = weights_of (7);
    show (2, &right, 7);
    gq_board_block (board, 2)[20] ^= 1;
    cr_assert_eq (gq_hop_weights (broker, frame), GQ_MALFORMED);
    cr_assert_eq (gq_hop_leased (optimizer), GQ_LEASE_NONE);
    gq_board_block (board, 2)[20] ^= 1;
    cr_assert_eq (gq_hop_weights (broker, frame), GQ_OK);
}

Test (hop, the_sum_of_a_copy_is_that_of_the_bytes)
{
    static const size_t sizes[] = {0, 1, 2, 63, 8191, 8192, 8193, 16384, 20000};
    uint64_t seed = 11;
    printf ("seed %llu\n", (unsigned long long)seed);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        for (size_t shift = 0; shift < 3; shift++) {
            const size_t size = sizes[i];
            uint8_t *from = support_guarded_end (size + shift) - size;
            uint8_t *to = support_guarded_end (size + 1) - size;
            to[-1] = 0x5a;
            for (size_t k = 0; k < size; k++)
                from[k] = (uint8_t)support_random (&seed);
            cr_assert_eq (gq_crc32c_copy (to, from, size), gq_crc32c (from, size), "%zu bytes",
                          size);
            cr_assert_eq (memcmp (to, from, size), 0, "%zu bytes", size);
            cr_assert_eq (to[-1], 0x5a);
        }
}
