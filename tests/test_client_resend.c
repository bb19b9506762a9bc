/*
 * An open client that keeps what is unanswered and sends it again: the same bytes, not too early,
 * only while somebody hears it, and never after another process has taken its id over.
 */
#include "client_testing.h"

TestSuite (client_resend, .timeout = 60);

/* Short enough to wait for; long enough that a busy machine keeps the order of things. */
enum { RESEND_MS = 100 };
#define MS_NS UINT64_C (1000000)

static gq_client_config
resending (uint32_t window)
{
    gq_client_config config = quick ();
    config.window = window;
    config.resend_ms = RESEND_MS;
    return config;
}

/* A whole message as it arrived. */
typedef struct sent {
    uint8_t bytes[GQ_FRAME_HEADER_BYTES + FAKE_COUNT * sizeof (float)];
    gq_frame frame;
} sent;

/* The next gradient that arrives, while the client goes on with its own affairs. */
static sent
arrived (void)
{
    sent result;
    const uint64_t end_ns = gq_now_ns () + FAKE_WAIT_MS * MS_NS;
    while (zmq_recv (fake.gradients, result.bytes, sizeof result.bytes, ZMQ_DONTWAIT) !=
           (int)sizeof result.bytes) {
        weights ();
        cr_assert (gq_now_ns () < end_ns, "no gradient came");
    }
    cr_assert_eq (gq_frame_decode (result.bytes, sizeof result.bytes, &result.frame), GQ_OK);
    return result;
}

static bool
nothing_arrives (void)
{
    zmq_msg_t message;
    const bool came = fake_receive (fake.gradients, &message, FAKE_QUIET_MS);
    zmq_msg_close (&message);
    return !came;
}

/* Take what was sent before: the client sends only while it is called. */
static void
drain (void)
{
    while (!nothing_arrives ())
        continue;
}

static void
settle (uint64_t cumulative, uint64_t beyond)
{
    const gq_ack ack = {.cumulative = cumulative, .beyond = beyond};
    const gq_frame frame = fake_frame (&fake, GQ_KIND_ACK);
    fake_ack_frame (&fake, &frame, &ack);
}

/* ---- sending again ---- */

Test (client_resend, what_is_unanswered_is_sent_again_to_the_last_byte_and_not_before_its_time)
{
    begin (resending (2));
    const uint64_t start_ns = gq_now_ns ();
    cr_assert_eq (push (1), GQ_OK);
    const sent first = arrived ();
    const sent second = arrived ();
    /* A quarter of jitter either way. */
    cr_assert (gq_now_ns () - start_ns >= RESEND_MS * MS_NS * 3 / 4);
    cr_assert_arr_eq (first.bytes, second.bytes, sizeof first.bytes);
    cr_assert_geq (gq_client_count (client).resent, 1);
    cr_assert_eq (gq_client_count (client).pushed, 1);
    cr_assert_eq (gq_client_count (client).acknowledged, 0);
    end ();
}

Test (client_resend, weights_that_came_since_do_not_change_what_is_sent_again)
{
    begin (resending (2));
    weights ();
    cr_assert_eq (push (1), GQ_OK);
    const sent first = arrived ();
    fake_weights (&fake, FAKE_TERM + 1, FAKE_VERSION + 9, 3); /* another life of the optimizer */
    AWAIT (weights ().term == FAKE_TERM + 1);
    const sent second = arrived ();
    cr_assert_arr_eq (first.bytes, second.bytes, sizeof first.bytes);
    cr_assert_eq (second.frame.version, FAKE_VERSION);
    end ();
}

Test (client_resend, each_one_that_is_unanswered_comes_again_until_it_is_settled)
{
    unsigned times[4] = {0};
    begin (resending (3));
    for (int i = 0; i < 3; i++)
        cr_assert_eq (push (0), GQ_OK);
    while (times[1] < 2 || times[2] < 2 || times[3] < 2)
        times[arrived ().frame.sequence]++;
    settle (3, 0);
    AWAIT (gq_client_count (client).acknowledged == 3);
    drain ();
    const uint64_t resent = gq_client_count (client).resent;
    const uint64_t until_ns = gq_now_ns () + 4 * RESEND_MS * MS_NS;
    while (gq_now_ns () < until_ns)
        let_arrive ();
    cr_assert_eq (gq_client_count (client).resent, resent);
    end ();
}

