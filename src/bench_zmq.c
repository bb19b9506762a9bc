/*
 * Limits of the transport: the same frames over the same hops, and nothing else done with them.
 * Steps 1 to 4 and 6 to 7 of a gradient's path without their contents.
 *
 * Every thread has a ZeroMQ context of its own, as the processes of a run have.  Every wait is
 * short, so that a stop or an interruption is soon noticed, and no context outlives its call.
 */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

#include "bench.h"
#include "socket.h"
#include "stats.h"

#define S_NS  1e9
#define MS_NS 1000000u
/* Longest wait inside ZeroMQ before a thread looks whether it is time to stop. */
#define SLICE_MS 50
/* Roomy high-water mark: ZeroMQ's default, and what it may hold in memory at each end. */
#define ROOMY_MESSAGES 1000
#define ROOMY_BYTES    ((uint64_t)64 << 20)
/* As in src/client_hello.c and broker/gradients.c. */
#define TIGHT_MESSAGES     1
#define TIGHT_BUFFER_BYTES (64 * 1024)
#define RELAYS_MAX         3
#define THREADS_MAX        (GQ_BENCH_ACTORS_MAX + RELAYS_MAX)
#define ENDPOINT_BYTES     64

typedef struct raw raw;

/* One thread, or the caller: takes from one endpoint and gives to the next. */
typedef struct station {
    raw *shared;
    int from, to; /* numbers of endpoints; -1: none */
    void *context;
    void *pull; /* bound */
    void *push; /* connected */
    pthread_t thread;
} station;

struct raw {
    char directory[32];
    uint64_t bytes;
    int hwm, buffer_bytes;
    float *vector; /* [bytes], what messages are made from */
    atomic_bool stop;
    atomic_bool failed;
    const gq_bench_point *point;
    size_t thread_count;
    station stations[THREADS_MAX];
};

static void
endpoint_of (const raw *self, int number, char endpoint[ENDPOINT_BYTES])
{
    snprintf (endpoint, ENDPOINT_BYTES, "ipc://%s/%d", self->directory, number);
}

static void *
open_end (station *at, int type, int number)
{
    char endpoint[ENDPOINT_BYTES];
    endpoint_of (at->shared, number, endpoint);
    const gq_socket_options options = {.type = type,
                                       .send_hwm = at->shared->hwm,
                                       .receive_hwm = at->shared->hwm,
                                       .buffer_bytes = at->shared->buffer_bytes,
                                       .message_bytes_max = -1};
    void *socket = zmq_socket (at->context, type);
    if (socket == NULL)
        return NULL;
    gq_socket_set (socket, &options);
    int slice_ms = SLICE_MS;
    bool ready =
        zmq_setsockopt (socket, ZMQ_SNDTIMEO, &slice_ms, sizeof slice_ms) == 0 &&
        zmq_setsockopt (socket, ZMQ_RCVTIMEO, &slice_ms, sizeof slice_ms) == 0 &&
        (type == ZMQ_PULL ? zmq_bind (socket, endpoint) : zmq_connect (socket, endpoint)) == 0;
    if (!ready) {
        zmq_close (socket);
        return NULL;
    }
    return socket;
}

static void
station_close (station *at)
{
    if (at->pull != NULL)
        zmq_close (at->pull);
    if (at->push != NULL)
        zmq_close (at->push);
    if (at->context != NULL)
        zmq_ctx_term (at->context);
}

static bool
station_open (station *at)
{
    at->context = zmq_ctx_new ();
    if (at->context == NULL)
        return false;
    if (at->from >= 0)
        at->pull = open_end (at, ZMQ_PULL, at->from);
    if (at->to >= 0)
        at->push = open_end (at, ZMQ_PUSH, at->to);
    return (at->from < 0 || at->pull != NULL) && (at->to < 0 || at->push != NULL);
}

/* A new message made from the vector; true when sent. */
static bool
send_new (station *at)
{
    zmq_msg_t message;
    if (zmq_msg_init_size (&message, at->shared->bytes) != 0)
        return false;
    memcpy (zmq_msg_data (&message), at->shared->vector, at->shared->bytes);
    while (zmq_msg_send (&message, at->push, 0) < 0)
        if ((errno != EAGAIN && errno != EINTR) || atomic_load (&at->shared->stop)) {
            zmq_msg_close (&message);
            return false;
        }
    return true;
}

static void
send_all (station *at)
{
    while (!atomic_load (&at->shared->stop))
        if (!send_new (at) && !atomic_load (&at->shared->stop)) {
            atomic_store (&at->shared->failed, true);
            return;
        }
}

