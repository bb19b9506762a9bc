/*
 * A client on lane shm, against an optimizer's real lane files and board and a fake run's sockets:
 * what it learns from shared memory, and how it goes back to inline without losing anything, least
 * of all the vector under the caller's hands.
 */
#include "client_testing.h"

#include <poll.h>

TestSuite (client_lane, .timeout = 60);

static gq_ledger ledger;
static char lane_directory[128];
static uint32_t blocks; /* shown so far */

static gq_lanes *
make_lanes (uint32_t term)
{
    gq_lanes *lanes;
    gq_error error;
    gq_lanes_config config = {.directory = lane_directory,
                              .term = term,
                              .digest = fake.layout.digest,
                              .count = FAKE_COUNT};
    memcpy (config.run, fake.run, sizeof config.run);
    ledger.actors[FAKE_ACTOR].known = true;
    cr_assert_eq (gq_lanes_open (&lanes, &config, &ledger, &error), GQ_OK, "%s", error.text);
    return lanes;
}

/* All elements are `value`. */
static void
show (gq_lanes *lanes, uint64_t version, float value)
{
    const uint32_t index = blocks++ % GQ_BOARD_BLOCKS;
    float *vector =
        (float *)(void *)(gq_board_block (gq_lanes_board (lanes), index) + GQ_FRAME_HEADER_BYTES);
    for (size_t i = 0; i < FAKE_COUNT; i++)
        vector[i] = value;
    gq_board_show (gq_lanes_board (lanes), index, version);
    gq_lanes_ring_all (lanes);
}

static void
begin_shm_with (gq_client_config config)
{
    gq_error error = {""};
    config.lane = "shm";
    fake_begin (&fake);
    snprintf (lane_directory, sizeof lane_directory, "%s/lane", fake.directory);
    fake.lanes = make_lanes (FAKE_TERM);
    show (fake.lanes, FAKE_VERSION, 1);
    cr_assert_eq (fake_open (&fake, &client, config, &error), GQ_OK, "%s", error.text);
    cr_assert_str_eq (gq_client_lane (client, NULL), "shm");
}

static void
begin_shm (void)
{
    begin_shm_with (quick ());
}

static void
begin_shm_bf16 (void)
{
    gq_client_config config = quick ();
    config.encoding = "bf16";
    begin_shm_with (config);
}

static void
end_shm (void)
{
    client->config.timeout_ms = 0;
    gq_client_close (&client);
    gq_lanes_close (&fake.lanes);
    cr_assert_neq (access (lane_directory, F_OK), 0, "lane files were left behind");
    fake_end (&fake);
}

/* The next descriptor, and the vector that it names. */
static const float *
descriptor (gq_frame *frame)
{
    zmq_msg_t message;
    cr_assert (fake_receive (fake.gradients, &message, FAKE_WAIT_MS), "no gradient came");
    cr_assert_eq (zmq_msg_size (&message), GQ_FRAME_HEADER_BYTES);
    cr_assert_eq (gq_frame_decode (zmq_msg_data (&message), zmq_msg_size (&message), frame), GQ_OK);
    zmq_msg_close (&message);
    cr_assert_eq (frame->lane, GQ_LANE_SHM);
    const float *vector = gq_lanes_vector (fake.lanes, frame);
    cr_assert_not_null (vector);
    return vector;
}

static void
acknowledge (uint64_t cumulative, uint64_t version)
{
    const gq_ack ack = {.cumulative = cumulative};
    cr_assert (gq_lanes_ack (fake.lanes, FAKE_ACTOR, FAKE_EPOCH, &ack, version));
}

/* The run goes on without shared memory: its optimizer says so by acknowledging elsewhere. */
static void
end_of_shm (uint64_t cumulative)
{
    const gq_ack ack = {.cumulative = cumulative};
    gq_frame frame = fake_frame (&fake, GQ_KIND_ACK);
    frame.term += 1;
    fake_ack_frame (&fake, &frame, &ack);
    AWAIT (strcmp (gq_client_lane (client, NULL), "inline") == 0);
}

