/*
 * Raw ZeroMQ between threads: sockets, threads, and the time of a measurement.  The transport of a
 * gradient's path without its contents.
 *
 * Every thread has a ZeroMQ context of its own, as the processes of a run have.  Every wait is
 * short, so that a stop or an interruption is soon noticed, and no context outlives its call.
 */
#include "bench_zmq.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "socket.h"

#define S_NS  1e9
#define MS_NS 1000000u
/* Longest wait inside ZeroMQ before a thread looks whether it is time to stop. */
#define SLICE_MS 50
/* How long a first message may take. */
#define PATIENCE_NS ((uint64_t)GQ_BENCH_START_MS * MS_NS)
/* How often the calling thread looks at the time. */
#define WATCH_MS 2

static void *
open_socket (gq_station *at, int type)
{
    const gq_socket_options options = {.type = type,
                                       .send_hwm = at->shared->hwm,
                                       .receive_hwm = at->shared->hwm,
                                       .buffer_bytes = at->shared->buffer_bytes,
                                       .message_bytes_max = -1};
    const int slice_ms = SLICE_MS;
    void *socket = zmq_socket (at->context, type);
    if (socket == NULL)
        return NULL;
    gq_socket_set (socket, &options);
    if (zmq_setsockopt (socket, ZMQ_SNDTIMEO, &slice_ms, sizeof slice_ms) == 0 &&
        zmq_setsockopt (socket, ZMQ_RCVTIMEO, &slice_ms, sizeof slice_ms) == 0)
        return socket;
    zmq_close (socket);
    return NULL;
}

static bool
bind_pull (gq_station *at)
{
    gq_raw *raw = at->shared;
    if (raw->point->tcp)
        snprintf (at->endpoint, sizeof at->endpoint, "tcp://127.0.0.1:*");
    else
        snprintf (at->endpoint, sizeof at->endpoint, "ipc://%s/%u", raw->directory,
                  raw->station_count);
    at->pull = open_socket (at, ZMQ_PULL);
    if (at->pull == NULL || zmq_bind (at->pull, at->endpoint) != 0)
        return false;
    /* The system chose the port. */
    size_t size = sizeof at->endpoint;
    return zmq_getsockopt (at->pull, ZMQ_LAST_ENDPOINT, at->endpoint, &size) == 0;
}

gq_station *
gq_raw_add (gq_raw *raw, void (*run) (gq_station *at), bool binds)
{
    gq_station *at = &raw->stations[raw->station_count];
    *at = (gq_station){.shared = raw, .run = run, .context = zmq_ctx_new ()};
    bool ready = at->context != NULL && (!binds || bind_pull (at));
    raw->station_count++; /* also when it failed: gq_raw_free closes what there is */
    return ready ? at : NULL;
}

bool
gq_raw_connect (gq_station *from, const gq_station *to)
{
    void **push = realloc (from->push, (from->push_count + 1) * sizeof *push);
    if (push == NULL)
        return false;
    from->push = push;
    push[from->push_count] = open_socket (from, ZMQ_PUSH);
    if (push[from->push_count] == NULL)
        return false;
    return zmq_connect (push[from->push_count++], to->endpoint) == 0;
}

gq_status
gq_raw_new (gq_raw **raw_p, uint64_t bytes, int hwm, int buffer_bytes, const gq_bench_point *point,
            gq_error *error)
{
    *raw_p = NULL;
    gq_raw *raw = calloc (1, sizeof *raw);
    float *vector = gq_bench_vector (GQ_BENCH_PIECE);
    if (raw == NULL || vector == NULL) {
        free (raw);
        free (vector);
        return gq_fail (error, GQ_MEMORY, "out of memory for messages of %llu bytes",
                        (unsigned long long)bytes);
    }
    raw->point = point;
    raw->bytes = bytes;
    raw->hwm = hwm;
    raw->buffer_bytes = buffer_bytes;
    raw->vector = vector;
    snprintf (raw->directory, sizeof raw->directory, "/tmp/gq-bench-XXXXXX");
    if (mkdtemp (raw->directory) == NULL) {
        gq_fail (error, GQ_IO, "no directory in /tmp for sockets: %s", strerror (errno));
        free (vector);
        free (raw);
        return GQ_IO;
    }
    *raw_p = raw;
    return GQ_OK;
}

void
gq_raw_stop (gq_raw *raw)
{
    atomic_store (&raw->stop, true);
    for (uint32_t i = 0; i < raw->station_count; i++) {
        if (raw->stations[i].running)
            pthread_join (raw->stations[i].thread, NULL);
        raw->stations[i].running = false;
    }
}

