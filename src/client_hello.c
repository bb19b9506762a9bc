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
#include "reduce.h"
#include "socket.h"
#include "stats.h"

#define MS_NS 1000000u
/* Ask again after this long without an answer: a broker may have died with the question. */
#define REPEAT_MS 1000
/* Ask again this long after "not yet". */
#define RETRY_MS 100
/* With a new socket after this long without any answer: see gq_client_open_control. */
#define REOPEN_MS 3000

static json_t *
hello_request (const gq_client *client, uint32_t actor, const gq_layout *proposed)
{
    json_t *request = json_pack ("{s:s, s:i, s:s, s:s, s:[s], s:i}", "op", "hello", "protocol",
                                 GQ_PROTOCOL_VERSION, "role", "actor", "nonce", client->nonce,
                                 "lanes", "inline", "window", (int)client->config.window);
    if (request == NULL)
        return NULL;
    const char *lane = client->config.lane;
    if (lane == NULL || strcmp (lane, "inline") != 0) {
        char host[GQ_HOST_ID_BYTES];
        gq_host_id (host);
        json_array_append_new (json_object_get (request, "lanes"), json_string ("shm"));
        json_object_set_new (request, "host", json_string (host));
    }
    if (actor != GQ_ACTOR_ANY)
        json_object_set_new (request, "actor", json_integer (actor));
    if (client->challenge[0] != '\0')
        json_object_set_new (request, "challenge", json_string (client->challenge));
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
take_endpoints (gq_client *client, const json_t *endpoints, gq_error *error)
{
    static const char *const names[] = {"gradients", "weights", "acks"};
    char *const places[] = {client->endpoints.gradients, client->endpoints.weights,
                            client->endpoints.acks};
    for (size_t i = 0; i < 3; i++) {
        const char *offered = json_string_value (json_object_get (endpoints, names[i]));
        if (offered == NULL || strlen (offered) >= GQ_ENDPOINT_MAX)
            return gq_fail (error, GQ_MALFORMED, "the broker's hello lacks the %s endpoint",
                            names[i]);
        resolve_host (places[i], offered, client->endpoints.control);
    }
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

/* Who and when a granting answer says that we are. */
static bool
read_identity (const json_t *answer, uint8_t run[GQ_RUN_ID_BYTES], uint32_t *actor, uint32_t *epoch,
               uint32_t *term)
{
    const char *text = json_string_value (json_object_get (answer, "run"));
    json_int_t id = json_integer_value (json_object_get (answer, "actor"));
    json_int_t life = json_integer_value (json_object_get (answer, "epoch"));
    json_int_t optimizer_life = json_integer_value (json_object_get (answer, "term"));
    if (text == NULL || !gq_hex_decode (text, run, GQ_RUN_ID_BYTES) || id < 0 ||
        id >= GQ_ACTORS_MAX || life < 1 || life > UINT32_MAX || optimizer_life < 0 ||
        optimizer_life > UINT32_MAX)
        return false;
    *actor = (uint32_t)id;
    *epoch = (uint32_t)life;
    *term = (uint32_t)optimizer_life;
    return true;
}

/* Take over what the first granting answer says. */
static gq_status
take_grant (gq_client *client, const json_t *answer, const gq_layout *proposed, gq_error *error)
{
    const json_t *staleness = json_object_get (answer, "max_staleness");
    if (!read_identity (answer, client->run, &client->actor, &client->epoch, &client->known_term))
        return gq_fail (error, GQ_MALFORMED, "the broker's hello answer lacks run, actor or epoch");
    gq_status status =
        gq_layout_from_json (&client->layout, json_object_get (answer, "layout"), error);
    if (status != GQ_OK)
        return status;
    if (proposed->tensor_count > 0 && proposed->digest != client->layout.digest)
        return gq_fail (error, GQ_LAYOUT, "%s", gq_status_text (GQ_LAYOUT));
    gq_hex_encode (client->run, GQ_RUN_ID_BYTES, client->run_text);
    client->max_staleness =
        json_is_integer (staleness) ? (uint64_t)json_integer_value (staleness) : UINT64_MAX;
    client->need_weights = json_is_true (json_object_get (answer, "need_weights"));
    status = take_endpoints (client, json_object_get (answer, "endpoints"), error);
    if (status != GQ_OK)
        return status;
    uint64_t now_ns = gq_now_ns ();
    client->heard_ns = client->weights_heard.heard_ns = client->acks_heard.heard_ns = now_ns;
    client->progress_ns = client->reopened_ns = now_ns;
    status = gq_client_open_lane (client, json_object_get (answer, "shm"), error);
    return status == GQ_OK ? gq_client_open_data (client, error) : status;
}

/* The answer to a question of gq_client_ask.  The same epoch: the optimizer knows us after all. */
static void
take_new_grant (gq_client *client, const json_t *answer)
{
    uint8_t run[GQ_RUN_ID_BYTES];
    uint32_t actor;
    uint32_t epoch;
    uint32_t term;
    if (!read_identity (answer, run, &actor, &epoch, &term) || actor != client->actor ||
        epoch < client->epoch || memcmp (run, client->run, GQ_RUN_ID_BYTES) != 0)
        return; /* of another run: its weights will tell */
    client->asking = false;
    if (term > client->known_term)
        client->known_term = term;
    if (epoch == client->epoch)
        return;
    gq_client_begin_life (client, epoch);
    /* No memory for another lane: the old one's descriptors would be of the old epoch. */
    client->asking = gq_client_open_lane (client, json_object_get (answer, "shm"), NULL) != GQ_OK;
    /* What is still in them belongs to the life before. */
    (void)!gq_client_open_data (client, NULL);
}

/* The next answer on the control socket that belongs to our hello; NULL: none.  Answers to reports
 * carry nothing that is needed; they must not pile up. */
static json_t *
next_answer (gq_client *client)
{
    zmq_msg_t message;
    json_t *answer = NULL;
    zmq_msg_init (&message);
    while (answer == NULL && zmq_msg_recv (&message, client->control, ZMQ_DONTWAIT) >= 0) {
        if (!gq_socket_whole (client->control))
            continue;
        answer = json_loadb (zmq_msg_data (&message), zmq_msg_size (&message), 0, NULL);
        const char *op = json_string_value (json_object_get (answer, "op"));
        const char *to = json_string_value (json_object_get (answer, "nonce"));
        if (op == NULL || strcmp (op, "hello") != 0 ||
            (to != NULL && strcmp (to, client->nonce) != 0)) {
            json_decref (answer);
            answer = NULL;
        }
    }
    zmq_msg_close (&message);
    return answer;
}

/* The word that shows that we are alive, when the answer asks for it. */
static bool
take_challenge (gq_client *client, const json_t *answer)
{
    const char *word = json_string_value (json_object_get (answer, "challenge"));
    if (word == NULL || strlen (word) >= sizeof client->challenge)
        return false;
    memcpy (client->challenge, word, strlen (word) + 1);
    return true;
}

/* The next answer to our first hello, if one is here: GQ_AGAIN when not, or when it says "not
 * yet". */
static gq_status
take_answer (gq_client *client, const gq_layout *proposed, bool *challenged, gq_error *error)
{
    json_t *answer = next_answer (client);
    if (answer == NULL)
        return GQ_AGAIN;
    *challenged = take_challenge (client, answer);
    gq_status status = json_is_true (json_object_get (answer, "ok"))
                           ? take_grant (client, answer, proposed, error)
                           : refusal (answer, error);
    json_decref (answer);
    return status;
}

void
gq_client_read_control (gq_client *client)
{
    for (json_t *answer = next_answer (client); answer != NULL; answer = next_answer (client)) {
        if (client->asking && json_is_true (json_object_get (answer, "ok")))
            take_new_grant (client, answer);
        else if (client->asking && take_challenge (client, answer))
            client->asked_ns = 0;
        json_decref (answer);
    }
}

/* false: no room, or no memory; try again. */
static bool
send_hello (gq_client *client, uint32_t actor, const gq_layout *proposed)
{
    json_t *request = hello_request (client, actor, proposed);
    char *text = request == NULL ? NULL : json_dumps (request, JSON_COMPACT);
    bool sent = text != NULL && gq_socket_send (client->control, text, strlen (text)) == GQ_OK;
    json_decref (request);
    free (text);
    return sent;
}

/* Ask until granted, refused or out of time. */
static gq_status
ask (gq_client *client, const gq_layout *proposed, uint64_t deadline_ns, gq_error *error)
{
    uint64_t ask_ns = 0;                 /* when to ask (again) */
    uint64_t answered_ns = gq_now_ns (); /* last sign of life, or new socket */
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
            ask_ns = send_hello (client, client->config.actor, proposed)
                         ? now_ns + (uint64_t)REPEAT_MS * MS_NS
                         : now_ns + 10u * MS_NS;
        if (now_ns - answered_ns >= (uint64_t)REOPEN_MS * MS_NS) {
            answered_ns = now_ns;
            ask_ns = now_ns;
            (void)!gq_client_open_control (client, NULL); /* failing leaves the old one */
        }
        uint64_t until = ask_ns < deadline_ns ? ask_ns : deadline_ns;
        uint64_t left_ms = (until - now_ns) / MS_NS + 1;
        zmq_pollitem_t item = {.socket = client->control, .events = ZMQ_POLLIN};
        if (zmq_poll (&item, 1, left_ms < GQ_SLICE_MS ? (long)left_ms : GQ_SLICE_MS) <= 0)
            continue;
        bool challenged = false;
        gq_status status = take_answer (client, proposed, &challenged, error);
        if (status != GQ_AGAIN)
            return status;
        answered = true;
        answered_ns = gq_now_ns ();
        ask_ns = answered_ns + (challenged ? 0 : (uint64_t)RETRY_MS * MS_NS);
    }
}

/* A nonce that nobody had: a hello with it asks for a new life. */
static bool
renew_nonce (gq_client *client)
{
    uint8_t nonce[(sizeof client->nonce - 1) / 2];
    if (getrandom (nonce, sizeof nonce, 0) != sizeof nonce)
        return false;
    gq_hex_encode (nonce, sizeof nonce, client->nonce);
    return true;
}

gq_status
gq_client_hello (gq_client *client, uint64_t deadline_ns, gq_error *error)
{
    gq_endpoints endpoints;
    gq_status status = gq_endpoints_derive (&endpoints, client->config.address, error);
    if (status != GQ_OK)
        return status;
    memcpy (client->endpoints.control, endpoints.control, sizeof endpoints.control);
    status = gq_client_open_control (client, error);
    if (status != GQ_OK)
        return status;
    gq_layout proposed = {0};
    if (client->config.tensors != NULL) {
        status =
            gq_layout_init (&proposed, client->config.tensors, client->config.tensor_count, error);
        if (status != GQ_OK)
            return status;
        if (client->config.initial != NULL &&
            !gq_all_finite (client->config.initial, proposed.element_count))
            status = gq_fail (error, GQ_NONFINITE, "the first weights hold NaN or infinity");
    }
    if (status == GQ_OK && !renew_nonce (client))
        status = gq_fail (error, GQ_IO, "the system gives no random bytes");
    if (status == GQ_OK)
        status = ask (client, &proposed, deadline_ns, error);
    gq_layout_clear (&proposed);
    return status;
}

void
gq_client_ask (gq_client *client, bool forgotten)
{
    /* The nonce that we have gets the epoch that we have, from who knows it; so a suspicion costs
     * nothing.  Whoever knows it, but not all that came in it, must be asked with another one. */
    if ((client->asking && (client->forgotten || !forgotten)) ||
        (forgotten && !renew_nonce (client)))
        return;
    client->asking = true;
    client->forgotten = forgotten;
    client->asked_ns = 0;
}

void
gq_client_ask_again (gq_client *client, uint64_t now_ns)
{
    if (!client->asking || now_ns - client->asked_ns < (uint64_t)REPEAT_MS * MS_NS)
        return;
    (void)!send_hello (client, client->actor, &client->layout); /* the next one may get out */
    client->asked_ns = now_ns;
}

void
gq_client_tell (gq_client *client, const char *op)
{
    const uint64_t pushed = client->window.sequence;
    const uint64_t settled = pushed - gq_window_count (&client->window);
    json_t *metrics = json_object ();
    for (size_t i = 0; i < client->metric_count; i++)
        json_object_set_new (metrics, client->metrics[i].name,
                             json_real (client->metrics[i].value));
    json_t *request =
        json_pack ("{s:s, s:s, s:s, s:i, s:I, s:I, s:I, s:I, s:I, s:o}", "op", op, "role", "actor",
                   "run", client->run_text, "actor", (int)client->actor, "epoch",
                   (json_int_t)client->epoch, "pushed", (json_int_t)pushed, "acknowledged",
                   (json_int_t)settled, "refused", (json_int_t)client->refused, "resent",
                   (json_int_t)client->window.resent, "metrics", metrics);
    char *text = request == NULL ? NULL : json_dumps (request, JSON_COMPACT);
    json_decref (request);
    if (text != NULL)
        (void)!gq_socket_send (client->control, text, strlen (text)); /* the next one may get out */
    free (text);
}