Test (client_lane, gradients_lie_in_slots_and_are_settled_by_shared_memory, .init = begin_shm,
      .fini = end_shm)
{
    gq_frame frame;
    weights ();
    cr_assert_eq (push (10), GQ_OK);
    const float *vector = descriptor (&frame);
    cr_assert_eq (frame.sequence, 1);
    cr_assert_eq (frame.version, FAKE_VERSION);
    cr_assert_eq (vector[FAKE_COUNT - 1], 10 + FAKE_COUNT - 1);
    cr_assert_eq (gq_client_count (client).acknowledged, 0);
    acknowledge (1, FAKE_VERSION);
    AWAIT (gq_client_count (client).acknowledged == 1);
}

Test (client_lane, weights_come_at_once_without_a_bell_and_are_held_in_place, .init = begin_shm,
      .fini = end_shm)
{
    gq_weights first = weights ();
    cr_assert_eq (first.version, FAKE_VERSION);
    cr_assert_eq (first.data[0], 1);
    const uint32_t held = gq_lanes_leased (fake.lanes);
    cr_assert_eq (__builtin_popcount (held), 1);
    show (fake.lanes, FAKE_VERSION + 1, 2);
    gq_weights second = weights ();
    cr_assert_eq (second.version, FAKE_VERSION + 1);
    cr_assert_eq (second.data[0], 2);
    cr_assert_eq (__builtin_popcount (gq_lanes_leased (fake.lanes)), 1);
    cr_assert_neq (gq_lanes_leased (fake.lanes), held);
    cr_assert_eq (first.data[0], 1, "nobody wrote what was held until now");
}

/* An actor computes for long: one that may not hold a block for so long holds none. */
Test (client_lane, weights_are_copied_by_whom_may_not_hold_them, .init = begin_shm, .fini = end_shm)
{
    atomic_store (&client->words->may_hold, 0);
    show (fake.lanes, FAKE_VERSION + 1, 3);
    gq_weights taken = weights ();
    cr_assert_eq (taken.version, FAKE_VERSION + 1);
    cr_assert_eq (taken.data[FAKE_COUNT - 1], 3);
    cr_assert_eq (gq_lanes_leased (fake.lanes), 0);
}

Test (client_lane, a_sleeping_optimizer_is_woken_and_finds_the_gradient, .init = begin_shm,
      .fini = end_shm)
{
    struct pollfd bell = {.fd = gq_lanes_bell (fake.lanes), .events = POLLIN};
    uint8_t header[GQ_FRAME_HEADER_BYTES];
    gq_frame frame;
    gq_ledger_grant (&ledger, FAKE_ACTOR, FAKE_EPOCH, (const uint8_t[GQ_NONCE_BYTES]){1});
    cr_assert_eq (push (1), GQ_OK);
    cr_assert_eq (poll (&bell, 1, 0), 0, "it is awake");
    gq_board_set_idle (gq_lanes_board (fake.lanes), true);
    cr_assert_eq (push (2), GQ_OK);
    cr_assert_eq (poll (&bell, 1, 0), 1);
    for (uint64_t sequence = 1; sequence <= 2; sequence++) {
        cr_assert (gq_lanes_ready (fake.lanes, &ledger, header));
        cr_assert_eq (gq_frame_decode (header, sizeof header, &frame), GQ_OK);
        cr_assert_eq (frame.sequence, sequence);
        cr_assert_not_null (gq_lanes_vector (fake.lanes, &frame));
    }
}

Test (client_lane, a_board_that_cannot_be_opened_leads_to_inline, .init = begin_shm,
      .fini = end_shm)
{
    gq_lanes *dead = fake.lanes;
    fake.lanes = make_lanes (FAKE_TERM + 1);
    cr_assert_eq (unlink (gq_lanes_board_path (fake.lanes)), 0);
    AWAIT (strcmp (gq_client_lane (client, NULL), "inline") == 0);
    const char *reason;
    gq_client_lane (client, &reason);
    cr_assert_not_null (strstr (reason, "board"), "%s", reason);
    gq_lanes_close (&dead);
}

