/*
 * Publisher: what goes out when, on a clock that the test owns.
 */
#include "rule_testing.h"
#include "support.h"

#include "optimizer/publish.h"

TestSuite (publish, .timeout = 60);

enum { COUNT = 50 };
/* A machine that has been up for a while; long after "never". */
#define START_NS  UINT64_C (100000000000)
#define MS_NS     UINT64_C (1000000)
#define SECOND_NS (1000 * MS_NS)

static gq_core core;
static gq_rule *rule;
static gq_publisher publisher;
static void *context, *pub, *sub;

/* Inproc, so without delay. */
static void
subscribe (int option)
{
    cr_assert_eq (zmq_setsockopt (sub, option, "", 0), 0);
    gq_publish_subscriptions (&publisher);
}

static void
begin (uint64_t interval_ms)
{
    const gq_core_config config = {.aggregate = 1, .max_staleness = UINT64_MAX};
    const gq_tensor_shape shape = {.name = "w", .rank = 1, .shape = {COUNT}};
    const float weights[COUNT] = {0};
    gq_layout layout;
    rule = load ("sgd", "auto", NO_SETS);
    gq_core_init (&core, &config, rule);
    cr_assert_eq (gq_layout_init (&layout, &shape, 1, NULL), GQ_OK);
    cr_assert_eq (gq_core_set_layout (&core, &layout), GQ_OK);
    gq_core_set_weights (&core, weights, 7, 14);
    core.term = 2;
    context = zmq_ctx_new ();
    pub = zmq_socket (context, ZMQ_XPUB);
    sub = zmq_socket (context, ZMQ_SUB);
    cr_assert_eq (zmq_bind (pub, "inproc://publish"), 0);
    cr_assert_eq (zmq_connect (sub, "inproc://publish"), 0);
    publisher = (gq_publisher){.socket = pub, .interval_ns = interval_ms * MS_NS};
    subscribe (ZMQ_SUBSCRIBE);
}

static void
end (void)
{
    zmq_close (pub);
    zmq_close (sub);
    zmq_ctx_term (context);
    gq_core_clear (&core);
    gq_rule_free (&rule);
}

/* One version more, in another buffer. */
static void
step (void)
{
    const float weights[COUNT] = {0};
    gq_core_set_weights (&core, weights, core.version + 1, core.applied + 1);
}

/* The next frame that was sent; kind 0 when there is none. */
static gq_frame
sent (gq_ack *ack)
{
    gq_frame frame = {0};
    zmq_msg_t message;
    zmq_msg_init (&message);
    if (zmq_msg_recv (&message, sub, ZMQ_DONTWAIT) >= 0) {
        const uint8_t *bytes = zmq_msg_data (&message);
        cr_assert_eq (gq_frame_decode (bytes, zmq_msg_size (&message), &frame), GQ_OK);
        cr_assert_eq (gq_frame_check_payload (bytes, zmq_msg_size (&message)), GQ_OK);
        if (frame.kind == GQ_KIND_ACK && ack != NULL)
            gq_ack_decode (bytes + GQ_FRAME_HEADER_BYTES, ack);
    }
    zmq_msg_close (&message);
    return frame;
}

static void
expect_weights (uint64_t version)
{
    const gq_frame frame = sent (NULL);
    cr_assert_eq (frame.kind, GQ_KIND_WEIGHTS);
    cr_assert_eq (frame.version, version);
    cr_assert_eq (frame.term, 2);
    cr_assert_eq (frame.count, COUNT);
}

static void
expect_nothing (void)
{
    cr_assert_eq (sent (NULL).kind, 0);
}

/* While nothing changes, a frame of `kind` goes out at once, again soon, and then every second; and
 * the loop is told in time. */
