/*
 * A broker and an optimizer that do only what a test tells them, at the other end of a real
 * client's sockets.  A thread answers while gq_client_open waits; afterwards the test owns the
 * sockets and everything happens on its own thread.  Nothing here waits for ever.
 */
#ifndef GQ_FAKE_RUN_H
#define GQ_FAKE_RUN_H

#include <jansson.h>
#include <pthread.h>
#include <zmq.h>

#include "client_internal.h"
#include "hex.h"
#include "optimizer/lanes.h"
#include "stats.h"
#include "support.h"

enum {
    FAKE_COUNT = 6, /* elements */
    FAKE_ACTOR = 3,
    FAKE_EPOCH = 17,
    FAKE_TERM = 5,
    FAKE_VERSION = 40,
    FAKE_WAIT_MS = 10000, /* for what must happen; a failure */
    FAKE_QUIET_MS = 60    /* for what must not happen */
};

static const gq_tensor_shape fake_shapes[] = {{.name = "w", .rank = 2, .shape = {2, 2}},
                                              {.name = "b", .rank = 1, .shape = {2}}};

typedef struct fake_run {
    char directory[64];
    char address[128];
    void *context, *control, *gradients, *weights, *acks;
    gq_layout layout;
    uint8_t run[GQ_RUN_ID_BYTES];
    pthread_t thread;
    /* What the thread does. */
    const char *answer;     /* to hello, instead of a grant; NULL: grant */
    const char *epoch_text; /* in a grant, instead of FAKE_EPOCH */
    unsigned retries;       /* "not yet" so often before the answer */
    bool other_layout;      /* grant another one than proposed */
    bool no_weights;        /* grant, but publish nothing */
    bool wants_initial;     /* wait for first weights and publish those */
    unsigned hellos;        /* seen */
    char nonce[33];         /* of the last one */
    gq_lanes *lanes;        /* offered by a grant; NULL: none.  The test's */
    uint32_t later;         /* epochs and terms by which a grant is above FAKE_EPOCH, FAKE_TERM */
} fake_run;

/* ---- sending and receiving ---- */

static inline gq_frame
fake_frame (const fake_run *self, gq_frame_kind kind)
{
    gq_frame frame = support_frame (kind, self->layout.digest, FAKE_COUNT);
    memcpy (frame.run, self->run, GQ_RUN_ID_BYTES);
    frame.term = FAKE_TERM;
    frame.version = FAKE_VERSION;
    if (kind == GQ_KIND_ACK) {
        frame.actor = FAKE_ACTOR;
        frame.epoch = FAKE_EPOCH;
    }
    return frame;
}

static inline void
fake_send (void *socket, const gq_frame *frame, const void *payload)
{
    size_t size;
    uint8_t *bytes = support_message (frame, payload, &size);
    cr_assert_eq (zmq_send (socket, bytes, size, 0), (int)size);
    free (bytes);
}

/* Weights that are all `value`. */
static inline void
fake_weights (fake_run *self, uint32_t term, uint64_t version, float value)
{
    gq_frame frame = fake_frame (self, GQ_KIND_WEIGHTS);
    float values[FAKE_COUNT];
    for (size_t i = 0; i < FAKE_COUNT; i++)
        values[i] = value;
    frame.term = term;
    frame.version = version;
    fake_send (self->weights, &frame, values);
}

static inline void
fake_ack_frame (fake_run *self, const gq_frame *frame, const gq_ack *ack)
{
    uint8_t bytes[GQ_ACK_BYTES];
    gq_ack_encode (ack, bytes);
    fake_send (self->acks, frame, bytes);
}

static inline void
fake_ack (fake_run *self, uint64_t cumulative, uint64_t version)
{
    const gq_ack ack = {.cumulative = cumulative};
    gq_frame frame = fake_frame (self, GQ_KIND_ACK);
    frame.version = version;
    fake_ack_frame (self, &frame, &ack);
}

/* What arrives on a socket within wait_ms; false when nothing does. */
static inline bool
fake_receive (void *socket, zmq_msg_t *message, int wait_ms)
{
    zmq_pollitem_t item = {.socket = socket, .events = ZMQ_POLLIN};
    zmq_msg_init (message);
    return zmq_poll (&item, 1, wait_ms) == 1 && zmq_msg_recv (message, socket, ZMQ_DONTWAIT) >= 0;
}

