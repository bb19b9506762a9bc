/*
 * The actor's side of the data plane: steps 1 and 7 of a gradient's path.  What a caller may ask
 * for; the work between is in client_service.c.
 *
 * Nothing outlives gq_client_close.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client_internal.h"
#include "stats.h"

#define MS_NS 1000000u
/* Closing waits no longer than this, even for who waits for ever. */
#define CLOSE_MS_MAX 30000

bool
gq_client_interrupted (const gq_client *client)
{
    return client->config.interrupted != NULL && client->config.interrupted ();
}

static uint64_t
deadline_of (const gq_client *client)
{
    if (client->config.timeout_ms < 0)
        return UINT64_MAX;
    return gq_now_ns () + (uint64_t)client->config.timeout_ms * MS_NS;
}

/* Milliseconds to wait next: a slice, less when the deadline is nearer. */
static int
slice_until (uint64_t deadline_ns, uint64_t now_ns)
{
    if (now_ns >= deadline_ns)
        return 0;
    uint64_t left_ms = (deadline_ns - now_ns) / MS_NS + 1;
    return left_ms < GQ_SLICE_MS ? (int)left_ms : GQ_SLICE_MS;
}

bool
gq_client_newer (uint32_t term, uint64_t version, uint32_t than_term, uint64_t than_version)
{
    return term > than_term || (term == than_term && version > than_version);
}

/* Offer our first weights to a run that has none, once a second until a version arrives. */
static void
offer_initial (gq_client *client, uint64_t now_ns, uint64_t *offered_ns)
{
    if (!client->need_weights || client->config.initial == NULL ||
        (*offered_ns != 0 && now_ns - *offered_ns < 1000u * MS_NS))
        return;
    gq_lane *lane;
    zmq_msg_t sent;
    if (gq_lane_inline_open (&lane, client->layout.element_count, GQ_ENCODING_F32) != GQ_OK)
        return;
    float *buffer = lane->ops->reserve (lane);
    if (buffer == NULL) {
        lane->ops->close (&lane);
        return;
    }
    memcpy (buffer, client->config.initial, client->layout.element_count * sizeof *buffer);
    gq_frame frame = {.kind = GQ_KIND_INIT,
                      .actor = client->actor,
                      .epoch = client->epoch,
                      .digest = client->layout.digest,
                      .count = client->layout.element_count,
                      .sent_ns = gq_wall_ns ()};
    memcpy (frame.run, client->run, GQ_RUN_ID_BYTES);
    if (lane->ops->send (lane, client->gradients, &frame, &sent) == GQ_OK) {
        zmq_msg_close (&sent);
        *offered_ns = now_ns;
    }
    lane->ops->close (&lane);
}

static gq_status
wait_first_weights (gq_client *client, uint64_t deadline_ns, gq_error *error)
{
    uint64_t offered_ns = 0;
    while (!client->has_weights) {
        uint64_t now_ns = gq_now_ns ();
        if (gq_client_interrupted (client))
            return gq_fail (error, GQ_CLOSED, "interrupted while waiting for the first weights");
        if (now_ns >= deadline_ns)
            return gq_fail (error, GQ_TIMEOUT, "no weights from %s in time: %s",
                            client->config.address,
                            client->need_weights && client->config.initial == NULL
                                ? "the run has none yet; start the optimizer with --init or an "
                                  "actor that brings them"
                                : "is the optimizer alive?");
        offer_initial (client, now_ns, &offered_ns);
        gq_client_service (client, slice_until (deadline_ns, now_ns), false);
    }
    return GQ_OK;
}

