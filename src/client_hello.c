/*
 * The actor's side of the control plane: hello, reports, bye.  docs/PROTOCOL.md has the fields.
 *
 * A hello is repeated until it is answered; the nonce makes every repetition the same request, so
 * a lost answer costs nothing.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "client_internal.h"
#include "endpoint.h"
#include "frame.h"
#include "hex.h"
#include "socket.h"
#include "stats.h"

#define MS_NS 1000000u
/* Ask again after this long without an answer: a broker may have died with the question. */
#define REPEAT_MS 1000
/* Ask again this long after "not yet". */
#define RETRY_MS 100

static json_t *
hello_request (const gq_client *client, const char *nonce, const gq_layout *proposed)
{
    json_t *request =
        json_pack ("{s:s, s:i, s:s, s:s, s:[s]}", "op", "hello", "protocol", GQ_PROTOCOL_VERSION,
                   "role", "actor", "nonce", nonce, "lanes", gq_lane_inline.name);
    if (request == NULL)
        return NULL;
    if (client->config.actor != GQ_ACTOR_ANY)
        json_object_set_new (request, "actor", json_integer (client->config.actor));
    if (proposed->tensor_count > 0) {
        json_object_set_new (request, "layout", gq_layout_to_json (proposed));
        json_object_set_new (request, "initial", json_boolean (client->config.initial != NULL));
    }
    return request;
}

/* A broker bound to every interface names the host '*': put in the one that we reached it by. */
static void
resolve_host (char endpoint[GQ_ENDPOINT_MAX], const char *offered, const char *address)
{
    static const char *const any[] = {"tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:"};
    const char *colon = strrchr (address, ':');
    for (size_t i = 0; i < sizeof any / sizeof any[0]; i++)
        if (strncmp (offered, any[i], strlen (any[i])) == 0 && colon != NULL) {
            snprintf (endpoint, GQ_ENDPOINT_MAX, "%.*s:%s", (int)(colon - address), address,
                      offered + strlen (any[i]));
            return;
        }
    snprintf (endpoint, GQ_ENDPOINT_MAX, "%s", offered);
}

static gq_status
connect_data (gq_client *client, const json_t *endpoints, gq_error *error)
{
    const char *names[] = {"gradients", "weights", "acks"};
    char texts[3][GQ_ENDPOINT_MAX];
    for (size_t i = 0; i < 3; i++) {
        const char *offered = json_string_value (json_object_get (endpoints, names[i]));
        if (offered == NULL || strlen (offered) >= GQ_ENDPOINT_MAX)
            return gq_fail (error, GQ_MALFORMED, "the broker's hello lacks the %s endpoint",
                            names[i]);
        resolve_host (texts[i], offered, client->config.address);
    }
    int64_t frame_bytes =
        (int64_t)(GQ_FRAME_HEADER_BYTES + client->layout.element_count * sizeof (float));
    /* Small buffers make the broker's depth the true one: what is not in its queue is still here.
     * The linger lets a last gradient out that close no longer waits for. */
    const gq_socket_options push = {.type = ZMQ_PUSH,
                                    .send_hwm = 1,
                                    .receive_hwm = 1,
                                    .buffer_bytes = 64 * 1024,
                                    .message_bytes_max = GQ_CONTROL_BYTES_MAX,
                                    .linger_ms = 1000};
    const gq_socket_options weights = {.type = ZMQ_SUB,
                                       .send_hwm = 1,
                                       .receive_hwm = 1,
                                       .message_bytes_max = frame_bytes,
                                       .conflate = true};
    /* Not conflated: ZMQ_CONFLATE loses the newest message when it arrives while the reader takes
     * the one before it.  For weights the next version heals that; an actor with a full window
     * waits for the very acknowledgement that is lost. */
    const gq_socket_options acks = {.type = ZMQ_SUB,
                                    .send_hwm = 1,
                                    .receive_hwm = 1024,
                                    .message_bytes_max = GQ_FRAME_HEADER_BYTES + GQ_ACK_BYTES};
    client->gradients = gq_socket_connect (client->context, &push, texts[0], error);
    client->weights = gq_socket_connect (client->context, &weights, texts[1], error);
    client->acks = gq_socket_connect (client->context, &acks, texts[2], error);
    if (client->gradients == NULL || client->weights == NULL || client->acks == NULL)
        return GQ_INVALID;
    uint8_t topic[GQ_TOPIC_ACTOR_BYTES];
    gq_topic (GQ_KIND_WEIGHTS, 0, topic);
    zmq_setsockopt (client->weights, ZMQ_SUBSCRIBE, topic, GQ_TOPIC_KIND_BYTES);
    gq_topic (GQ_KIND_ACK, client->actor, topic);
    zmq_setsockopt (client->acks, ZMQ_SUBSCRIBE, topic, GQ_TOPIC_ACTOR_BYTES);
    return GQ_OK;
}

