/*
 * Control requests.  hello and layout are the optimizer's to answer: they are passed on to it with
 * the asker's identity and its answer is passed back.  stats, reports and byes end here.
 *
 * A request that is not understood gets a sentence; bytes that are no JSON object get nothing.
 */
#include "control.h"

#include <jansson.h>

#include "bind.h"
#include "frame.h"
#include "gradients.h"
#include "gradq/gradq.h"
#include "hex.h"
#include "log.h"
#include "registry.h"
#include "relay.h"
#include "socket.h"

#define REQUESTS_MAX 64
#define MS_NS        1000000u
/* Stats wait so long for the optimizer's newest count; from one that is stopped none comes. */
#define ASKED_NS 50000000u

struct gq_broker_control {
    void *router;
    zactor_t *gradients;
    zactor_t *relay;
    gq_near *near;
    const gq_endpoints *endpoints;
    uint64_t frame_bytes_max;
    uint64_t started_ns;
    gq_registry *registry;
    gq_gradients_stats *queue_stats;        /* scratch, large */
    uint64_t malformed;                     /* control messages dropped */
    char asking[REQUESTS_MAX][2 * 256 + 1]; /* peers that wait for stats with a newer count */
    size_t asking_count;
    uint64_t asked_ns; /* since when the first of them waits */
    bool told;         /* the optimizer has said how many it has taken since then */
};

gq_broker_control *
gq_broker_control_new (zsock_t *router, zactor_t *gradients, zactor_t *relay, gq_near *near,
                       const gq_endpoints *endpoints, uint64_t frame_bytes_max, uint64_t now_ns)
{
    gq_broker_control *self = calloc (1, sizeof *self);
    if (self == NULL)
        return NULL;
    *self = (gq_broker_control){.router = zsock_resolve (router),
                                .gradients = gradients,
                                .relay = relay,
                                .near = near,
                                .endpoints = endpoints,
                                .frame_bytes_max = frame_bytes_max,
                                .started_ns = now_ns,
                                .registry = gq_registry_new (),
                                .queue_stats = calloc (1, sizeof *self->queue_stats)};
    if (self->registry == NULL || self->queue_stats == NULL)
        gq_broker_control_free (&self);
    return self;
}

void
gq_broker_control_free (gq_broker_control **control_p)
{
    gq_broker_control *self = *control_p;
    if (self == NULL)
        return;
    gq_registry_free (&self->registry);
    free (self->queue_stats);
    free (self);
    *control_p = NULL;
}

/* Send `object` (borrowed) to the peer.  A peer that is gone or not reading loses it. */
static void
send_to (gq_broker_control *self, const char *peer, const json_t *object)
{
    uint8_t identity[256];
    size_t size = strlen (peer) / 2;
    char *text = json_dumps (object, JSON_COMPACT);
    if (text != NULL && size <= sizeof identity && gq_hex_decode (peer, identity, size) &&
        zmq_send (self->router, identity, size, ZMQ_DONTWAIT | ZMQ_SNDMORE) >= 0)
        (void)!zmq_send (self->router, text, strlen (text), ZMQ_DONTWAIT);
    free (text);
}

/* {"op": op, "ok": false, ...} to the peer; retry: the same request may succeed soon. */
static void
refuse (gq_broker_control *self, const char *peer, const json_t *request, gq_status status,
        bool retry, const char *message)
{
    json_t *answer = json_pack ("{s:b, s:s, s:s, s:b}", "ok", 0, "error", gq_status_name (status),
                                "message", message, "retry", (int)retry);
    json_object_set (answer, "op", json_object_get (request, "op"));
    json_t *nonce = json_object_get (request, "nonce");
    if (nonce != NULL)
        json_object_set (answer, "nonce", nonce);
    send_to (self, peer, answer);
    json_decref (answer);
}

/* Pass a request on to the optimizer, with the asker in "from". */
static void
ask_optimizer (gq_broker_control *self, const char *peer, json_t *request, uint64_t now_ns)
{
    const char *optimizer = gq_registry_peer (self->registry, now_ns);
    if (optimizer == NULL) {
        refuse (self, peer, request, GQ_AGAIN, true,
                "no optimizer is connected to this broker yet; start gradq-optimizer");
        return;
    }
    json_object_set_new (request, "from", json_string (peer));
    send_to (self, optimizer, request);
}

