/*
 * Limits of the transport: the same frames over the same hops, and nothing else done with them.
 * Steps 1 to 4 and 6 to 7 of a gradient's path without their contents.
 *
 * Must never drop a message, and never wait for one that nobody sends: as many may wait at each
 * socket as can be on the way.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "bench_zmq.h"
#include "gradq/protocol.h"
#include "plugin.h"

/* Roomy high-water mark: ZeroMQ's default, and what all of them may hold in memory. */
#define ROOMY_MESSAGES 1000
#define ROOMY_BYTES    ((uint64_t)64 << 20)
/* As in src/client_hello.c and broker/gradients.c. */
#define TIGHT_MESSAGES     1
#define TIGHT_BUFFER_BYTES (64 * 1024)

/* Make messages as fast as they go out. */
static void
send_all (gq_station *at)
{
    while (!atomic_load (&at->shared->stop))
        if (!gq_raw_send (at, at->number) && !atomic_load (&at->shared->stop)) {
            atomic_store (&at->shared->failed, true);
            return;
        }
}

/* Pass on: to the only station behind, or to the actor that the message came from. */
static void
forward_all (gq_station *at)
{
    zmq_msg_t message;
    zmq_msg_init (&message);
    while (!atomic_load (&at->shared->stop)) {
        if (zmq_msg_recv (&message, at->pull, 0) < 0)
            continue;
        void *push = at->push[at->push_count > 1 ? gq_raw_number (&message) : 0];
        while (zmq_msg_send (&message, push, 0) < 0 && !atomic_load (&at->shared->stop))
            continue;
    }
    zmq_msg_close (&message);
}

static void
receive_all (gq_station *at)
{
    zmq_msg_t message;
    bool first = true;
    zmq_msg_init (&message);
    while (!atomic_load (&at->shared->stop)) {
        if (zmq_msg_recv (&message, at->pull, 0) < 0)
            continue;
        if (first)
            atomic_fetch_add (&at->shared->ready, 1);
        first = false;
        gq_raw_count (at->shared, gq_now_ns ());
    }
    zmq_msg_close (&message);
}

/* Keep a window of messages on the way; they come back in order. */
static void
echo_all (gq_station *at)
{
    const uint32_t window = at->shared->point->window;
    uint64_t sent_ns[GQ_WINDOW_MAX] = {0};
    uint64_t sent = 0, received = 0;
    zmq_msg_t message;
    zmq_msg_init (&message);
    while (!atomic_load (&at->shared->stop)) {
        if (sent - received < window) {
            sent_ns[sent++ % GQ_WINDOW_MAX] = gq_now_ns ();
            if (!gq_raw_send (at, at->number) && !atomic_load (&at->shared->stop))
                atomic_store (&at->shared->failed, true);
            continue;
        }
        if (zmq_msg_recv (&message, at->pull, 0) < 0)
            continue;
        uint64_t now_ns = gq_now_ns ();
        if (received == 0)
            atomic_fetch_add (&at->shared->ready, 1);
        if (gq_raw_count (at->shared, now_ns))
            gq_histogram_add (&at->took_ns, now_ns - sent_ns[received % GQ_WINDOW_MAX]);
        received++;
    }
    zmq_msg_close (&message);
}

static gq_status
cannot_open (gq_error *error)
{
    return gq_fail (error, GQ_IO,
                    "cannot open raw ZeroMQ sockets: %s; are there enough files (ulimit -n)?",
                    zmq_strerror (zmq_errno ()));
}

gq_status
gq_bench_hops (double *per_s, uint64_t bytes, unsigned hops, gq_bench_buffers buffers,
               const gq_bench_point *point, gq_error *error)
{
    gq_raw *raw = NULL;
    int hwm = TIGHT_MESSAGES, buffer_bytes = TIGHT_BUFFER_BYTES;
    if (buffers == GQ_BENCH_ROOMY) {
        uint64_t messages = ROOMY_BYTES / point->actors / bytes;
        hwm = messages < 2 ? 2 : messages < ROOMY_MESSAGES ? (int)messages : ROOMY_MESSAGES;
        buffer_bytes = 0;
    }
    gq_status status = gq_raw_new (&raw, bytes, hwm, buffer_bytes, point, error);
    if (status != GQ_OK)
        return status;
    gq_station *receiver = gq_raw_add (raw, receive_all, true), *first = receiver;
    if (receiver != NULL && hops == 2) {
        first = gq_raw_add (raw, forward_all, true);
        first = first != NULL && gq_raw_connect (first, receiver) ? first : NULL;
    }
    bool opened = first != NULL;
    for (uint32_t i = 0; opened && i < point->actors; i++) {
        gq_station *actor = gq_raw_add (raw, send_all, false);
        opened = actor != NULL && gq_raw_connect (actor, first);
    }
    status = opened ? gq_raw_measure (raw, 1, per_s, error) : cannot_open (error);
    gq_raw_free (&raw);
    return status;
}

/* Who turns messages round by a step of the rule. */
typedef struct stepper {
    gq_rule *rule;
    zmq_msg_t current; /* the newest weights, as they were sent */
    float *aligned;    /* f32[params], for small messages that lie unaligned */
} stepper;

static void
free_block (void *data, void *hint)
{
    (void)hint;
    free (data);
}

