/*
 * Publisher and hop: a broker that reads large versions from the board is told of them; any other,
 * and one that may not find the board any more, gets them whole.
 */
#include "rule_testing.h"
#include "support.h"

#include "lane_file.h"
#include "log.h"
#include "optimizer/publish.h"

TestSuite (publish_hop, .timeout = 60);

/* As few elements as a ticket is for. */
enum { LARGE = GQ_HOP_PAYLOAD_MIN / 4, TERM = 2 };
/* A machine that has been up for a while; long after "never". */
#define START_NS  UINT64_C (100000000000)
#define MS_NS     UINT64_C (1000000)
#define SECOND_NS (1000 * MS_NS)

static char directory[64], lane_directory[80];
static gq_core core;
static gq_rule *rule;
static gq_publisher publisher;
static gq_hop *broker;
static void *context, *pub, *sub;
static uint64_t now_ns;

static void
set_weights (uint64_t version)
{
    static float weights[LARGE];
    for (size_t i = 0; i < LARGE; i++)
        weights[i] = (float)version + (float)i;
    gq_core_set_weights (&core, weights, version, 2 * version);
}

static void
open_broker (void)
{
    char path[PATH_MAX];
    gq_error error = {""};
    gq_hop_identity identity = {
        .term = TERM, .digest = core.layout.digest, .count = core.layout.element_count};
    memcpy (identity.run, core.run, GQ_RUN_ID_BYTES);
    snprintf (path, sizeof path, "%s", gq_lanes_hop_path (core.lanes));
    cr_assert_eq (gq_hop_open (&broker, path, gq_lanes_board_path (core.lanes), &identity, &error),
                  GQ_OK, "%s", error.text);
}

/* A core of `count` <= LARGE weights at version 7 that shares memory, and a subscriber. */
static void
begin (uint64_t count)
{
    const gq_core_config config = {.aggregate = 1, .max_staleness = UINT64_MAX};
    const gq_tensor_shape shape = {.name = "w", .rank = 1, .shape = {count}};
    gq_layout layout;
    gq_error error;
    cr_assert_eq (gq_log_open ("test", "/dev/null", GQ_LOG_ERROR, &error), GQ_OK);
    rule = load ("sgd", "auto", NO_SETS);
    gq_core_init (&core, &config, rule);
    cr_assert_eq (gq_layout_init (&layout, &shape, 1, NULL), GQ_OK);
    cr_assert_eq (gq_core_set_layout (&core, &layout), GQ_OK);
    core.term = TERM;
    memset (core.run, 0xab, sizeof core.run);
    support_directory (directory);
    snprintf (lane_directory, sizeof lane_directory, "%s/lane", directory);
    core.lane_directory = lane_directory;
    gq_core_share (&core);
    cr_assert_not_null (core.lanes);
    set_weights (7);
    context = zmq_ctx_new ();
    pub = zmq_socket (context, ZMQ_XPUB);
    sub = zmq_socket (context, ZMQ_SUB);
    cr_assert_eq (zmq_bind (pub, "inproc://publish"), 0);
    cr_assert_eq (zmq_connect (sub, "inproc://publish"), 0);
    publisher = (gq_publisher){.socket = pub};
    cr_assert_eq (zmq_setsockopt (sub, ZMQ_SUBSCRIBE, "", 0), 0);
    gq_publish_subscriptions (&publisher);
    now_ns = START_NS;
}

static void
end (void)
{
    gq_hop_close (&broker);
    zmq_close (pub);
    zmq_close (sub);
    zmq_ctx_term (context);
    gq_core_clear (&core);
    gq_rule_free (&rule);
    if (access (lane_directory, F_OK) == 0)
        support_remove (lane_directory);
    cr_assert_eq (rmdir (directory), 0);
}

/* What goes out next, a second later: its size, and its header.  0: nothing does. */
static size_t
sent (gq_frame *frame)
{
    gq_hop_ticket ticket;
    zmq_msg_t message;
    size_t size = 0;
    gq_publish_due (&publisher, &core, now_ns += SECOND_NS);
    zmq_msg_init (&message);
    if (zmq_msg_recv (&message, sub, ZMQ_DONTWAIT) >= 0) {
        const uint8_t *bytes = zmq_msg_data (&message);
        size = zmq_msg_size (&message);
        if (size == GQ_HOP_MESSAGE_BYTES) {
            cr_assert (gq_hop_read (bytes, size, frame, &ticket));
            cr_assert_eq (ticket.number, 0, "it is for no slot");
        } else {
            cr_assert_eq (gq_frame_decode (bytes, size, frame), GQ_OK);
            cr_assert_eq (gq_frame_check_payload (bytes, size), GQ_OK);
        }
    }
    zmq_msg_close (&message);
    return size;
}