/* The refusal in an {"ok": false} answer as a status; GQ_AGAIN when it says "retry". */
static gq_status
refusal (const json_t *answer, gq_error *error)
{
    const char *reason = json_string_value (json_object_get (answer, "error"));
    const char *message = json_string_value (json_object_get (answer, "message"));
    gq_status status = GQ_REFUSED;
    if (json_is_true (json_object_get (answer, "retry")))
        status = GQ_AGAIN;
    else if (reason != NULL && strcmp (reason, gq_status_name (GQ_LAYOUT)) == 0)
        status = GQ_LAYOUT;
    else if (reason != NULL && strcmp (reason, gq_status_name (GQ_INVALID)) == 0)
        status = GQ_INVALID;
    return gq_fail (error, status, "%s", message != NULL ? message : gq_status_text (status));
}

/* Take over what a granting answer says. */
static gq_status
take_grant (gq_client *client, const json_t *answer, const gq_layout *proposed, gq_error *error)
{
    const char *run = json_string_value (json_object_get (answer, "run"));
    json_int_t actor = json_integer_value (json_object_get (answer, "actor"));
    json_int_t epoch = json_integer_value (json_object_get (answer, "epoch"));
    const json_t *staleness = json_object_get (answer, "max_staleness");
    if (run == NULL || !gq_hex_decode (run, client->run, GQ_RUN_ID_BYTES) || actor < 0 ||
        actor >= GQ_ACTORS_MAX || epoch < 1 || epoch > UINT32_MAX)
        return gq_fail (error, GQ_MALFORMED, "the broker's hello answer lacks run, actor or epoch");
    gq_status status =
        gq_layout_from_json (&client->layout, json_object_get (answer, "layout"), error);
    if (status != GQ_OK)
        return status;
    if (proposed->tensor_count > 0 && proposed->digest != client->layout.digest)
        return gq_fail (error, GQ_LAYOUT, "%s", gq_status_text (GQ_LAYOUT));
    gq_hex_encode (client->run, GQ_RUN_ID_BYTES, client->run_text);
    client->actor = (uint32_t)actor;
    client->epoch = (uint32_t)epoch;
    client->max_staleness =
        json_is_integer (staleness) ? (uint64_t)json_integer_value (staleness) : UINT64_MAX;
    client->need_weights = json_is_true (json_object_get (answer, "need_weights"));
    return connect_data (client, json_object_get (answer, "endpoints"), error);
}

/* The next answer to our hello, if one is here: GQ_AGAIN when not, or when it says "not yet". */
static gq_status
take_answer (gq_client *client, const char *nonce, const gq_layout *proposed, gq_error *error)
{
    zmq_msg_t message;
    zmq_msg_init (&message);
    json_t *answer = NULL;
    if (zmq_msg_recv (&message, client->control, ZMQ_DONTWAIT) >= 0 &&
        gq_socket_whole (client->control))
        answer = json_loadb (zmq_msg_data (&message), zmq_msg_size (&message), 0, NULL);
    zmq_msg_close (&message);
    const char *op = json_string_value (json_object_get (answer, "op"));
    const char *to = json_string_value (json_object_get (answer, "nonce"));
    gq_status status = GQ_AGAIN;
    if (op != NULL && strcmp (op, "hello") == 0 && (to == NULL || strcmp (to, nonce) == 0))
        status = json_is_true (json_object_get (answer, "ok"))
                     ? take_grant (client, answer, proposed, error)
                     : refusal (answer, error);
    json_decref (answer);
    return status;
}