/* Its vector is aligned as plug-ins are promised.  false: out of memory. */
static bool
make_weights (zmq_msg_t *message, uint64_t bytes)
{
    void *block = aligned_alloc (64, (size_t)(bytes + 63) / 64 * 64);
    if (block != NULL && zmq_msg_init_data (message, block, (size_t)bytes, free_block, NULL) == 0)
        return true;
    free (block);
    return false;
}

static float *
vector_of (zmq_msg_t *message)
{
    return (float *)(void *)((uint8_t *)zmq_msg_data (message) + GQ_FRAME_HEADER_BYTES);
}

/* What came is a gradient; what goes back are the weights behind its step. */
static void
step_all (gq_station *at)
{
    stepper *self = at->shared->turn;
    const size_t vector_bytes = (size_t)at->shared->bytes - GQ_FRAME_HEADER_BYTES;
    zmq_msg_t message;
    zmq_msg_t next;
    zmq_msg_init (&message);
    while (!atomic_load (&at->shared->stop)) {
        if (zmq_msg_recv (&message, at->pull, 0) < 0)
            continue;
        if (!make_weights (&next, at->shared->bytes)) {
            atomic_store (&at->shared->failed, true);
            break;
        }
        const float *gradient = vector_of (&message);
        if ((uintptr_t)gradient % _Alignof(float) != 0)
            gradient = memcpy (self->aligned, gradient, vector_bytes);
        memcpy (zmq_msg_data (&next), zmq_msg_data (&message), GQ_FRAME_HEADER_BYTES);
        gq_rule_step (self->rule, vector_of (&self->current), vector_of (&next), gradient, 1);
        (void)zmq_msg_copy (&self->current, &next);
        while (zmq_msg_send (&next, at->push[0], 0) < 0 && !atomic_load (&at->shared->stop))
            continue;
        zmq_msg_close (&next);
    }
    zmq_msg_close (&message);
}

/* actors -> out -> turn -> back -> the actor that it came from */
static bool
open_echo (gq_raw *raw)
{
    gq_station *out = gq_raw_add (raw, forward_all, true);
    gq_station *turn = gq_raw_add (raw, raw->turn == NULL ? forward_all : step_all, true);
    gq_station *back = gq_raw_add (raw, forward_all, true);
    bool opened = out != NULL && turn != NULL && back != NULL && gq_raw_connect (out, turn) &&
                  gq_raw_connect (turn, back);
    for (uint32_t i = 0; opened && i < raw->point->actors; i++) {
        gq_station *actor = gq_raw_add (raw, echo_all, true);
        if (actor != NULL)
            actor->number = i;
        opened = actor != NULL && gq_raw_connect (actor, out) && gq_raw_connect (back, actor);
    }
    return opened;
}

static gq_status
echo_rate (gq_bench_echo *echo, uint64_t bytes, stepper *turn, const gq_bench_point *point,
           gq_error *error)
{
    gq_raw *raw = NULL;
    /* The window bounds what waits, in messages and so in memory. */
    int in_flight = (int)(point->actors * point->window);
    int hwm = in_flight > ROOMY_MESSAGES ? in_flight : ROOMY_MESSAGES;
    gq_status status = gq_raw_new (&raw, bytes, hwm, 0, point, error);
    if (status != GQ_OK)
        return status;
    raw->turn = turn;
    status = open_echo (raw) ? gq_raw_measure (raw, point->actors, &echo->per_s, error)
                             : cannot_open (error);
    if (status == GQ_OK) {
        gq_histogram all;
        gq_histogram_clear (&all);
        gq_raw_stop (raw);
        for (uint32_t i = 0; i < raw->station_count; i++)
            gq_histogram_merge (&all, &raw->stations[i].took_ns);
        echo->p50_us = (double)gq_histogram_quantile (&all, 0.5) / 1e3;
        echo->p99_us = (double)gq_histogram_quantile (&all, 0.99) / 1e3;
    }
    gq_raw_free (&raw);
    return status;
}

gq_status
gq_bench_echo_rate (gq_bench_echo *echo, uint64_t bytes, const gq_bench_point *point,
                    gq_error *error)
{
    return echo_rate (echo, bytes, NULL, point, error);
}

gq_status
gq_bench_rule_round_rate (gq_bench_echo *echo, const gq_bench_point *point, gq_error *error)
{
    const uint64_t vector_bytes = point->params * sizeof (float);
    const uint64_t bytes = GQ_FRAME_HEADER_BYTES + vector_bytes;
    stepper turn = {.rule = NULL};
    gq_error warning = {""};
    zmq_msg_init (&turn.current);
    gq_status status = gq_rule_load (&turn.rule, point->optimizer, point->plugins, point->sets,
                                     point->set_count, point->cpu, &warning, error);
    if (status == GQ_OK) {
        turn.aligned = malloc ((size_t)vector_bytes);
        if (turn.aligned == NULL || !make_weights (&turn.current, bytes) ||
            gq_rule_reset (turn.rule, point->params) != GQ_OK)
            status =
                gq_fail (error, GQ_MEMORY, "out of memory for an update rule on %llu parameters",
                         (unsigned long long)point->params);
        else
            memset (zmq_msg_data (&turn.current), 0, (size_t)bytes);
    }
    if (status == GQ_OK)
        status = echo_rate (echo, bytes, &turn, point, error);
    zmq_msg_close (&turn.current);
    free (turn.aligned);
    gq_rule_free (&turn.rule);
    return status;
}