static void
expect_sent (uint64_t version, size_t expected)
{
    gq_frame frame = {0};
    const size_t size = sent (&frame);
    cr_assert_eq (size, expected, "%zu bytes, not %zu", size, expected);
    cr_assert_eq (frame.kind, GQ_KIND_WEIGHTS);
    cr_assert_eq (frame.version, version);
    cr_assert_eq (frame.applied, 2 * version);
    cr_assert_eq (frame.term, TERM);
    cr_assert_eq (frame.count, core.layout.element_count);
}

static size_t
whole_bytes (void)
{
    return GQ_FRAME_HEADER_BYTES + (size_t)core.layout.element_count * sizeof (float);
}

/* What a broker reads that was told of it. */
static void
expect_read (uint64_t version)
{
    static uint8_t bytes[GQ_FRAME_HEADER_BYTES + LARGE * sizeof (float)];
    gq_frame frame;
    uint64_t shown;
    cr_assert (gq_board_peek (gq_lanes_board (core.lanes), &shown));
    cr_assert_eq (shown, version);
    cr_assert_eq (gq_hop_weights_bytes (broker), sizeof bytes);
    cr_assert_eq (gq_hop_weights (broker, bytes), GQ_OK);
    cr_assert_eq (gq_frame_decode (bytes, sizeof bytes, &frame), GQ_OK);
    cr_assert_eq (gq_frame_check_payload (bytes, sizeof bytes), GQ_OK);
    cr_assert_eq (frame.version, version);
    cr_assert_eq (frame.applied, 2 * version);
    cr_assert_arr_eq (bytes + GQ_FRAME_HEADER_BYTES, gq_buffers_current (core.buffers),
                      LARGE * sizeof (float));
}

Test (publish_hop, a_broker_that_reads_the_board_is_told_of_each_version)
{
    begin (LARGE);
    open_broker ();
    for (uint64_t version = 7; version < 7 + 2 * GQ_BOARD_ALL; version++) {
        set_weights (version);
        expect_sent (version, GQ_HOP_MESSAGE_BYTES);
        expect_read (version);
    }
    cr_assert_eq (publisher.published, 2 * GQ_BOARD_ALL);
    end ();
}

Test (publish_hop, it_is_told_again_while_nothing_changes)
{
    begin (LARGE);
    open_broker ();
    for (int i = 0; i < 3; i++)
        expect_sent (7, GQ_HOP_MESSAGE_BYTES);
    end ();
}

Test (publish_hop, without_a_broker_that_reads_versions_go_whole)
{
    begin (LARGE);
    expect_sent (7, whole_bytes ());
    open_broker ();
    set_weights (8);
    expect_sent (8, GQ_HOP_MESSAGE_BYTES);
    gq_hop_close (&broker);
    expect_sent (8, whole_bytes ());
    set_weights (9);
    expect_sent (9, whole_bytes ());
    open_broker ();
    expect_sent (9, GQ_HOP_MESSAGE_BYTES);
    end ();
}

Test (publish_hop, the_last_version_goes_whole)
{
    begin (LARGE);
    open_broker ();
    expect_sent (7, GQ_HOP_MESSAGE_BYTES);
    publisher.last = true;
    expect_sent (7, whole_bytes ());
    end ();
}

Test (publish_hop, a_small_version_goes_whole)
{
    begin (LARGE - 1);
    open_broker ();
    expect_sent (7, whole_bytes ());
    end ();
}

/* Blocks are lent to readers, who may hold all that can be shown. */
static void
lease_all (gq_shm actors[GQ_BOARD_BLOCKS], bool lease)
{
    for (uint32_t i = 0; i < GQ_BOARD_BLOCKS; i++)
        atomic_store (&gq_lane_file_words (&actors[i])->lease, lease ? i + 1 : GQ_LEASE_NONE);
}

Test (publish_hop, a_version_that_cannot_be_shown_goes_whole)
{
    gq_shm actors[GQ_BOARD_BLOCKS];
    begin (LARGE);
    open_broker ();
    for (uint32_t i = 0; i < GQ_BOARD_BLOCKS; i++) {
        char path[PATH_MAX];
        gq_error error = {""};
        gq_lane_identity identity = {.actor = i, .epoch = 1, .count = LARGE};
        memcpy (identity.run, core.run, GQ_RUN_ID_BYTES);
        snprintf (path, sizeof path, "%s", gq_lanes_grant (core.lanes, i, 1, 2, &error));
        cr_assert_eq (gq_lane_file_open (&actors[i], path, &identity, &error), GQ_OK, "%s",
                      error.text);
    }
    expect_sent (7, GQ_HOP_MESSAGE_BYTES);
    lease_all (actors, true);
    for (uint64_t version = 8; version < 12; version++) {
        set_weights (version);
        expect_sent (version, whole_bytes ());
    }
    lease_all (actors, false);
    expect_sent (11, GQ_HOP_MESSAGE_BYTES);
    expect_read (11);
    for (uint32_t i = 0; i < GQ_BOARD_BLOCKS; i++)
        gq_shm_close (&actors[i]);
    end ();
}
