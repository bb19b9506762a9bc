/*
 * An open client whose optimizer has lost what it knew, or whose connections have died beyond
 * ZeroMQ's repair: it begins a new life, or new connections, by itself.
 */
#include <errno.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "client_testing.h"

TestSuite (client_life, .timeout = 60);

#define MS_NS UINT64_C (1000000)

/* An acknowledgement by the optimizer `later` lives after the first one the client met. */
static void
ack_later (uint32_t later, uint64_t cumulative, uint64_t beyond)
{
    const gq_ack ack = {.cumulative = cumulative, .beyond = beyond};
    gq_frame frame = fake_frame (&fake, GQ_KIND_ACK);
    frame.term += later;
    fake_ack_frame (&fake, &frame, &ack);
}

/* One naming another epoch of this actor. */
static void
ack_epoch (uint32_t epoch)
{
    const gq_ack ack = {.cumulative = 0};
    gq_frame frame = fake_frame (&fake, GQ_KIND_ACK);
    frame.term += 1;
    frame.epoch = epoch;
    fake_ack_frame (&fake, &frame, &ack);
}

/* The client's next hello; answered with a grant `later` epochs and terms above the first. */
static void
grant (uint32_t later)
{
    fake.later = later;
    for (const uint64_t end_ns = gq_now_ns () + FAKE_WAIT_MS * MS_NS;;) {
        zmq_msg_t peer;
        json_t *request = fake_request (&fake, &peer, 10);
        const bool granted = request != NULL && fake_answer (&fake, &peer, request);
        const json_int_t actor = json_integer_value (json_object_get (request, "actor"));
        json_decref (request);
        zmq_msg_close (&peer);
        if (granted) {
            cr_assert_eq (actor, FAKE_ACTOR, "it keeps its id");
            break;
        }
        weights ();
        cr_assert (gq_now_ns () < end_ns, "no hello came");
    }
    AWAIT (!client->asking);
}

/* The next gradient of the epoch `later` above the first. */
static gq_frame
gradient_of (uint32_t later)
{
    float values[FAKE_COUNT];
    gq_frame frame = fake_gradient (&fake, values);
    while (frame.epoch != FAKE_EPOCH + later)
        frame = fake_gradient (&fake, values);
    return frame;
}

/* Three are sent, two settled, and the next life of the optimizer knows one. */
static void
roll_back (void)
{
    begin (quick ());
    cr_assert_eq (push (0), GQ_OK);
    cr_assert_eq (push (0), GQ_OK);
    ack_later (0, 2, 0);
    AWAIT (gq_client_count (client).acknowledged == 2);
    cr_assert_eq (push (0), GQ_OK);
    ack_later (1, 1, 0);
    AWAIT (client->asking);
}

/* ---- what the optimizer has lost ---- */

Test (client_life, an_ack_that_lacks_what_was_settled_begins_a_new_life)
{
    uint64_t sequence = 0;
    roll_back ();
    char first[sizeof fake.nonce];
    memcpy (first, fake.nonce, sizeof first);
    cr_assert_eq (push_briefly (0), GQ_TIMEOUT, "nothing is sent in a life that is over");
    grant (1);
    cr_assert_str_neq (fake.nonce, first, "another hello than the first");
    const gq_client_counts counts = gq_client_count (client);
    cr_assert_eq (counts.rolled_back, 1);
    cr_assert (counts.pushed == 3 && counts.acknowledged == 2 && counts.dropped == 1);
    cr_assert_eq (gq_client_wait (client, 3), GQ_OK, "the dropped one is not waited for");

    cr_assert_not_null (gq_client_reserve (client));
    cr_assert_eq (gq_client_commit (client, 1, &sequence), GQ_OK);
    cr_assert_eq (sequence, 4, "for the caller, numbers go on");
    cr_assert_eq (gradient_of (1).sequence, 1, "and begin anew on the wire");
    fake_weights (&fake, FAKE_TERM + 1, FAKE_VERSION, 2);
    const gq_ack ack = {.cumulative = 1};
    gq_frame frame = fake_frame (&fake, GQ_KIND_ACK);
    frame.term += 1;
    frame.epoch += 1;
    AWAIT ((fake_ack_frame (&fake, &frame, &ack), gq_client_count (client).acknowledged == 3));
    client->config.timeout_ms = 0;
    cr_assert_eq (gq_client_close (&client), GQ_OK);
    fake_end (&fake);
}

Test (client_life, an_ack_of_a_later_life_that_holds_all_changes_nothing)
{
    gq_client_config config = quick ();
    config.window = 4;
    begin (config);
    for (int i = 0; i < 4; i++)
        cr_assert_eq (push (0), GQ_OK);
    ack_later (0, 1, 4); /* 1 and 4 */
    AWAIT (gq_client_count (client).acknowledged == 2);
    ack_later (1, 1, 4 + 2); /* 3 as well */
    AWAIT (gq_client_count (client).acknowledged == 3);
    cr_assert_not (client->asking);
    ack_later (0, 4, 0); /* last words of the first life: what they say, the next one has lost */
    let_arrive ();
    cr_assert_eq (gq_client_count (client).acknowledged, 3);
    ack_later (2, 2, 1 << 1); /* 2 and 4, without 3 */
    AWAIT (client->asking);
    end ();
}

