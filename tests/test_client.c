/*
 * An open client against a broker and an optimizer that misbehave in every way the protocol lets
 * them: late, silent, wrong, foreign.  See fake_run.h.
 */
#include "client_testing.h"

TestSuite (client, .timeout = 60);

/* ---- weights ---- */

Test (client, weights_never_go_back)
{
    begin (quick ());
    fake_weights (&fake, FAKE_TERM, FAKE_VERSION - 1, 7);
    let_arrive ();
    cr_assert_eq (weights ().version, FAKE_VERSION);
    fake_weights (&fake, FAKE_TERM - 1, FAKE_VERSION + 100, 7);
    let_arrive ();
    cr_assert_eq (weights ().version, FAKE_VERSION);
    cr_assert_eq (weights ().data[0], 1);
    fake_weights (&fake, FAKE_TERM, FAKE_VERSION + 1, 2);
    AWAIT (weights ().version == FAKE_VERSION + 1);
    cr_assert_eq (weights ().data[FAKE_COUNT - 1], 2);
    fake_weights (&fake, FAKE_TERM + 1, 3, 4); /* a later life, from an older checkpoint */
    AWAIT (weights ().term == FAKE_TERM + 1);
    cr_assert_eq (weights ().version, 3);
    cr_assert_eq (weights ().data[0], 4);
    end ();
}

Test (client, bytes_that_are_no_weights_of_this_run_are_dropped)
{
    float values[FAKE_COUNT + 1] = {9, 9, 9, 9, 9, 9, 9};
    begin (quick ());
    for (int i = 0; i < 6; i++) {
        gq_frame frame = fake_frame (&fake, GQ_KIND_WEIGHTS);
        size_t size;
        frame.version = FAKE_VERSION + 1;
        frame.digest += i == 0 ? 1 : 0;
        frame.run[0] ^= i == 1 ? 1 : 0;
        if (i == 2)
            frame.count = FAKE_COUNT - 1, frame.payload_bytes -= 4;
        uint8_t *bytes = support_message (&frame, values, &size);
        bytes[size - 1] ^= i == 3 ? 1 : 0;
        bytes[40] ^= i == 4 ? 1 : 0;
        zmq_send (fake.weights, bytes, i == 5 ? size - 1 : size, 0);
        free (bytes);
        let_arrive ();
        cr_assert_eq (weights ().version, FAKE_VERSION, "case %d", i);
        client->foreign_ns = 0; /* of case 1; another test is about that */
    }
    fake_weights (&fake, FAKE_TERM, FAKE_VERSION + 1, 2);
    AWAIT (weights ().version == FAKE_VERSION + 1);
    end ();
}

/* ---- gradients ---- */

Test (client, a_gradient_says_who_sent_it_and_from_what_it_was_computed)
{
    float values[FAKE_COUNT];
    begin (quick ());
    weights ();
    fake_weights (&fake, FAKE_TERM, FAKE_VERSION + 1, 2);
    /* Arrived, but not taken by the caller: the next gradient does not come from it. */
    let_arrive ();
    cr_assert_eq (client->version, FAKE_VERSION + 1);
    cr_assert_eq (push (10), GQ_OK);
    weights ();
    cr_assert_eq (push (20), GQ_OK);
    for (uint64_t i = 1; i <= 2; i++) {
        const gq_frame frame = fake_gradient (&fake, values);
        cr_assert_eq (frame.kind, GQ_KIND_GRADIENT);
        cr_assert (frame.actor == FAKE_ACTOR && frame.epoch == FAKE_EPOCH);
        cr_assert_eq (frame.sequence, i);
        cr_assert_eq (frame.term, FAKE_TERM);
        cr_assert_eq (frame.version, FAKE_VERSION + i - 1);
        cr_assert_eq (frame.samples, 9);
        cr_assert_eq (frame.digest, fake.layout.digest);
        cr_assert_arr_eq (frame.run, fake.run, GQ_RUN_ID_BYTES);
        for (size_t k = 0; k < FAKE_COUNT; k++)
            cr_assert_eq (values[k], 10 * (float)i + (float)k);
    }
    end ();
}