static gq_status
check_config (const gq_client_config *config, gq_error *error)
{
    if (config->address == NULL)
        return gq_fail (error, GQ_INVALID, "no address given");
    if (config->window < 1 || config->window > GQ_WINDOW_MAX)
        return gq_fail (error, GQ_INVALID, "window %u: 1 to %d gradients are allowed",
                        config->window, GQ_WINDOW_MAX);
    if (config->actor != GQ_ACTOR_ANY && config->actor >= GQ_ACTORS_MAX)
        return gq_fail (error, GQ_INVALID, "actor %u: ids go up to %d", config->actor,
                        GQ_ACTORS_MAX - 1);
    if (config->resend_ms < 1)
        return gq_fail (error, GQ_INVALID, "resend_ms %d: at least 1 is needed", config->resend_ms);
    if (config->lane != NULL && strcmp (config->lane, "auto") != 0 &&
        strcmp (config->lane, "inline") != 0 && strcmp (config->lane, "shm") != 0)
        return gq_fail (error, GQ_INVALID, "lane %s: auto, inline or shm is needed", config->lane);
    if (config->encoding != NULL && strcmp (config->encoding, "f32") != 0 &&
        strcmp (config->encoding, "bf16") != 0)
        return gq_fail (error, GQ_INVALID, "encoding %s: f32 or bf16 is needed", config->encoding);
    return GQ_OK;
}

static void
forget_sent (gq_client *client)
{
    for (uint32_t i = 0; i < client->window.size; i++)
        if (client->window.slots[i].sequence != 0)
            zmq_msg_close (&client->sent[i]);
}

void
gq_client_begin_life (gq_client *client, uint32_t epoch)
{
    client->before = gq_client_count (client);
    client->before.rolled_back++;
    client->before.dropped += gq_window_count (&client->window);
    forget_sent (client);
    gq_window_init (&client->window, client->config.window,
                    (uint64_t)client->config.resend_ms * MS_NS, gq_now_ns ());
    client->epoch = epoch;
    client->refused = 0;
    client->ack_term = 0;
    client->ack_version = 0;
    client->unknown_ns = 0;
}

static void
free_client (gq_client **client_p)
{
    gq_client *client = *client_p;
    gq_client_drainer_stop (client);
    void *sockets[] = {client->control, client->gradients, client->weights, client->acks};
    for (size_t i = 0; i < sizeof sockets / sizeof sockets[0]; i++)
        if (sockets[i] != NULL)
            zmq_close (sockets[i]);
    if (client->lane != NULL)
        client->lane->ops->close (&client->lane);
    gq_client_close_parked (client);
    gq_board_close (&client->board);
    if (client->rope >= 0)
        close (client->rope);
    forget_sent (client);
    zmq_msg_close (&client->frame);
    zmq_msg_close (&client->arrived);
    if (client->context != NULL)
        zmq_ctx_term (client->context);
    gq_layout_clear (&client->layout);
    pthread_cond_destroy (&client->stop);
    pthread_mutex_destroy (&client->lock);
    free (client->aligned);
    free (client);
    *client_p = NULL;
}

static void
init_lock (gq_client *client)
{
    pthread_condattr_t attributes;
    pthread_condattr_init (&attributes);
    pthread_condattr_setclock (&attributes, CLOCK_MONOTONIC);
    pthread_cond_init (&client->stop, &attributes);
    pthread_condattr_destroy (&attributes);
    pthread_mutex_init (&client->lock, NULL);
}

static gq_status
open_parts (gq_client *client, gq_error *error)
{
    client->context = zmq_ctx_new ();
    if (client->context == NULL)
        return gq_fail (error, GQ_MEMORY, "no ZeroMQ context: %s", zmq_strerror (zmq_errno ()));
    uint64_t deadline_ns = deadline_of (client);
    gq_status status = gq_client_hello (client, deadline_ns, error);
    if (status != GQ_OK)
        return status;
    client->aligned = malloc (client->layout.element_count * sizeof (float));
    if (client->aligned == NULL)
        return gq_fail (error, GQ_MEMORY, "no memory for %llu parameters",
                        (unsigned long long)client->layout.element_count);
    return wait_first_weights (client, deadline_ns, error);
}