static void
forward_all (station *at)
{
    zmq_msg_t message;
    zmq_msg_init (&message);
    while (!atomic_load (&at->shared->stop)) {
        if (zmq_msg_recv (&message, at->pull, 0) < 0)
            continue;
        while (zmq_msg_send (&message, at->push, 0) < 0 && !atomic_load (&at->shared->stop))
            continue;
    }
    zmq_msg_close (&message);
}

static void *
station_main (void *argument)
{
    station *at = argument;
    if (!station_open (at))
        atomic_store (&at->shared->failed, true);
    else if (at->pull == NULL)
        send_all (at);
    else
        forward_all (at);
    station_close (at);
    return NULL;
}

static bool
add_thread (raw *self, int from, int to)
{
    station *at = &self->stations[self->thread_count];
    *at = (station){.shared = self, .from = from, .to = to};
    if (pthread_create (&at->thread, NULL, station_main, at) != 0)
        return false;
    self->thread_count++;
    return true;
}

static gq_status
raw_open (raw *self, uint64_t bytes, gq_bench_buffers buffers, const gq_bench_point *point,
          gq_error *error)
{
    self->point = point;
    self->bytes = bytes;
    self->hwm = TIGHT_MESSAGES;
    self->buffer_bytes = TIGHT_BUFFER_BYTES;
    if (buffers == GQ_BENCH_ROOMY) {
        uint64_t messages = ROOMY_BYTES / bytes;
        self->hwm = messages < 2 ? 2 : messages < ROOMY_MESSAGES ? (int)messages : ROOMY_MESSAGES;
        self->buffer_bytes = 0;
    }
    self->vector = gq_bench_vector (bytes / sizeof (float) + 1);
    if (self->vector == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory for messages of %llu bytes",
                        (unsigned long long)bytes);
    snprintf (self->directory, sizeof self->directory, "/tmp/gq-bench-XXXXXX");
    if (mkdtemp (self->directory) == NULL) {
        self->directory[0] = '\0';
        return gq_fail (error, GQ_IO, "no directory in /tmp for sockets: %s", strerror (errno));
    }
    return GQ_OK;
}

/* `caller` is the calling thread's station. */
static void
raw_close (raw *self, station *caller)
{
    atomic_store (&self->stop, true);
    station_close (caller);
    for (size_t i = 0; i < self->thread_count; i++)
        pthread_join (self->stations[i].thread, NULL);
    for (int number = 0; number <= RELAYS_MAX && self->directory[0] != '\0'; number++) {
        char endpoint[ENDPOINT_BYTES];
        endpoint_of (self, number, endpoint);
        unlink (endpoint + strlen ("ipc://")); /* ZeroMQ has removed most of them */
    }
    if (self->directory[0] != '\0')
        rmdir (self->directory);
    free (self->vector);
    free (self);
}

/* Take one message and forget it.  GQ_AGAIN: none in this slice. */
static gq_status
receive_one (const raw *self, station *at, zmq_msg_t *message, gq_error *error)
{
    if (zmq_msg_recv (message, at->pull, 0) >= 0)
        return GQ_OK;
    if (self->point->interrupted ())
        return gq_fail (error, GQ_CLOSED, "interrupted");
    if (atomic_load (&self->failed))
        return gq_fail (error, GQ_IO,
                        "a raw ZeroMQ socket cannot be opened or used; are there enough files "
                        "(ulimit -n) and memory?");
    return GQ_AGAIN;
}

static gq_status
receive_first (const raw *self, station *at, zmq_msg_t *message, gq_error *error)
{
    uint64_t until_ns = gq_now_ns () + (uint64_t)GQ_BENCH_START_MS * MS_NS;
    gq_status status;
    do
        status = receive_one (self, at, message, error);
    while (status == GQ_AGAIN && gq_now_ns () < until_ns);
    if (status == GQ_AGAIN)
        status = gq_fail (error, GQ_TIMEOUT, "no raw ZeroMQ message of %llu bytes came in time",
                          (unsigned long long)self->bytes);
    return status;
}

/* The time of a measurement, after its warm-up. */
typedef struct span {
    uint64_t start_ns, end_ns, now_ns;
} span;

static span
span_from_now (const raw *self)
{
    uint64_t now_ns = gq_now_ns ();
    uint64_t start_ns = now_ns + gq_bench_warm_ns (self->point->seconds);
    return (span){.start_ns = start_ns,
                  .end_ns = start_ns + (uint64_t)(self->point->seconds * S_NS),
                  .now_ns = now_ns};
}

/* Not before something came: a busy machine, or a large message, needs longer. */
static bool
span_over (const span *time, uint64_t count)
{
    return time->now_ns >= time->end_ns &&
           (count > 0 || time->now_ns >= time->end_ns + (uint64_t)GQ_BENCH_START_MS * MS_NS);
}