Test (client, no_more_than_the_window_is_on_the_way)
{
    gq_client_config config = quick ();
    config.window = 3;
    begin (config);
    for (int i = 0; i < 3; i++)
        cr_assert_eq (push (0), GQ_OK);
    cr_assert_eq (push_briefly (0), GQ_TIMEOUT);
    cr_assert_eq (gq_client_count (client).pushed, 3);
    fake_ack (&fake, 2, FAKE_VERSION);
    cr_assert_eq (push (0), GQ_OK);
    cr_assert_eq (push (0), GQ_OK);
    cr_assert_eq (push_briefly (0), GQ_TIMEOUT);
    cr_assert_eq (gq_client_count (client).acknowledged, 2);
    end ();
}

Test (client, a_commit_that_fails_keeps_what_was_reserved)
{
    float values[FAKE_COUNT];
    gq_client_config config = quick ();
    config.window = 1;
    begin (config);
    uint64_t sequence = 0;
    cr_assert_eq (gq_client_commit (client, 1, NULL), GQ_INVALID, "nothing reserved");
    cr_assert_not_null (gq_client_reserve (client));
    cr_assert_eq (gq_client_commit (client, 0, NULL), GQ_INVALID, "no samples");
    cr_assert_eq (push (0), GQ_OK); /* the same buffer */
    fake_gradient (&fake, values);
    float *buffer = gq_client_reserve (client);
    for (size_t i = 0; i < FAKE_COUNT; i++)
        buffer[i] = 5;
    client->config.timeout_ms = FAKE_QUIET_MS;
    cr_assert_eq (gq_client_commit (client, 1, &sequence), GQ_TIMEOUT);
    client->config.timeout_ms = -1;
    client->config.interrupted = always;
    cr_assert_eq (gq_client_commit (client, 1, &sequence), GQ_CLOSED);
    client->config.interrupted = NULL;
    client->config.timeout_ms = FAKE_WAIT_MS;
    cr_assert_eq (gq_client_reserve (client), buffer);
    fake_ack (&fake, 1, FAKE_VERSION);
    cr_assert_eq (gq_client_commit (client, 1, &sequence), GQ_OK);
    cr_assert_eq (sequence, 2);
    fake_gradient (&fake, values);
    cr_assert_eq (values[0], 5);
    end ();
}

Test (client, while_nobody_takes_gradients_push_times_out_and_counts_none)
{
    gq_client_config config = quick ();
    config.window = GQ_WINDOW_MAX; /* it is not the window that ends this */
    begin (config);
    zmq_close (fake.gradients);
    AWAIT (push_briefly (0) == GQ_TIMEOUT); /* until the client has seen that its peer is gone */
    const uint64_t pushed = gq_client_count (client).pushed;
    cr_assert_eq (push_briefly (0), GQ_TIMEOUT);
    cr_assert_eq (gq_client_count (client).pushed, pushed);
    fake.gradients = fake_socket (&fake, ZMQ_PULL, "g");
    end ();
}

/* ---- acknowledgements ---- */

static gq_client_config
rounding (void)
{
    gq_client_config config = quick ();
    config.encoding = "bf16";
    return config;
}

Test (client, with_bf16_half_the_bytes_carry_the_rounded_values)
{
    static const float pushed[FAKE_COUNT] = {0x1.01p0f,     0x1.03p0f, -0x1.010002p0f,
                                             0x1.fffffep0f, 0x1p-140f, -0.0f};
    static const float rounded[FAKE_COUNT] = {1, 0x1.04p0f, -0x1.02p0f, 2, 0, -0.0f};
    float values[FAKE_COUNT];
    begin (rounding ());
    for (uint64_t sequence = 1; sequence <= 2; sequence++) {
        cr_assert_eq (gq_client_push (client, pushed, 9), GQ_OK);
        const gq_frame frame = fake_gradient (&fake, values);
        cr_assert_eq (frame.encoding, GQ_ENCODING_BF16);
        cr_assert_eq (frame.payload_bytes, 2 * FAKE_COUNT);
        cr_assert_eq (frame.sequence, sequence);
        cr_assert_arr_eq ((uint8_t *)values, (const uint8_t *)rounded, sizeof rounded);
    }
    end ();
}