static void
expect_repeated (gq_frame_kind kind)
{
    enum { SOON_MS = 100, SECOND_MS = 1000, LAST_MS = 5000 };
    uint64_t last_ms = 0, pause_ms = 0;
    size_t count = 0;
    for (uint64_t ms = 0; ms <= LAST_MS; ms++) {
        const uint64_t told_ns = gq_publish_next_ns (&publisher, &core);
        gq_publish_due (&publisher, &core, START_NS + ms * MS_NS);
        for (gq_frame frame = sent (NULL); frame.kind != 0; frame = sent (NULL)) {
            if (frame.kind != kind)
                continue;
            cr_assert (count > 0 || ms == 0, "not at once");
            cr_assert (count != 1 || ms <= SOON_MS, "not again before %llu ms",
                       (unsigned long long)ms);
            cr_assert (ms - last_ms >= pause_ms, "pauses do not shrink");
            cr_assert (count == 0 || told_ns <= START_NS + ms * MS_NS, "the loop would sleep on");
            pause_ms = ms - last_ms;
            last_ms = ms;
            count++;
        }
        cr_assert (count > 0 && ms - last_ms <= SECOND_MS, "silent at %llu ms",
                   (unsigned long long)ms);
    }
    cr_assert_eq (pause_ms, SECOND_MS);
}

Test (publish, a_version_goes_out_at_once_soon_again_and_then_once_a_second)
{
    begin (10);
    expect_repeated (GQ_KIND_WEIGHTS);
    end ();
}

Test (publish, new_versions_keep_the_interval_and_the_newest_gets_out)
{
    begin (10);
    gq_publish_due (&publisher, &core, START_NS);
    expect_weights (7);
    for (uint64_t ms = 1; ms <= 25; ms++) {
        step ();
        gq_publish_due (&publisher, &core, START_NS + ms * MS_NS);
    }
    expect_weights (17);
    expect_weights (27);
    expect_nothing ();
    const uint64_t next_ns = gq_publish_next_ns (&publisher, &core);
    cr_assert_eq (next_ns, START_NS + 30 * MS_NS);
    gq_publish_due (&publisher, &core, next_ns);
    expect_weights (32);
    end ();
}

Test (publish, nothing_goes_out_before_there_are_weights)
{
    begin (0);
    core.has_weights = false;
    gq_publish_due (&publisher, &core, START_NS);
    expect_nothing ();
    end ();
}

Test (publish, nothing_of_the_weights_is_made_or_sent_while_nobody_subscribes)
{
    begin (0);
    subscribe (ZMQ_UNSUBSCRIBE);
    for (uint64_t ms = 0; ms <= 3000; ms++) {
        step ();
        gq_publish_due (&publisher, &core, START_NS + ms * MS_NS);
    }
    cr_assert_eq (publisher.published, 0);
    cr_assert_eq (publisher.publish_us.count, 0);
    /* Not even tried: nothing wakes the loop for weights. */
    cr_assert_eq (publisher.attempt_ns, 0);
    cr_assert_eq (gq_publish_next_ns (&publisher, &core), UINT64_MAX);
    end ();
}

Test (publish, the_first_subscriber_gets_the_current_version_at_once_whatever_the_interval)
{
    begin (60000);
    gq_publish_due (&publisher, &core, START_NS);
    expect_weights (7);
    subscribe (ZMQ_UNSUBSCRIBE);
    step ();
    subscribe (ZMQ_SUBSCRIBE);
    const uint64_t now_ns = START_NS + 10 * MS_NS;
    cr_assert (gq_publish_next_ns (&publisher, &core) <= now_ns);
    gq_publish_due (&publisher, &core, now_ns);
    expect_weights (8);
    /* From then on the interval holds again; the same version is due soon once more. */
    step ();
    gq_publish_due (&publisher, &core, now_ns + MS_NS);
    expect_nothing ();
    end ();
}