/* Pass the optimizer's answer back to who asked, with the endpoints that only we know. */
static void
answer_asker (gq_broker_control *self, json_t *answer)
{
    const char *to = json_string_value (json_object_get (answer, "to"));
    if (to == NULL)
        return;
    char peer[2 * 256 + 1];
    snprintf (peer, sizeof peer, "%s", to);
    json_object_del (answer, "to");
    json_int_t parameters = json_integer_value (json_object_get (answer, "parameters"));
    uint64_t bytes = GQ_FRAME_HEADER_BYTES + (uint64_t)parameters * sizeof (float);
    if (json_is_true (json_object_get (answer, "ok")) && bytes > self->frame_bytes_max) {
        char message[256];
        snprintf (message, sizeof message,
                  "a frame of this layout has %llu bytes but the broker takes at most %llu; start "
                  "it with a larger --queue-bytes",
                  (unsigned long long)bytes, (unsigned long long)self->frame_bytes_max);
        refuse (self, peer, answer, GQ_LAYOUT, false, message);
        return;
    }
    json_object_set_new (answer, "endpoints",
                         json_pack ("{s:s, s:s, s:s}", "gradients", self->endpoints->gradients_in,
                                    "weights", self->endpoints->weights_out, "acks",
                                    self->endpoints->acks_out));
    send_to (self, peer, answer);
}

static void
take_report (gq_broker_control *self, const char *peer, const json_t *request, uint64_t now_ns)
{
    const char *role = json_string_value (json_object_get (request, "role"));
    bool bye = streq (json_string_value (json_object_get (request, "op")), "bye");
    gq_error error = {""};
    gq_status status = GQ_OK;
    if (role != NULL && streq (role, "optimizer") && bye) {
        if (gq_registry_optimizer_gone (self->registry, peer))
            gq_near_see (self->near, NULL);
        /* Nobody will repeat the final version to a reader that was too slow for it. */
        zstr_send (self->relay, "REPEAT");
    } else if (role != NULL && streq (role, "optimizer")) {
        status = gq_registry_optimizer (self->registry, peer, request, now_ns, &error);
        if (status == GQ_OK)
            gq_near_see (self->near, request);
    } else {
        status = gq_registry_actor (self->registry, request, bye, now_ns);
        if (status != GQ_OK)
            gq_fail (&error, status, "a report needs role \"actor\" and the actor's id");
    }
    if (status != GQ_OK)
        refuse (self, peer, request, status, false, error.text);
}

static void
send_stats (gq_broker_control *self, const char *peer, uint64_t now_ns)
{
    gq_relay_stats relay = {0};
    gq_gradients_stats *stats = self->queue_stats;
    if (!gq_thread_ask (self->gradients, stats, sizeof *stats) ||
        !gq_thread_ask (self->relay, &relay, sizeof relay))
        return;
    const gq_queue_counts *queue = &stats->queue;
    json_t *answer = json_pack (
        "{s:s, s:b, s:s, s:s, s:I, s:{s:I, s:I, s:I, s:I, s:I, s:I, s:I}, s:{s:I, s:I, s:I, s:I}}",
        "op", "stats", "ok", 1, "address", self->endpoints->control, "program",
        "gradq-broker " GQ_VERSION_STRING, "uptime_ms",
        (json_int_t)((now_ns - self->started_ns) / MS_NS), "queue", "depth",
        (json_int_t)queue->depth, "capacity", (json_int_t)queue->capacity, "bytes",
        (json_int_t)queue->bytes, "bytes_capacity", (json_int_t)queue->bytes_capacity, "received",
        (json_int_t)queue->received, "delivered", (json_int_t)queue->delivered, "refused",
        (json_int_t)queue->refused, "relay", "weights", (json_int_t)relay.weights, "acks",
        (json_int_t)relay.acks, "malformed", (json_int_t)relay.malformed, "repeated",
        (json_int_t)relay.repeated);
    json_object_set_new (answer, "control_malformed", json_integer ((json_int_t)self->malformed));
    json_object_set_new (answer, "optimizer", gq_registry_optimizer_json (self->registry, now_ns));
    json_object_set_new (answer, "actors",
                         gq_registry_actors_json (self->registry, stats->actors, now_ns));
    send_to (self, peer, answer);
    json_decref (answer);
}