/* The vector f32[FAKE_COUNT] of a message; bf16 is the upper half of a float32. */
static inline void
fake_values (zmq_msg_t *message, const gq_frame *frame, float *values)
{
    const uint8_t *at = (uint8_t *)zmq_msg_data (message) + GQ_FRAME_HEADER_BYTES;
    if (frame->encoding == GQ_ENCODING_F32) {
        memcpy (values, at, FAKE_COUNT * sizeof *values);
        return;
    }
    cr_assert_eq (frame->encoding, GQ_ENCODING_BF16);
    memset (values, 0, FAKE_COUNT * sizeof *values);
    for (size_t i = 0; i < FAKE_COUNT; i++)
        memcpy ((uint8_t *)&values[i] + 2, at + 2 * i, 2);
}

/* The next gradient or offer; values[FAKE_COUNT]. */
static inline gq_frame
fake_gradient (fake_run *self, float *values)
{
    zmq_msg_t message;
    gq_frame frame;
    cr_assert (fake_receive (self->gradients, &message, FAKE_WAIT_MS), "no gradient came");
    cr_assert_eq (gq_frame_decode (zmq_msg_data (&message), zmq_msg_size (&message), &frame),
                  GQ_OK);
    cr_assert_eq (gq_frame_check_payload (zmq_msg_data (&message), zmq_msg_size (&message)), GQ_OK);
    cr_assert_eq (frame.count, FAKE_COUNT);
    fake_values (&message, &frame, values);
    zmq_msg_close (&message);
    return frame;
}

/* The next control request, with who asked in *peer.  NULL: none within wait_ms. */
static inline json_t *
fake_request (fake_run *self, zmq_msg_t *peer, int wait_ms)
{
    zmq_msg_t body;
    if (!fake_receive (self->control, peer, wait_ms))
        return NULL;
    cr_assert (fake_receive (self->control, &body, FAKE_WAIT_MS));
    json_t *request = json_loadb (zmq_msg_data (&body), zmq_msg_size (&body), 0, NULL);
    zmq_msg_close (&body);
    cr_assert (json_is_object (request));
    return request;
}

/* ---- the thread ---- */

static inline json_t *
fake_grant (const fake_run *self, const json_t *request)
{
    char run[2 * GQ_RUN_ID_BYTES + 1], data[3][128];
    static const char *const suffixes[] = {"g", "w", "a"};
    for (size_t i = 0; i < 3; i++)
        snprintf (data[i], sizeof data[i], "ipc://%s/%s", self->directory, suffixes[i]);
    gq_hex_encode (self->run, GQ_RUN_ID_BYTES, run);
    json_t *layout = gq_layout_to_json (&self->layout);
    if (self->other_layout)
        json_array_remove (layout, 0);
    json_t *answer = json_pack (
        "{s:s, s:b, s:s, s:O, s:i, s:i, s:i, s:i, s:b, s:o, s:{s:s, s:s, s:s}}", "op", "hello",
        "ok", 1, "run", run, "nonce", json_object_get (request, "nonce"), "actor", FAKE_ACTOR,
        "epoch", (int)(FAKE_EPOCH + self->later), "term", (int)(FAKE_TERM + self->later),
        "max_staleness", 4, "need_weights", (int)self->wants_initial, "layout", layout, "endpoints",
        "gradients", data[0], "weights", data[1], "acks", data[2]);
    if (self->epoch_text != NULL)
        json_object_set_new (answer, "epoch", json_loads (self->epoch_text, JSON_DECODE_ANY, NULL));
    if (self->lanes != NULL) {
        json_int_t window = json_integer_value (json_object_get (request, "window"));
        const char *slots = gq_lanes_grant (self->lanes, FAKE_ACTOR, FAKE_EPOCH + self->later,
                                            (uint32_t)window, NULL);
        json_object_set_new (
            answer, "shm",
            json_pack ("{s:s, s:s}", "slots", slots, "board", gq_lanes_board_path (self->lanes)));
    }
    return answer;
}

/* Answer one request; true: the client was granted what it asked for. */
static inline bool
fake_answer (fake_run *self, zmq_msg_t *peer, const json_t *request)
{
    if (strcmp (json_string_value (json_object_get (request, "op")), "hello") != 0)
        return false;
    const bool retry = self->hellos++ < self->retries;
    snprintf (self->nonce, sizeof self->nonce, "%s",
              json_string_value (json_object_get (request, "nonce")));
    json_t *answer = retry ? json_pack ("{s:s, s:b, s:b, s:s}", "op", "hello", "ok", 0, "retry", 1,
                                        "message", "not yet, says the test")
                           : fake_grant (self, request);
    char *text =
        self->answer != NULL && !retry ? strdup (self->answer) : json_dumps (answer, JSON_COMPACT);
    zmq_send (self->control, zmq_msg_data (peer), zmq_msg_size (peer), ZMQ_SNDMORE);
    zmq_send (self->control, text, strlen (text), 0);
    free (text);
    json_decref (answer);
    return !retry && self->answer == NULL;
}