/* A socket that has no room is tried more than once, and between two calls the caller may write. */
Test (client, with_bf16_what_is_written_after_a_failed_commit_is_what_goes_out)
{
    float values[FAKE_COUNT] = {0};
    uint64_t sequence = 0;
    gq_client_config config = rounding ();
    config.window = GQ_WINDOW_MAX;
    begin (config);
    zmq_close (fake.gradients);
    AWAIT (push_briefly (1) == GQ_TIMEOUT);
    float *vector = gq_client_reserve (client);
    cr_assert_eq (vector[1], 2, "still what was pushed in vain");
    for (size_t i = 0; i < FAKE_COUNT; i++)
        vector[i] = 64 + (float)i;
    fake.gradients = fake_socket (&fake, ZMQ_PULL, "g");
    cr_assert_eq (gq_client_commit (client, 1, &sequence), GQ_OK);
    while (fake_gradient (&fake, values).sequence != sequence)
        continue;
    for (size_t i = 0; i < FAKE_COUNT; i++)
        cr_assert_eq (values[i], 64 + (float)i);
    end ();
}

Test (client, waits_for_the_weights_that_an_ack_names)
{
    begin (quick ());
    cr_assert_eq (push (0), GQ_OK);
    fake_ack (&fake, 1, FAKE_VERSION + 1);
    AWAIT (gq_client_count (client).acknowledged == 1);
    client->config.timeout_ms = FAKE_QUIET_MS;
    cr_assert_eq (gq_client_wait (client, 1), GQ_TIMEOUT);
    client->config.timeout_ms = FAKE_WAIT_MS;
    fake_weights (&fake, FAKE_TERM, FAKE_VERSION + 1, 2);
    cr_assert_eq (gq_client_wait (client, 1), GQ_OK);
    cr_assert_eq (weights ().version, FAKE_VERSION + 1);
    end ();
}

Test (client, waiting_can_be_interrupted)
{
    begin (quick ());
    cr_assert_eq (push (0), GQ_OK);
    client->config.timeout_ms = -1;
    client->config.interrupted = always;
    cr_assert_eq (gq_client_wait (client, 1), GQ_CLOSED);
    end ();
}

Test (client, refusals_are_counted_with_the_last_reason)
{
    const gq_ack ack = {
        .cumulative = 2, .refused = 1, .refused_sequence = 1, .refused_reason = GQ_STALE};
    begin (quick ());
    cr_assert_eq (push (0), GQ_OK);
    cr_assert_eq (push (0), GQ_OK);
    const gq_frame frame = fake_frame (&fake, GQ_KIND_ACK);
    fake_ack_frame (&fake, &frame, &ack);
    cr_assert_eq (gq_client_wait (client, 2), GQ_OK);
    cr_assert_eq (gq_client_count (client).refused, 1);
    cr_assert_eq (gq_client_count (client).refused_reason, GQ_STALE);
    cr_assert_eq (gq_client_count (client).acknowledged, 2);
    end ();
}

Test (client, acks_that_are_not_for_it_or_say_too_much_are_dropped)
{
    begin (quick ());
    cr_assert_eq (push (0), GQ_OK);
    cr_assert_eq (push (0), GQ_OK);
    for (int i = 0; i < 5; i++) {
        gq_ack ack = {.cumulative = i == 0 ? 3 : 2};
        gq_frame frame = fake_frame (&fake, GQ_KIND_ACK);
        uint8_t payload[GQ_ACK_BYTES];
        size_t size;
        frame.epoch -= i == 1 ? 1 : 0;
        frame.digest += i == 2 ? 1 : 0;
        frame.run[0] ^= i == 3 ? 1 : 0;
        gq_ack_encode (&ack, payload);
        uint8_t *bytes = support_message (&frame, payload, &size);
        bytes[size - 1] ^= i == 4 ? 1 : 0;
        zmq_send (fake.acks, bytes, size, 0);
        free (bytes);
        let_arrive ();
        cr_assert_eq (gq_client_count (client).acknowledged, 0, "case %d", i);
    }
    fake_ack (&fake, 2, FAKE_VERSION);
    AWAIT (gq_client_count (client).acknowledged == 2);
    fake_ack (&fake, 1, FAKE_VERSION);
    let_arrive ();
    cr_assert_eq (gq_client_count (client).acknowledged, 2, "it never falls");
    end ();
}