static double
span_rate (const span *time, uint64_t count)
{
    return (double)count * S_NS / (double)(time->now_ns - time->start_ns);
}

static gq_status
count_messages (const raw *self, station *at, double *per_s, gq_error *error)
{
    zmq_msg_t message;
    zmq_msg_init (&message);
    gq_status status = receive_first (self, at, &message, error);
    span time = span_from_now (self);
    uint64_t count = 0;
    while ((status == GQ_OK || status == GQ_AGAIN) && !span_over (&time, count)) {
        status = receive_one (self, at, &message, error);
        time.now_ns = gq_now_ns ();
        if (status == GQ_OK && time.now_ns >= time.start_ns)
            count++;
    }
    zmq_msg_close (&message);
    *per_s = span_rate (&time, count);
    return status == GQ_AGAIN ? GQ_OK : status;
}

gq_status
gq_bench_hops (double *per_s, uint64_t bytes, unsigned hops, gq_bench_buffers buffers,
               const gq_bench_point *point, gq_error *error)
{
    raw *self = calloc (1, sizeof *self);
    if (self == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory");
    station caller = {.shared = self, .from = 0, .to = -1};
    gq_status status = raw_open (self, bytes, buffers, point, error);
    bool started = status == GQ_OK && station_open (&caller);
    if (started && hops == 2)
        started = add_thread (self, 1, 0);
    for (uint32_t i = 0; started && i < point->actors; i++)
        started = add_thread (self, -1, hops == 2 ? 1 : 0);
    if (started)
        status = count_messages (self, &caller, per_s, error);
    else if (status == GQ_OK)
        status = gq_fail (error, GQ_IO, "cannot start raw ZeroMQ: %s", strerror (errno));
    raw_close (self, &caller);
    return status;
}

/* When the messages on the way left; they come back in order. */
typedef struct departures {
    uint64_t *sent_ns; /* [size] */
    uint32_t size;
    uint64_t sent, received;
} departures;

static bool
depart (departures *times, station *at)
{
    times->sent_ns[times->sent++ % times->size] = gq_now_ns ();
    return send_new (at);
}

static gq_status
echo_messages (const raw *self, station *at, departures *times, gq_bench_echo *echo,
               gq_error *error)
{
    zmq_msg_t message;
    zmq_msg_init (&message);
    gq_histogram took_ns;
    gq_histogram_clear (&took_ns);
    gq_status status = GQ_OK;
    if (!depart (times, at))
        status = gq_fail (error, GQ_IO, "a raw ZeroMQ message cannot be sent");
    if (status == GQ_OK)
        status = receive_first (self, at, &message, error);
    times->received++;
    span time = span_from_now (self);
    while ((status == GQ_OK || status == GQ_AGAIN) && !span_over (&time, took_ns.count)) {
        while (times->sent - times->received < times->size)
            if (!depart (times, at))
                break;
        status = receive_one (self, at, &message, error);
        time.now_ns = gq_now_ns ();
        if (status != GQ_OK)
            continue;
        uint64_t sent_ns = times->sent_ns[times->received++ % times->size];
        if (time.now_ns >= time.start_ns)
            gq_histogram_add (&took_ns, time.now_ns - sent_ns);
    }
    zmq_msg_close (&message);
    echo->per_s = span_rate (&time, took_ns.count);
    echo->p50_us = (double)gq_histogram_quantile (&took_ns, 0.5) / 1e3;
    echo->p99_us = (double)gq_histogram_quantile (&took_ns, 0.99) / 1e3;
    return status == GQ_AGAIN ? GQ_OK : status;
}

gq_status
gq_bench_echo_rate (gq_bench_echo *echo, uint64_t bytes, uint32_t in_flight,
                    const gq_bench_point *point, gq_error *error)
{
    raw *self = calloc (1, sizeof *self);
    departures times = {.sent_ns = calloc (in_flight, sizeof *times.sent_ns), .size = in_flight};
    if (self == NULL || times.sent_ns == NULL) {
        free (self);
        free (times.sent_ns);
        return gq_fail (error, GQ_MEMORY, "out of memory");
    }
    station caller = {.shared = self, .from = 0, .to = 1};
    gq_status status = raw_open (self, bytes, GQ_BENCH_ROOMY, point, error);
    bool started = status == GQ_OK;
    for (int relay = 1; started && relay <= RELAYS_MAX; relay++)
        started = add_thread (self, relay, relay == RELAYS_MAX ? 0 : relay + 1);
    started = started && station_open (&caller);
    if (started)
        status = echo_messages (self, &caller, &times, echo, error);
    else if (status == GQ_OK)
        status = gq_fail (error, GQ_IO, "cannot start raw ZeroMQ: %s", strerror (errno));
    raw_close (self, &caller);
    free (times.sent_ns);
    return status;
}