Test (client_life, its_own_new_epoch_does_not_fence_it_and_a_foreign_one_does)
{
    roll_back ();
    ack_epoch (FAKE_EPOCH +
               1); /* the optimizer granted it, and says so before the answer is here */
    let_arrive ();
    cr_assert_eq (push_briefly (0), GQ_TIMEOUT);
    grant (1);
    cr_assert_eq (push (0), GQ_OK);
    ack_epoch (FAKE_EPOCH + 2);
    AWAIT ((ack_epoch (FAKE_EPOCH + 2), gq_client_ended (client) == GQ_FENCED));
    cr_assert_eq (push_briefly (0), GQ_FENCED);
    end ();
}

Test (client_life, who_took_the_id_while_it_asked_fences_it)
{
    roll_back ();
    ack_epoch (FAKE_EPOCH + 2);
    AWAIT (client->higher_epoch == FAKE_EPOCH + 2);
    grant (1);
    cr_assert_eq (push_briefly (0), GQ_FENCED);
    end ();
}

/* Weights of a later life are here, and for seconds no acknowledgement came, as if. */
static void
become_unknown (void)
{
    begin (quick ());
    cr_assert_eq (push (7), GQ_OK);
    fake_weights (&fake, FAKE_TERM + 1, FAKE_VERSION - 9, 2);
    AWAIT (client->unknown_ns != 0);
    cr_assert_not (client->asking, "it may still be named");
    client->unknown_ns -= 5000 * MS_NS;
    weights ();
    cr_assert (client->asking);
}

Test (client_life, an_optimizer_that_does_not_know_it_gives_it_a_new_life)
{
    become_unknown ();
    grant (1);
    cr_assert_eq (gq_client_count (client).rolled_back, 1);
    cr_assert_eq (gq_client_count (client).dropped, 1);
    cr_assert_eq (push (0), GQ_OK);
    cr_assert_eq (gradient_of (1).sequence, 1);
    end ();
}

Test (client_life, a_suspicion_costs_nothing_when_the_optimizer_knows_it)
{
    char first[sizeof fake.nonce];
    become_unknown ();
    memcpy (first, fake.nonce, sizeof first);
    grant (0); /* the epoch that it has */
    cr_assert_str_eq (fake.nonce, first);
    const gq_client_counts counts = gq_client_count (client);
    cr_assert (counts.rolled_back == 0 && counts.dropped == 0);
    ack_later (1, 1, 0);
    AWAIT (gq_client_count (client).acknowledged == 1);
    end ();
}

Test (client_life, closing_does_not_wait_for_what_is_lost)
{
    roll_back ();
    client->config.timeout_ms = -1;
    cr_assert_eq (gq_client_close (&client), GQ_TIMEOUT);
    fake_end (&fake);
}

Test (client_life, closing_gives_up_in_time_and_says_so)
{
    begin (quick ());
    cr_assert_eq (push (0), GQ_OK); /* held for a step that is never complete */
    client->config.timeout_ms = FAKE_QUIET_MS;
    cr_assert_eq (gq_client_close (&client), GQ_TIMEOUT);
    fake_end (&fake);
}

/* ---- weights, while the caller computes ---- */

/* The version that waits for the caller's next look, 0: none. */
static uint64_t
waiting_version (void)
{
    gq_frame frame = {.version = 0};
    pthread_mutex_lock (&client->lock);
    (void)!gq_frame_decode (zmq_msg_data (&client->arrived), zmq_msg_size (&client->arrived),
                            &frame);
    pthread_mutex_unlock (&client->lock);
    return frame.version;
}

Test (client_life, the_first_look_after_long_computing_gives_the_newest_weights)
{
    enum { ROUNDS = 12, EACH = 500 }; /* more than its socket and the kernel hold */
    begin (quick ());
    for (uint64_t round = 1; round <= ROUNDS; round++) {
        for (uint64_t i = 1; i <= EACH; i++)
            fake_weights (&fake, FAKE_TERM, FAKE_VERSION + (round - 1) * EACH + i, 3);
        const uint64_t end_ns = gq_now_ns () + FAKE_WAIT_MS * MS_NS;
        while (waiting_version () != FAKE_VERSION + round * EACH)
            cr_assert (gq_now_ns () < end_ns, "nobody empties the socket");
    }
    cr_assert_eq (weights ().version, FAKE_VERSION + ROUNDS * EACH);
    end ();
}

Test (client_life, last_words_of_one_optimizer_do_not_hide_the_first_of_the_next)
{
    begin (quick ());
    fake_weights (&fake, FAKE_TERM + 1, FAKE_VERSION, 3);
    for (const uint64_t end_ns = gq_now_ns () + FAKE_WAIT_MS * MS_NS; waiting_version () == 0;)
        cr_assert (gq_now_ns () < end_ns);
    fake_weights (&fake, FAKE_TERM, FAKE_VERSION + 7, 4);
    let_arrive ();
    cr_assert_eq (weights ().term, FAKE_TERM + 1);
    end ();
}