/* Number 1 is lost, and comes when 64 are given out: then it waits for its step. */
Test (client, goes_on_behind_a_gradient_that_came_late_and_waits_for_its_step)
{
    gq_ack ack = {.beyond = 0};
    begin (quick ());
    const gq_frame frame = fake_frame (&fake, GQ_KIND_ACK);
    for (uint64_t n = 1; n <= 64; n++) {
        cr_assert_eq (push (0), GQ_OK);
        ack.beyond |= n == 1 ? 0 : UINT64_C (1) << (n - 1);
        fake_ack_frame (&fake, &frame, &ack);
        AWAIT (gq_client_count (client).acknowledged == n - 1);
    }
    client->config.timeout_ms = FAKE_QUIET_MS;
    cr_assert_eq (push (0), GQ_TIMEOUT, "the optimizer would not take 65");
    client->config.timeout_ms = FAKE_WAIT_MS;
    ack.held = 64;
    fake_ack_frame (&fake, &frame, &ack);
    cr_assert_eq (push (0), GQ_OK);
    cr_assert_eq (gq_client_count (client).acknowledged, 63);
    end ();
}

Test (client, another_run_at_the_address_ends_every_wait_until_ours_is_back)
{
    begin (quick ());
    cr_assert_eq (push (0), GQ_OK);
    fake.run[5] ^= 1;
    fake_weights (&fake, FAKE_TERM, FAKE_VERSION + 1, 2);
    AWAIT (client->foreign_ns != 0);
    cr_assert_eq (push_briefly (0), GQ_OK, "ours was heard a moment ago: the other's last words");
    client->heard_ns -= UINT64_C (10000000000); /* silent for 10 s, as if */
    cr_assert_eq (gq_client_wait (client, 1), GQ_RUN);
    cr_assert_eq (push (0), GQ_RUN);
    cr_assert_eq (weights ().version, FAKE_VERSION);
    fake.run[5] ^= 1;
    fake_ack (&fake, 2, FAKE_VERSION);
    AWAIT (gq_client_count (client).acknowledged == 2);
    cr_assert_eq (push (0), GQ_OK);
    end ();
}

/* ---- reports ---- */

/* The next control request with this op. */
static json_t *
next_request (const char *op)
{
    for (;;) {
        zmq_msg_t peer;
        json_t *request = fake_request (&fake, &peer, FAKE_WAIT_MS);
        cr_assert_not_null (request, "no %s came", op);
        zmq_msg_close (&peer);
        if (strcmp (json_string_value (json_object_get (request, "op")), op) == 0)
            return request;
        json_decref (request);
    }
}

Test (client, reports_its_counts_and_metrics_and_says_bye)
{
    begin (quick ());
    json_decref (next_request ("report")); /* the first goes out while opening */
    for (int i = 0; i < GQ_METRICS_MAX + 3; i++) {
        char name[64];
        snprintf (name, sizeof name, "metric_%d", i);
        gq_client_metric (client, name, i);
    }
    gq_client_metric (client, "metric_1", 1.5);
    gq_client_metric (client, "a name of more bytes than there is room for", 1);
    cr_assert_eq (push (0), GQ_OK);
    client->reported_ns = 0; /* a second later, as if */
    weights ();
    json_t *report = next_request ("report");
    const json_t *metrics = json_object_get (report, "metrics");
    cr_assert_eq (json_integer_value (json_object_get (report, "pushed")), 1);
    cr_assert_eq (json_integer_value (json_object_get (report, "actor")), FAKE_ACTOR);
    cr_assert_eq (json_integer_value (json_object_get (report, "epoch")), FAKE_EPOCH);
    cr_assert_eq (json_object_size (metrics), GQ_METRICS_MAX);
    cr_assert_eq (json_real_value (json_object_get (metrics, "metric_1")), 1.5);
    json_decref (report);
    client->config.timeout_ms = 0;
    gq_client_close (&client);
    json_decref (next_request ("bye"));
    fake_end (&fake);
}