Test (client_lane, waiting_ends_by_the_bell_when_its_version_is_shown, .init = begin_shm,
      .fini = end_shm)
{
    gq_frame frame;
    cr_assert_eq (push (1), GQ_OK);
    descriptor (&frame);
    acknowledge (1, FAKE_VERSION + 1);
    client->config.timeout_ms = FAKE_QUIET_MS;
    cr_assert_eq (gq_client_wait (client, 1), GQ_TIMEOUT, "its step is not to be seen yet");
    client->config.timeout_ms = FAKE_WAIT_MS;
    show (fake.lanes, FAKE_VERSION + 1, 3);
    cr_assert_eq (gq_client_wait (client, 1), GQ_OK);
    cr_assert_eq (weights ().data[0], 3);
}

Test (client_lane, a_full_window_waits_and_goes_on, .init = begin_shm, .fini = end_shm)
{
    gq_frame frame;
    for (int i = 0; i < GQ_WINDOW_DEFAULT; i++)
        cr_assert_eq (push ((float)i), GQ_OK);
    cr_assert_eq (push_briefly (5), GQ_TIMEOUT);
    for (int i = 0; i < GQ_WINDOW_DEFAULT; i++)
        cr_assert_eq (descriptor (&frame)[0], (float)i);
    acknowledge (1, FAKE_VERSION);
    cr_assert_eq (push (6), GQ_OK);
    cr_assert_eq (descriptor (&frame)[0], 6);
}

Test (client_lane, back_to_inline_nothing_is_lost_and_the_vector_being_built_goes_along,
      .init = begin_shm, .fini = end_shm)
{
    gq_frame frame;
    float values[FAKE_COUNT];
    cr_assert_eq (push (20), GQ_OK);
    cr_assert_eq (descriptor (&frame)[0], 20);
    /* As an actor does: the buffer first, then the weights, then it writes. */
    float *building = gq_client_reserve (client);
    building[0] = -1;
    end_of_shm (0);
    cr_assert_eq (gq_client_reserve (client), building);
    for (size_t i = 0; i < FAKE_COUNT; i++)
        building[i] = 30 + (float)i;
    cr_assert_eq (gq_client_commit (client, 1, NULL), GQ_OK);
    bool seen[3] = {false};
    while (!seen[1] || !seen[2]) { /* the first one is sent again, when its time has come */
        weights ();
        zmq_msg_t message;
        if (!fake_receive (fake.gradients, &message, 10))
            continue;
        cr_assert_eq (gq_frame_decode (zmq_msg_data (&message), zmq_msg_size (&message), &frame),
                      GQ_OK);
        cr_assert_eq (frame.lane, GQ_LANE_INLINE);
        cr_assert_eq (gq_frame_check_payload (zmq_msg_data (&message), zmq_msg_size (&message)),
                      GQ_OK);
        memcpy (values, (uint8_t *)zmq_msg_data (&message) + GQ_FRAME_HEADER_BYTES, sizeof values);
        zmq_msg_close (&message);
        cr_assert (frame.sequence == 1 || frame.sequence == 2);
        cr_assert_eq (values[0], frame.sequence == 1 ? 20 : 30);
        cr_assert_eq (values[FAKE_COUNT - 1], values[0] + FAKE_COUNT - 1);
        seen[frame.sequence] = true;
    }
    /* And weights come by their socket. */
    fake_weights (&fake, FAKE_TERM + 1, FAKE_VERSION + 5, 8);
    AWAIT (weights ().version == FAKE_VERSION + 5);
    cr_assert_eq (weights ().data[0], 8);
}