/* ---- connections ---- */

Test (client_life, what_the_broker_remembers_is_no_sign_of_life)
{
    gq_frame frame;
    begin (quick ());
    fake_weights (&fake, FAKE_TERM, FAKE_VERSION + 1, 3);
    AWAIT (weights ().version == FAKE_VERSION + 1);
    const uint64_t heard_ns = client->heard_ns;
    fake_weights (&fake, FAKE_TERM, FAKE_VERSION + 1, 3); /* to the last byte */
    let_arrive ();
    cr_assert_eq (client->heard_ns, heard_ns);
    const float values[FAKE_COUNT] = {0};
    frame = fake_frame (&fake, GQ_KIND_WEIGHTS);
    frame.version = FAKE_VERSION + 1;
    frame.sent_ns = 1; /* sent again */
    fake_send (fake.weights, &frame, values);
    AWAIT (client->heard_ns > heard_ns);
    end ();
}

enum { PLACES = 4 };

/* Somebody else's server in the broker's place: a greeting as ZMTP 3 wants it, then anything. */
static void
be_a_stranger (const char *const suffixes[PLACES])
{
    uint8_t words[64 + 16] = {0xff, [9] = 0x7f, [10] = 3, [12] = 'N', 'U', 'L', 'L', [64] = 4, 14};
    int listeners[PLACES], peers[PLACES];
    for (int i = 0; i < PLACES; i++) {
        struct sockaddr_un at = {.sun_family = AF_UNIX};
        snprintf (at.sun_path, sizeof at.sun_path, "%.60s/%s", fake.directory, suffixes[i]);
        unlink (at.sun_path);
        listeners[i] = socket (AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        peers[i] = -1;
        cr_assert_eq (bind (listeners[i], (struct sockaddr *)&at, sizeof at), 0);
        cr_assert_eq (listen (listeners[i], 8), 0);
    }
    /* Until each of the client's sockets has given the connection up. */
    const uint64_t end_ns = gq_now_ns () + FAKE_WAIT_MS * MS_NS;
    for (int gone = 0; gone < PLACES;) {
        gone = 0;
        cr_assert (gq_now_ns () < end_ns, "the client did not come");
        weights ();
        for (int i = 0; i < PLACES; i++) {
            char byte;
            if (peers[i] == -1) {
                peers[i] = accept4 (listeners[i], NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
                if (peers[i] >= 0)
                    cr_assert_eq (send (peers[i], words, sizeof words, MSG_NOSIGNAL),
                                  (ssize_t)sizeof words);
            }
            ssize_t size = 1;
            while (peers[i] >= 0 && size > 0)
                size = recv (peers[i], &byte, 1, 0);
            gone += size == 0 || (size < 0 && errno == ECONNRESET) ? 1 : 0;
        }
    }
    for (int i = 0; i < PLACES; i++) {
        char path[128];
        snprintf (path, sizeof path, "%s/%s", fake.directory, suffixes[i]);
        close (peers[i]);
        close (listeners[i]);
        unlink (path);
    }
}

Test (client_life, after_a_stranger_in_the_brokers_place_it_finds_the_broker_again)
{
    static const char *const suffixes[PLACES] = {"c", "g", "w", "a"};
    gq_client_config config = quick ();
    config.resend_ms = 100;
    begin (config);
    cr_assert_eq (push (1), GQ_OK);
    cr_assert_eq (gradient_of (0).sequence, 1);
    zmq_close (fake.control);
    zmq_close (fake.gradients);
    zmq_close (fake.weights);
    zmq_close (fake.acks);
    be_a_stranger (suffixes);
    fake.control = fake_socket (&fake, ZMQ_ROUTER, "c");
    fake.gradients = fake_socket (&fake, ZMQ_PULL, "g");
    fake.weights = fake_socket (&fake, ZMQ_XPUB, "w");
    fake.acks = fake_socket (&fake, ZMQ_XPUB, "a");
    client->heard_ns -= 4000 * MS_NS; /* seconds later, as if */
    client->reopened_ns -= 4000 * MS_NS;
    uint64_t version = FAKE_VERSION;
    AWAIT ((fake_weights (&fake, FAKE_TERM, ++version, 2), weights ().version > FAKE_VERSION));
    cr_assert_eq (gradient_of (0).sequence, 1, "what the window keeps came again");
    AWAIT ((ack_later (0, 1, 0), gq_client_count (client).acknowledged == 1));
    client->reported_ns = 0; /* a second later, as if */
    weights ();
    zmq_msg_t peer;
    json_t *report = fake_request (&fake, &peer, FAKE_WAIT_MS);
    cr_assert_not_null (report, "the control socket is deaf");
    json_decref (report);
    zmq_msg_close (&peer);
    end ();
}