/* At once when nothing is on its way to the optimizer.  Else its last report may be 10 ms old, in
 * which it takes a hundred: ask for a newer one first. */
static void
answer_stats (gq_broker_control *self, const char *peer, uint64_t now_ns)
{
    gq_gradients_stats *stats = self->queue_stats;
    if (self->asking_count == REQUESTS_MAX ||
        !gq_thread_ask (self->gradients, stats, sizeof *stats) || stats->on_the_way == 0 ||
        zstr_send (self->gradients, "MARK") != 0) {
        send_stats (self, peer, now_ns);
        return;
    }
    if (self->asking_count == 0) {
        self->asked_ns = now_ns;
        self->told = false;
    }
    snprintf (self->asking[self->asking_count++], sizeof self->asking[0], "%s", peer);
}

/* How many gradients the optimizer has taken, for the thread that counts them.  Whoever knows the
 * mark has got gradients: nobody else is asked who he is. */
static void
take_taken (gq_broker_control *self, const json_t *request)
{
    uint8_t report[GQ_TAKEN_BYTES];
    const char *mark = json_string_value (json_object_get (request, "mark"));
    const uint64_t count = (uint64_t)json_integer_value (json_object_get (request, "count"));
    const uint64_t early = (uint64_t)json_integer_value (json_object_get (request, "early"));
    memcpy (report + GQ_MARK_BYTES, &count, sizeof count);
    memcpy (report + GQ_MARK_BYTES + sizeof count, &early, sizeof early);
    if (mark == NULL || !gq_hex_decode (mark, report, GQ_MARK_BYTES)) {
        self->malformed++;
        return;
    }
    zframe_t *frame = zframe_new (report, sizeof report);
    if (zstr_sendm (self->gradients, "TAKEN") == 0)
        zframe_send (&frame, self->gradients, 0);
    zframe_destroy (&frame);
    self->told = true;
}

static void
serve_request (gq_broker_control *self, const char *peer, json_t *request, uint64_t now_ns)
{
    const char *op = json_string_value (json_object_get (request, "op"));
    const char *optimizer = gq_registry_peer (self->registry, now_ns);
    bool from_optimizer = optimizer != NULL && streq (peer, optimizer);
    if (op == NULL)
        refuse (self, peer, request, GQ_INVALID, false, "a request needs an \"op\" string");
    else if (streq (op, "stats"))
        answer_stats (self, peer, now_ns);
    else if (streq (op, "report") || streq (op, "bye"))
        take_report (self, peer, request, now_ns);
    else if (streq (op, "taken"))
        take_taken (self, request);
    else if (from_optimizer)
        answer_asker (self, request);
    else if (streq (op, "hello") || streq (op, "layout"))
        ask_optimizer (self, peer, request, now_ns);
    else
        refuse (self, peer, request, GQ_INVALID, false,
                "unknown op; hello, layout, stats, report and bye are known");
}

/* One request: exactly identity and text.  false: none is waiting. */
static bool
next_request (gq_broker_control *self, uint64_t now_ns)
{
    uint8_t identity[256];
    char peer[2 * sizeof identity + 1];
    int size = zmq_recv (self->router, identity, sizeof identity, ZMQ_DONTWAIT);
    if (size < 0)
        return false;
    zmq_msg_t body;
    zmq_msg_init (&body);
    json_t *request = NULL;
    if (zmq_msg_recv (&body, self->router, ZMQ_DONTWAIT) >= 0 && gq_socket_whole (self->router))
        request = json_loadb (zmq_msg_data (&body), zmq_msg_size (&body), 0, NULL);
    if (json_is_object (request)) {
        gq_hex_encode (identity, (size_t)size, peer);
        serve_request (self, peer, request, now_ns);
    } else {
        self->malformed++;
    }
    json_decref (request);
    zmq_msg_close (&body);
    return true;
}

void
gq_broker_control_serve (gq_broker_control *self, uint64_t now_ns)
{
    for (int i = 0; i < REQUESTS_MAX && next_request (self, now_ns); i++)
        continue;
    if (self->asking_count > 0 && (self->told || now_ns - self->asked_ns >= ASKED_NS)) {
        for (size_t i = 0; i < self->asking_count; i++)
            send_stats (self, self->asking[i], now_ns);
        self->asking_count = 0;
    }
}

bool
gq_broker_control_owes (const gq_broker_control *self)
{
    return self->asking_count > 0;
}