Test (client_resend, nothing_is_sent_again_while_the_optimizer_is_silent)
{
    begin (resending (1));
    cr_assert_eq (push (1), GQ_OK);
    const sent first = arrived ();
    client->heard_ns -= 10000 * MS_NS; /* silent for 10 s, as if */
    client->window.slots[0].due_ns = 0;
    for (int i = 0; i < 5; i++)
        let_arrive ();
    cr_assert_eq (gq_client_count (client).resent, 0);
    cr_assert_eq (push_briefly (2), GQ_TIMEOUT, "and nothing is given up");
    fake_weights (&fake, FAKE_TERM, FAKE_VERSION + 1, 2); /* back */
    const sent second = arrived ();
    cr_assert_arr_eq (first.bytes, second.bytes, sizeof first.bytes);
    end ();
}

Test (client_resend, while_the_queue_is_full_nothing_counts_as_sent_again)
{
    begin (resending (4));
    cr_assert_eq (push (1), GQ_OK);
    arrived ();
    zmq_close (fake.gradients);
    AWAIT (push_briefly (0) == GQ_TIMEOUT); /* until the client has seen that its peer is gone */
    const uint64_t resent = gq_client_count (client).resent;
    for (uint32_t i = 0; i < 4; i++)
        client->window.slots[i].due_ns = 0;
    for (int i = 0; i < 5; i++)
        let_arrive ();
    cr_assert_eq (gq_client_count (client).resent, resent);
    fake.gradients = fake_socket (&fake, ZMQ_PULL, "g");
    AWAIT (gq_client_count (client).resent > resent);
    end ();
}

/* ---- settled through the map ---- */

Test (client_resend, what_the_map_settles_opens_the_window_and_is_not_sent_again)
{
    begin (resending (3));
    for (int i = 0; i < 3; i++)
        cr_assert_eq (push (0), GQ_OK);
    settle (0, 6); /* 2 and 3, not 1: it was lost on the way */
    AWAIT (gq_client_count (client).acknowledged == 2);
    cr_assert_eq (push (0), GQ_OK);
    cr_assert_eq (push (0), GQ_OK);
    cr_assert_eq (push_briefly (0), GQ_TIMEOUT, "1, 4 and 5 are on the way");
    drain ();
    for (int i = 0; i < 6; i++) {
        const uint64_t sequence = arrived ().frame.sequence;
        cr_assert (sequence == 1 || sequence > 3, "%llu", (unsigned long long)sequence);
    }
    end ();
}

Test (client_resend, waiting_for_a_number_waits_for_every_hole_before_it)
{
    begin (resending (4));
    for (int i = 0; i < 3; i++)
        cr_assert_eq (push (0), GQ_OK);
    settle (0, 6);
    AWAIT (gq_client_count (client).acknowledged == 2);
    client->config.timeout_ms = FAKE_QUIET_MS;
    cr_assert_eq (gq_client_wait (client, 3), GQ_TIMEOUT, "1 is on the way");
    client->config.timeout_ms = FAKE_WAIT_MS;
    settle (3, 0);
    cr_assert_eq (gq_client_wait (client, 3), GQ_OK);
    end ();
}

Test (client_resend, no_number_is_given_out_beyond_the_map)
{
    begin (resending (2));
    cr_assert_eq (push (0), GQ_OK);
    for (uint64_t sequence = 2; sequence <= GQ_WINDOW_MAX; sequence++) {
        cr_assert_eq (push (0), GQ_OK, "%llu", (unsigned long long)sequence);
        /* All but the first: bits 1 to sequence - 1. */
        const uint64_t all = sequence == 64 ? UINT64_MAX : (UINT64_C (1) << sequence) - 1;
        settle (0, all - 1);
        AWAIT (gq_client_count (client).acknowledged == sequence - 1);
        while (arrived ().frame.sequence != sequence) /* 1 comes again and again */
            continue;
    }
    cr_assert_eq (push_briefly (0), GQ_TIMEOUT, "65 could not be acknowledged before 1 is");
    settle (GQ_WINDOW_MAX, 0);
    cr_assert_eq (push (0), GQ_OK);
    end ();
}