/* Ask until granted, refused or out of time. */
static gq_status
ask (gq_client *client, const char *text, const char *nonce, const gq_layout *proposed,
     uint64_t deadline_ns, gq_error *error)
{
    uint64_t ask_ns = 0; /* when to ask (again) */
    bool answered = false;
    gq_fail (error, GQ_TIMEOUT, "%s answers, but not to a hello; is it a gradq broker's address?",
             client->config.address); /* until an answer says more */
    for (;;) {
        uint64_t now_ns = gq_now_ns ();
        if (gq_client_interrupted (client))
            return gq_fail (error, GQ_CLOSED, "interrupted while waiting for the broker");
        if (now_ns >= deadline_ns)
            return answered ? GQ_TIMEOUT
                            : gq_fail (error, GQ_UNREACHABLE,
                                       "no broker answers at %s; start it, or correct --address",
                                       client->config.address);
        if (now_ns >= ask_ns)
            ask_ns = gq_socket_send (client->control, text, strlen (text)) == GQ_OK
                         ? now_ns + (uint64_t)REPEAT_MS * MS_NS
                         : now_ns + 10u * MS_NS;
        uint64_t until = ask_ns < deadline_ns ? ask_ns : deadline_ns;
        uint64_t left_ms = (until - now_ns) / MS_NS + 1;
        zmq_pollitem_t item = {.socket = client->control, .events = ZMQ_POLLIN};
        if (zmq_poll (&item, 1, left_ms < GQ_SLICE_MS ? (long)left_ms : GQ_SLICE_MS) <= 0)
            continue;
        gq_status status = take_answer (client, nonce, proposed, error);
        if (status != GQ_AGAIN)
            return status;
        answered = true;
        ask_ns = gq_now_ns () + (uint64_t)RETRY_MS * MS_NS;
    }
}

gq_status
gq_client_hello (gq_client *client, uint64_t deadline_ns, gq_error *error)
{
    gq_endpoints endpoints;
    gq_status status = gq_endpoints_derive (&endpoints, client->config.address, error);
    if (status != GQ_OK)
        return status;
    const gq_socket_options dealer = {.type = ZMQ_DEALER,
                                      .send_hwm = 16,
                                      .receive_hwm = 16,
                                      .message_bytes_max = GQ_CONTROL_BYTES_MAX,
                                      .linger_ms = 200};
    client->control = gq_socket_connect (client->context, &dealer, endpoints.control, error);
    if (client->control == NULL)
        return GQ_INVALID;
    gq_layout proposed = {0};
    if (client->config.tensors != NULL) {
        status =
            gq_layout_init (&proposed, client->config.tensors, client->config.tensor_count, error);
        if (status != GQ_OK)
            return status;
    }
    uint8_t nonce[16];
    char nonce_text[2 * sizeof nonce + 1];
    if (getrandom (nonce, sizeof nonce, 0) != sizeof nonce)
        status = gq_fail (error, GQ_IO, "the system gives no random bytes");
    gq_hex_encode (nonce, sizeof nonce, nonce_text);
    json_t *request = hello_request (client, nonce_text, &proposed);
    char *text = request == NULL ? NULL : json_dumps (request, JSON_COMPACT);
    json_decref (request);
    if (text == NULL)
        status = gq_fail (error, GQ_MEMORY, "out of memory");
    if (status == GQ_OK)
        status = ask (client, text, nonce_text, &proposed, deadline_ns, error);
    free (text);
    gq_layout_clear (&proposed);
    return status;
}

void
gq_client_tell (gq_client *client, const char *op)
{
    const gq_client_counts counts = gq_client_count (client);
    json_t *metrics = json_object ();
    for (size_t i = 0; i < client->metric_count; i++)
        json_object_set_new (metrics, client->metrics[i].name,
                             json_real (client->metrics[i].value));
    json_t *request = json_pack (
        "{s:s, s:s, s:s, s:i, s:I, s:I, s:I, s:I, s:I, s:o}", "op", op, "role", "actor", "run",
        client->run_text, "actor", (int)client->actor, "epoch", (json_int_t)client->epoch, "pushed",
        (json_int_t)counts.pushed, "acknowledged", (json_int_t)counts.acknowledged, "refused",
        (json_int_t)counts.refused, "resent", (json_int_t)counts.resent, "metrics", metrics);
    char *text = request == NULL ? NULL : json_dumps (request, JSON_COMPACT);
    json_decref (request);
    if (text != NULL)
        (void)!gq_socket_send (client->control, text, strlen (text)); /* the next one may get out */
    free (text);
}