Test (client_lane, shared_memory_is_float32_and_what_begins_inline_is_bf16, .init = begin_shm_bf16,
      .fini = end_shm)
{
    gq_frame frame;
    float values[FAKE_COUNT];
    const float fine = 1 + 0x1p-20f; /* no bfloat16 */
    cr_assert_eq (push (fine), GQ_OK);
    cr_assert_eq (descriptor (&frame)[0], fine);
    cr_assert_eq (frame.encoding, GQ_ENCODING_F32);
    float *building = gq_client_reserve (client); /* the lane changes under this one */
    end_of_shm (1);
    for (size_t i = 0; i < FAKE_COUNT; i++)
        building[i] = fine;
    cr_assert_eq (gq_client_commit (client, 1, NULL), GQ_OK);
    cr_assert_eq (push (fine), GQ_OK);
    for (uint64_t sequence = 2; sequence <= 3; sequence++) {
        frame = fake_gradient (&fake, values);
        cr_assert_eq (frame.sequence, sequence);
        cr_assert_eq (frame.encoding, GQ_ENCODING_BF16);
        cr_assert_eq (values[0], 1);
    }
}

/* By an optimizer that does not know this life: only sockets can tell it more. */
Test (client_lane, a_removed_lane_file_leads_back_to_inline, .init = begin_shm, .fini = end_shm)
{
    char path[PATH_MAX];
    cr_assert (gq_lane_file_path (path, lane_directory, FAKE_ACTOR, FAKE_EPOCH));
    cr_assert_eq (unlink (path), 0);
    AWAIT (strcmp (gq_client_lane (client, NULL), "inline") == 0);
    const char *reason;
    gq_client_lane (client, &reason);
    cr_assert_not_null (strstr (reason, "removed"), "%s", reason);
}

Test (client_lane, the_board_of_a_later_optimizer_takes_over, .init = begin_shm, .fini = end_shm)
{
    gq_lanes *dead = fake.lanes;
    cr_assert_eq (weights ().data[0], 1);
    fake.lanes = make_lanes (FAKE_TERM + 1);
    gq_weights between = weights ();
    cr_assert_eq (between.version, FAKE_VERSION);
    cr_assert_eq (between.data[0], 1, "what was held in place outlives its board");
    show (fake.lanes, FAKE_VERSION, 4);
    AWAIT (weights ().term == FAKE_TERM + 1);
    cr_assert_eq (weights ().data[0], 4);
    cr_assert_str_eq (gq_client_lane (client, NULL), "shm");
    acknowledge (0, FAKE_VERSION);
    AWAIT (client->known_term == FAKE_TERM + 1);
    gq_lanes_close (&dead);
}

Test (client_lane, another_life_of_the_actor_fences_it, .init = begin_shm, .fini = end_shm)
{
    gq_error error;
    cr_assert_not_null (gq_lanes_grant (fake.lanes, FAKE_ACTOR, FAKE_EPOCH + 1, 2, &error));
    cr_assert_eq (push (1), GQ_FENCED);
}

Test (client_lane, what_is_no_lane_file_leads_to_inline_with_a_reason)
{
    gq_error error = {""};
    gq_client_config config = quick ();
    fake_begin (&fake);
    snprintf (lane_directory, sizeof lane_directory, "%s/lane", fake.directory);
    fake.lanes = make_lanes (FAKE_TERM);
    char path[PATH_MAX];
    const char *slots = gq_lanes_grant (fake.lanes, FAKE_ACTOR, FAKE_EPOCH, 2, &error);
    char nonsense[160];
    snprintf (path, sizeof path, "%s", slots);
    snprintf (nonsense, sizeof nonsense, "%s/nonsense", fake.directory);
    support_write (nonsense, "nonsense", 8);
    cr_assert_eq (rename (nonsense, path), 0);
    fake.epoch_text = "17"; /* as it would be; nobody will subscribe */
    config.lane = "shm";
    cr_assert_eq (fake_open (&fake, &client, config, &error), GQ_REFUSED);
    cr_assert_not_null (strstr (error.text, "is no file of"), "%s", error.text);
    cr_assert_eq (unlink (path), 0);
    gq_lanes_close (&fake.lanes);
    fake_end (&fake);
}