/* ---- fenced ---- */

static void
fence (void)
{
    const gq_ack ack = {.cumulative = 0};
    gq_frame frame = fake_frame (&fake, GQ_KIND_ACK);
    frame.epoch = FAKE_EPOCH + 1;
    fake_ack_frame (&fake, &frame, &ack);
    AWAIT (gq_client_ended (client) == GQ_FENCED);
}

Test (client_resend, an_ack_of_a_higher_epoch_ends_every_wait)
{
    begin (resending (2));
    cr_assert_eq (push (0), GQ_OK);
    fence ();
    cr_assert_eq (gq_client_wait (client, 1), GQ_FENCED);
    cr_assert_eq (push (0), GQ_FENCED, "though there is room in the window");
    cr_assert_eq (gq_client_count (client).pushed, 1);
    settle (1, 0); /* no way back */
    let_arrive ();
    cr_assert_eq (push (0), GQ_FENCED);
    end ();
}

Test (client_resend, who_is_fenced_sends_nothing_again)
{
    begin (resending (2));
    cr_assert_eq (push (0), GQ_OK);
    arrived ();
    fence ();
    drain ();
    const uint64_t resent = gq_client_count (client).resent;
    client->window.slots[0].due_ns = 0;
    for (int i = 0; i < 3; i++)
        let_arrive ();
    cr_assert_eq (gq_client_count (client).resent, resent);
    end ();
}

Test (client_resend, an_ack_of_a_lower_epoch_fences_nobody)
{
    const gq_ack ack = {.cumulative = 1};
    begin (resending (2));
    cr_assert_eq (push (0), GQ_OK);
    gq_frame frame = fake_frame (&fake, GQ_KIND_ACK);
    frame.epoch = FAKE_EPOCH - 1;
    fake_ack_frame (&fake, &frame, &ack);
    let_arrive ();
    cr_assert_eq (gq_client_ended (client), GQ_OK);
    cr_assert_eq (gq_client_count (client).acknowledged, 0);
    end ();
}

/* ---- closing ---- */

/* Answers the second time that a gradient comes. */
static void *
answer_late (void *argument)
{
    float values[FAKE_COUNT];
    unsigned *times = argument;
    while (*times < 2) {
        cr_assert_eq (fake_gradient (&fake, values).sequence, 1);
        ++*times;
    }
    fake_ack (&fake, 1, FAKE_VERSION);
    return NULL;
}

Test (client_resend, closing_waits_for_the_answer_and_sends_again_meanwhile)
{
    pthread_t thread;
    unsigned times = 0;
    begin (resending (2));
    cr_assert_eq (push (0), GQ_OK);
    cr_assert_eq (pthread_create (&thread, NULL, answer_late, &times), 0);
    gq_client_close (&client);
    pthread_join (thread, NULL);
    cr_assert_eq (times, 2);
    fake_end (&fake);
}

Test (client_resend, closing_waits_only_while_the_optimizer_is_heard)
{
    float values[FAKE_COUNT];
    begin (quick ());
    cr_assert_eq (push (0), GQ_OK);
    client->config.timeout_ms = -1;
    client->heard_ns -= 10000 * MS_NS;
    gq_client_close (&client); /* would hang */
    fake_gradient (&fake, values);
    fake_end (&fake);
    gq_client_close (&client);
}

Test (client_resend, who_is_fenced_closes_at_once)
{
    begin (resending (2));
    cr_assert_eq (push (0), GQ_OK);
    fence ();
    client->config.timeout_ms = -1;
    const uint64_t start_ns = gq_now_ns ();
    gq_client_close (&client);
    /* Not even as long as an optimizer may be silent. */
    cr_assert (gq_now_ns () - start_ns < 2000 * MS_NS);
    fake_end (&fake);
}