gq_status
gq_client_open (gq_client **client_p, const gq_client_config *config, gq_error *error)
{
    *client_p = NULL;
    gq_status status = check_config (config, error);
    if (status != GQ_OK)
        return status;
    gq_client *client = calloc (1, sizeof *client);
    if (client == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory");
    client->config = *config;
    client->rope = -1;
    client->encoding = config->encoding != NULL && strcmp (config->encoding, "bf16") == 0
                           ? GQ_ENCODING_BF16
                           : GQ_ENCODING_F32;
    init_lock (client);
    zmq_msg_init (&client->frame);
    zmq_msg_init (&client->arrived);
    gq_window_init (&client->window, config->window, (uint64_t)config->resend_ms * MS_NS,
                    gq_now_ns ());
    status = open_parts (client, error);
    if (status != GQ_OK) {
        free_client (&client);
        return status;
    }
    client->config.initial = NULL;
    client->config.tensors = NULL;
    client->config.address = NULL;
    *client_p = client;
    return GQ_OK;
}

const gq_tensor_shape *
gq_client_layout (const gq_client *client, size_t *tensor_count, uint64_t *element_count)
{
    if (tensor_count != NULL)
        *tensor_count = client->layout.tensor_count;
    if (element_count != NULL)
        *element_count = client->layout.element_count;
    return client->layout.tensors;
}

uint32_t
gq_client_actor (const gq_client *client)
{
    return client->actor;
}

const char *
gq_client_lane (const gq_client *client, const char **reason)
{
    if (reason != NULL)
        *reason = client->words != NULL ? "" : client->lane_reason.text;
    return client->lane->ops->name;
}

uint64_t
gq_client_max_staleness (const gq_client *client)
{
    return client->max_staleness;
}

gq_status
gq_client_weights (gq_client *client, gq_weights *weights)
{
    gq_client_service (client, 0, false);
    if (client->words != NULL)
        gq_client_take_weights (client);
    *weights = (gq_weights){.data = client->data,
                            .count = client->layout.element_count,
                            .version = client->version,
                            .term = client->term};
    client->given_term = client->term;
    client->given_version = client->version;
    return GQ_OK;
}

float *
gq_client_reserve (gq_client *client)
{
    if (client->building != NULL)
        return client->building->ops->reserve (client->building);
    gq_client_close_parked (client);
    float *buffer = client->lane->ops->reserve (client->lane);
    client->building = buffer != NULL ? client->lane : NULL;
    return buffer;
}

static gq_status
send_gradient (gq_client *client, uint32_t samples, uint64_t *sequence)
{
    gq_frame frame = {.kind = GQ_KIND_GRADIENT,
                      .actor = client->actor,
                      .epoch = client->epoch,
                      .term = client->given_term,
                      .digest = client->layout.digest,
                      .sequence = client->window.sequence + 1,
                      .version = client->given_version,
                      .count = client->layout.element_count,
                      .samples = samples,
                      .sent_ns = gq_wall_ns ()};
    zmq_msg_t sent;
    uint32_t slot;
    memcpy (frame.run, client->run, GQ_RUN_ID_BYTES);
    gq_status status = client->building == NULL ? GQ_INVALID : gq_client_bring_along (client);
    if (status == GQ_OK)
        status = client->lane->ops->send (client->lane, client->gradients, &frame, &sent);
    if (status != GQ_OK)
        return status;
    client->building = NULL;
    gq_client_wake_optimizer (client);
    uint64_t now_ns = gq_now_ns ();
    if (gq_window_count (&client->window) == 0)
        client->progress_ns = now_ns;
    uint64_t number = gq_window_sent (&client->window, now_ns, &slot);
    zmq_msg_init (&client->sent[slot]);
    zmq_msg_move (&client->sent[slot], &sent);
    if (sequence != NULL)
        *sequence = client->before.pushed + number;
    return GQ_OK;
}

gq_status
gq_client_commit (gq_client *client, uint32_t samples, uint64_t *sequence)
{
    if (samples == 0)
        return GQ_INVALID;
    uint64_t deadline_ns = deadline_of (client);
    int wait_ms = 0;
    bool full = false; /* the socket was, when we tried */
    for (;;) {
        /* Look before waiting, and wait for the socket only when it was full: an idle one would
         * turn this into a busy loop. */
        gq_client_service (client, wait_ms, full);
        full = false;
        if (gq_window_room (&client->window) && !client->asking &&
            gq_client_ended (client) != GQ_FENCED) {
            gq_status status = send_gradient (client, samples, sequence);
            if (status != GQ_AGAIN)
                return status;
            full = true;
        }
        uint64_t now_ns = gq_now_ns ();
        gq_status end = gq_client_ended (client);
        if (end != GQ_OK)
            return end;
        if (now_ns >= deadline_ns)
            return GQ_TIMEOUT;
        wait_ms = slice_until (deadline_ns, now_ns);
    }
}

gq_status
gq_client_push (gq_client *client, const float *gradient, uint32_t samples)
{
    float *buffer = gq_client_reserve (client);
    if (buffer == NULL)
        return GQ_MEMORY;
    memcpy (buffer, gradient, client->layout.element_count * sizeof *buffer);
    return gq_client_commit (client, samples, NULL);
}

/* Settled up to `sequence`, and the weights that its ack named are here? */
static bool
arrived (const gq_client *client, uint64_t sequence)
{
    if (sequence > client->before.pushed + client->window.sequence)
        return false; /* not even sent */
    if (sequence > client->before.pushed) {
        uint64_t number = sequence - client->before.pushed;
        for (uint32_t i = 0; i < client->window.size; i++)
            if (client->window.slots[i].sequence != 0 && client->window.slots[i].sequence <= number)
                return false;
    }
    return !gq_client_newer (client->ack_term, client->ack_version, client->shown_term,
                             client->shown_version);
}

gq_status
gq_client_wait (gq_client *client, uint64_t sequence)
{
    uint64_t deadline_ns = deadline_of (client);
    gq_client_service (client, 0, false);
    while (!arrived (client, sequence)) {
        uint64_t now_ns = gq_now_ns ();
        gq_status end = gq_client_ended (client);
        if (end != GQ_OK)
            return end;
        if (now_ns >= deadline_ns)
            return GQ_TIMEOUT;
        gq_client_service (client, slice_until (deadline_ns, now_ns), false);
    }
    return GQ_OK;
}

gq_client_counts
gq_client_count (const gq_client *client)
{
    const gq_client_counts *before = &client->before;
    const uint64_t settled = client->window.sequence - gq_window_count (&client->window);
    return (gq_client_counts){.pushed = before->pushed + client->window.sequence,
                              .acknowledged = before->acknowledged + settled,
                              .refused = before->refused + client->refused,
                              .resent = before->resent + client->window.resent,
                              .refused_reason = client->refused_reason,
                              .rolled_back = before->rolled_back,
                              .dropped = before->dropped};
}

void
gq_client_metric (gq_client *client, const char *name, double value)
{
    size_t i = 0;
    while (i < client->metric_count && strcmp (client->metrics[i].name, name) != 0)
        i++;
    if (i == GQ_METRICS_MAX || strlen (name) >= sizeof client->metrics[i].name)
        return;
    if (i == client->metric_count) {
        memcpy (client->metrics[i].name, name, strlen (name) + 1);
        client->metric_count++;
    }
    client->metrics[i].value = value;
}

gq_status
gq_client_close (gq_client **client_p)
{
    if (*client_p == NULL)
        return GQ_OK;
    gq_client *client = *client_p;
    /* The interruption that made the caller close must not cut this short as well. */
    client->config.interrupted = NULL;
    if (client->config.timeout_ms < 0)
        client->config.timeout_ms = CLOSE_MS_MAX;
    uint64_t deadline_ns = deadline_of (client);
    /* What is on the way while we ask for a new life is lost already. */
    while (gq_window_count (&client->window) > 0 && gq_now_ns () < deadline_ns &&
           gq_client_ended (client) == GQ_OK && !client->asking &&
           gq_now_ns () - client->heard_ns < (uint64_t)GQ_HEARD_MS_MAX * MS_NS)
        gq_client_service (client, slice_until (deadline_ns, gq_now_ns ()), false);
    gq_status status = gq_client_ended (client);
    if (status == GQ_OK && gq_window_count (&client->window) > 0)
        status = GQ_TIMEOUT;
    gq_client_tell (client, "bye");
    free_client (client_p);
    return status;
}