void
gq_raw_free (gq_raw **raw_p)
{
    gq_raw *raw = *raw_p;
    if (raw == NULL)
        return;
    *raw_p = NULL;
    gq_raw_stop (raw);
    for (uint32_t i = 0; i < raw->station_count; i++) {
        gq_station *at = &raw->stations[i];
        for (uint32_t k = 0; k < at->push_count; k++)
            zmq_close (at->push[k]);
        if (at->pull != NULL)
            zmq_close (at->pull);
        if (at->context != NULL)
            zmq_ctx_term (at->context);
        free (at->push);
        if (strncmp (at->endpoint, "ipc://", strlen ("ipc://")) == 0)
            unlink (at->endpoint + strlen ("ipc://")); /* ZeroMQ has removed most of them */
    }
    rmdir (raw->directory);
    free (raw->vector);
    free (raw);
}

static void *
station_main (void *argument)
{
    gq_station *at = argument;
    at->run (at);
    return NULL;
}

bool
gq_raw_send (gq_station *at, uint32_t number)
{
    zmq_msg_t message;
    if (zmq_msg_init_size (&message, at->shared->bytes) != 0)
        return false;
    gq_bench_fill (zmq_msg_data (&message), at->shared->bytes, at->shared->vector);
    memcpy (zmq_msg_data (&message), &number, sizeof number);
    while (zmq_msg_send (&message, at->push[0], 0) < 0)
        if ((errno != EAGAIN && errno != EINTR) || atomic_load (&at->shared->stop)) {
            zmq_msg_close (&message);
            return false;
        }
    return true;
}

uint32_t
gq_raw_number (zmq_msg_t *message)
{
    uint32_t number;
    memcpy (&number, zmq_msg_data (message), sizeof number);
    return number;
}

bool
gq_raw_count (gq_raw *raw, uint64_t now_ns)
{
    uint64_t start_ns = atomic_load (&raw->start_ns), end_ns = atomic_load (&raw->end_ns);
    if (start_ns == 0 || now_ns < start_ns || (end_ns != 0 && now_ns >= end_ns))
        return false;
    atomic_fetch_add_explicit (&raw->counted, 1, memory_order_relaxed);
    return true;
}

/* Let the stations work for a moment.  GQ_OK: nothing speaks against going on. */
static gq_status
let_work (const gq_raw *raw, gq_error *error)
{
    const struct timespec pause = {.tv_nsec = WATCH_MS * MS_NS};
    nanosleep (&pause, NULL);
    if (raw->point->interrupted ())
        return gq_fail (error, GQ_CLOSED, "interrupted");
    if (atomic_load (&raw->failed))
        return gq_fail (error, GQ_IO,
                        "a raw ZeroMQ message cannot be made or sent; is there enough memory?");
    return GQ_OK;
}

static gq_status
start_stations (gq_raw *raw, gq_error *error)
{
    for (uint32_t i = 0; i < raw->station_count; i++) {
        gq_station *at = &raw->stations[i];
        if (pthread_create (&at->thread, NULL, station_main, at) != 0)
            return gq_fail (error, GQ_IO, "no thread for raw ZeroMQ: %s", strerror (errno));
        at->running = true;
    }
    return GQ_OK;
}

static gq_status
none_came (const gq_raw *raw, gq_error *error)
{
    return gq_fail (error, GQ_TIMEOUT, "no raw ZeroMQ message of %llu bytes came in time",
                    (unsigned long long)raw->bytes);
}

/* Until that many stations had a first message. */
static gq_status
wait_ready (const gq_raw *raw, uint32_t ready, gq_error *error)
{
    uint64_t until_ns = gq_now_ns () + PATIENCE_NS;
    while (atomic_load (&raw->ready) < ready) {
        gq_status status = let_work (raw, error);
        if (status != GQ_OK)
            return status;
        if (gq_now_ns () >= until_ns)
            return none_came (raw, error);
    }
    return GQ_OK;
}

gq_status
gq_raw_measure (gq_raw *raw, uint32_t ready, double *per_s, gq_error *error)
{
    gq_status status = start_stations (raw, error);
    if (status == GQ_OK)
        status = wait_ready (raw, ready, error);
    if (status != GQ_OK)
        return status;
    uint64_t start_ns = gq_now_ns () + gq_bench_warm_ns (raw->point->seconds);
    uint64_t due_ns = start_ns + (uint64_t)(raw->point->seconds * S_NS), now_ns = start_ns;
    atomic_store (&raw->start_ns, start_ns);
    /* Not before enough came: a busy machine, or a large message, needs longer. */
    while (now_ns < due_ns ||
           (atomic_load (&raw->counted) < GQ_BENCH_COUNT_MIN && now_ns < due_ns + PATIENCE_NS)) {
        status = let_work (raw, error);
        if (status != GQ_OK)
            return status;
        now_ns = gq_now_ns ();
    }
    atomic_store (&raw->end_ns, now_ns);
    uint64_t counted = atomic_load (&raw->counted);
    if (counted == 0)
        return none_came (raw, error);
    *per_s = (double)counted * S_NS / (double)(now_ns - start_ns);
    return GQ_OK;
}
