/*
 * What the suites of the client share: one client and the run that it talks to; see fake_run.h.
 * Never waits for ever.
 */
#ifndef GQ_CLIENT_TESTING_H
#define GQ_CLIENT_TESTING_H

#include "fake_run.h"

static fake_run fake;
static gq_client *client;

static inline gq_client_config
quick (void)
{
    gq_client_config config = GQ_CLIENT_CONFIG;
    config.timeout_ms = FAKE_WAIT_MS;
    config.tensors = fake_shapes;
    config.tensor_count = 2;
    return config;
}

/* An open client with the weights of FAKE_VERSION. */
static inline void
begin (gq_client_config config)
{
    gq_error error = {""};
    fake_begin (&fake);
    cr_assert_eq (fake_open (&fake, &client, config, &error), GQ_OK, "%s", error.text);
}

static inline void
end (void)
{
    client->config.timeout_ms = 0; /* what is not acknowledged shall not be waited for */
    gq_client_close (&client);
    cr_assert_null (client);
    fake_end (&fake);
}

static inline gq_weights
weights (void)
{
    gq_weights result;
    cr_assert_eq (gq_client_weights (client, &result), GQ_OK);
    return result;
}

/* Take part in what arrives until `seen` says so, or fail. */
#define AWAIT(seen)                                                                  \
    do {                                                                             \
        const uint64_t await_end = gq_now_ns () + FAKE_WAIT_MS * UINT64_C (1000000); \
        while (!(seen)) {                                                            \
            weights ();                                                              \
            cr_assert (gq_now_ns () < await_end, "waited in vain for " #seen);       \
        }                                                                            \
    } while (0)

/* Long enough for what was sent to arrive: nothing may come of it, so nothing says when it did. */
static inline void
let_arrive (void)
{
    client->config.timeout_ms = FAKE_QUIET_MS;
    cr_assert_neq (gq_client_wait (client, UINT64_MAX), GQ_OK);
    client->config.timeout_ms = FAKE_WAIT_MS;
}

static inline gq_status
push (float value)
{
    float gradient[FAKE_COUNT];
    for (size_t i = 0; i < FAKE_COUNT; i++)
        gradient[i] = value + (float)i;
    return gq_client_push (client, gradient, 9);
}

static inline gq_status
push_briefly (float value)
{
    client->config.timeout_ms = FAKE_QUIET_MS;
    const gq_status status = push (value);
    client->config.timeout_ms = FAKE_WAIT_MS;
    return status;
}

/* An interruption that has come. */
static inline bool
always (void)
{
    return true;
}

#endif