Test (publish, acknowledgements_go_out_without_a_reader_of_weights)
{
    uint8_t topic[GQ_TOPIC_ACTOR_BYTES];
    const uint8_t nonce[GQ_NONCE_BYTES] = {1};
    begin (0);
    subscribe (ZMQ_UNSUBSCRIBE);
    gq_topic (GQ_KIND_ACK, 5, topic);
    zmq_setsockopt (sub, ZMQ_SUBSCRIBE, topic, sizeof topic);
    gq_publish_subscriptions (&publisher);
    gq_ledger_grant (&core.ledger, 5, 30, nonce);
    gq_publish_due (&publisher, &core, START_NS);
    cr_assert_eq (sent (NULL).kind, GQ_KIND_ACK);
    expect_nothing ();
    end ();
}

/* Actor 5 is granted epoch 30. */
static void
known_actor (void)
{
    const uint8_t nonce[GQ_NONCE_BYTES] = {1};
    gq_ledger_grant (&core.ledger, 5, 30, nonce);
}

Test (publish, an_ack_follows_the_weights_it_names)
{
    gq_ack ack = {0};
    begin (0);
    known_actor ();
    gq_ledger_enter (&core.ledger, 5, 1);
    gq_ledger_refuse (&core.ledger, 5, 1, GQ_NONFINITE);
    step ();
    gq_publish_due (&publisher, &core, START_NS);
    expect_weights (8);
    const gq_frame frame = sent (&ack);
    cr_assert_eq (frame.kind, GQ_KIND_ACK);
    cr_assert (frame.actor == 5 && frame.epoch == 30 && frame.version == 8);
    cr_assert (ack.cumulative == 1 && ack.refused == 1 && ack.refused_reason == GQ_NONFINITE);
    expect_nothing ();
    end ();
}

Test (publish, an_ack_carries_the_map_of_what_is_settled_beyond_a_hole)
{
    gq_ack ack = {0};
    begin (0);
    known_actor ();
    for (uint64_t sequence = 1; sequence <= 4; sequence++)
        if (sequence != 2) {
            gq_ledger_enter (&core.ledger, 5, sequence);
            gq_ledger_settle (&core.ledger, 5);
        }
    gq_publish_due (&publisher, &core, START_NS);
    expect_weights (7);
    cr_assert_eq (sent (&ack).kind, GQ_KIND_ACK);
    cr_assert (ack.cumulative == 1 && ack.beyond == 6, "3 and 4: bits 1 and 2 beyond 1");
    end ();
}

Test (publish, an_ack_goes_out_at_once_soon_again_and_then_once_a_second)
{
    begin (10);
    known_actor ();
    core.ledger.actors[5].owed = true;
    expect_repeated (GQ_KIND_ACK);
    end ();
}

Test (publish, an_ack_that_is_owed_does_not_wait_for_a_repetition)
{
    begin (10);
    known_actor ();
    core.ledger.actors[5].owed = true;
    gq_publish_due (&publisher, &core, START_NS);
    expect_weights (7);
    cr_assert_eq (sent (NULL).kind, GQ_KIND_ACK);
    core.ledger.actors[5].owed = true;
    gq_publish_due (&publisher, &core, START_NS + MS_NS);
    cr_assert_eq (sent (NULL).kind, GQ_KIND_ACK);
    gq_publish_due (&publisher, &core, START_NS + 2 * MS_NS);
    expect_nothing ();
    end ();
}

Test (publish, while_readers_hold_all_buffers_it_tries_again_soon_but_not_at_once)
{
    begin (0);
    uint64_t now_ns = START_NS;
    /* Nobody reads: what is sent stays lent. */
    for (uint64_t published = UINT64_MAX; published != publisher.published; now_ns += MS_NS) {
        published = publisher.published;
        step ();
        gq_publish_due (&publisher, &core, now_ns);
    }
    const uint64_t next_ns = gq_publish_next_ns (&publisher, &core);
    cr_assert (next_ns > now_ns - MS_NS && next_ns <= now_ns + 10 * MS_NS);
    const uint64_t published = publisher.published;
    expect_weights (8);
    gq_publish_due (&publisher, &core, next_ns);
    cr_assert_eq (publisher.published, published + 1);
    end ();
}