/* The two subscriptions, and weights on the one for them. */
static inline void
fake_publish_first (fake_run *self)
{
    zmq_msg_t topic;
    if (self->lanes == NULL) {
        if (!fake_receive (self->weights, &topic, FAKE_WAIT_MS))
            return; /* a client that refuses the grant does not subscribe */
        zmq_msg_close (&topic);
    }
    if (self->wants_initial) {
        float values[FAKE_COUNT];
        gq_frame frame = fake_gradient (self, values);
        cr_assert_eq (frame.kind, GQ_KIND_INIT);
        frame = fake_frame (self, GQ_KIND_WEIGHTS);
        frame.version = 0;
        fake_send (self->weights, &frame, values);
    } else if (!self->no_weights && self->lanes == NULL) {
        fake_weights (self, FAKE_TERM, FAKE_VERSION, 1);
    }
    cr_assert (fake_receive (self->acks, &topic, FAKE_WAIT_MS), "no subscription to acks");
    cr_assert_eq (zmq_msg_size (&topic), 1 + GQ_TOPIC_ACTOR_BYTES);
    zmq_msg_close (&topic);
}

/* Requests until one is granted, or until the test thread says that it is enough by closing. */
static inline void *
fake_serve (void *argument)
{
    fake_run *self = argument;
    bool granted = false;
    for (bool more = true; more && !granted;) {
        zmq_msg_t peer;
        json_t *request = fake_request (self, &peer, FAKE_WAIT_MS);
        if (request != NULL) {
            more = strcmp (json_string_value (json_object_get (request, "op")), "stop") != 0;
            granted = more && fake_answer (self, &peer, request);
        } else {
            more = false;
        }
        json_decref (request);
        zmq_msg_close (&peer);
    }
    if (granted && !self->other_layout && self->epoch_text == NULL)
        fake_publish_first (self);
    return NULL;
}

/* ---- beginning and ending ---- */

static inline void *
fake_socket (const fake_run *self, int type, const char *suffix)
{
    const int linger_ms = 0;
    char endpoint[128];
    void *socket = zmq_socket (self->context, type);
    snprintf (endpoint, sizeof endpoint, "ipc://%s/%s", self->directory, suffix);
    zmq_setsockopt (socket, ZMQ_LINGER, &linger_ms, sizeof linger_ms);
    cr_assert_eq (zmq_bind (socket, endpoint), 0, "%s", endpoint);
    return socket;
}

static inline void
fake_begin (fake_run *self)
{
    support_directory (self->directory);
    snprintf (self->address, sizeof self->address, "ipc://%s/c", self->directory);
    memset (self->run, 0xc3, sizeof self->run);
    cr_assert_eq (gq_layout_init (&self->layout, fake_shapes, 2, NULL), GQ_OK);
    self->context = zmq_ctx_new ();
    self->control = fake_socket (self, ZMQ_ROUTER, "c");
    self->gradients = fake_socket (self, ZMQ_PULL, "g");
    self->weights = fake_socket (self, ZMQ_XPUB, "w");
    self->acks = fake_socket (self, ZMQ_XPUB, "a");
}

/* Open a client against the thread; afterwards the sockets are the test's. */
static inline gq_status
fake_open (fake_run *self, gq_client **client_p, gq_client_config config, gq_error *error)
{
    config.address = self->address;
    cr_assert_eq (pthread_create (&self->thread, NULL, fake_serve, self), 0);
    const gq_status status = gq_client_open (client_p, &config, error);
    if (status != GQ_OK) {
        /* A thread that has not granted still listens. */
        const int linger_ms = 1000;
        void *stop = zmq_socket (self->context, ZMQ_DEALER);
        zmq_setsockopt (stop, ZMQ_LINGER, &linger_ms, sizeof linger_ms);
        zmq_connect (stop, self->address);
        zmq_send (stop, "{\"op\": \"stop\"}", 14, 0);
        zmq_close (stop);
    }
    pthread_join (self->thread, NULL);
    return status;
}

static inline void
fake_end (fake_run *self)
{
    zmq_close (self->control);
    zmq_close (self->gradients);
    zmq_close (self->weights);
    zmq_close (self->acks);
    zmq_ctx_term (self->context);
    gq_layout_clear (&self->layout);
    support_remove (self->directory);
}

#endif
