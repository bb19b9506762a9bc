/*
 * The whole loop: gradients of ours through a real broker and a real optimizer, and the weights
 * back.  Steps 0 to 7 of a gradient's path, timed from outside.
 *
 * A gradient counts once it is acknowledged and the weights that it led to are here.  Must never
 * give a rate for gradients that were refused.
 */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bench.h"
#include "client_internal.h"
#include "stats.h"

#define S_NS  1e9
#define MS_NS 1000000u
/* How often the calling thread looks after processes and actors. */
#define WATCH_MS 5
/* Of a cache line of 64 bytes. */
#define LINE_FLOATS 16

typedef struct loop loop;

typedef struct actor {
    loop *shared;
    pthread_t thread;
    gq_client *client;
    uint64_t sent_ns[GQ_WINDOW_MAX]; /* of sequence s at [s % GQ_WINDOW_MAX] */
    gq_histogram took_ns;
    /* versions seen within the time */
    uint64_t seen, first_version, last_version, first_ns, last_ns;
    uint32_t looked;  /* keeps the compiler from leaving the weights unread */
    const char *lane; /* agreed on; static */
    gq_status status;
    gq_error error;
} actor;

struct loop {
    const gq_bench_point *point;
    gq_bench_service service;
    gq_tensor_shape tensor;
    float *gradient; /* f32[GQ_BENCH_PIECE], what every gradient is made of */
    float *initial;  /* f32[params] */
    pthread_mutex_t lock;
    pthread_cond_t go;
    bool set_off; /* under the lock: start_ns is set */
    uint64_t start_ns;
    _Atomic uint64_t end_ns; /* 0: not over yet */
    _Atomic uint64_t returned;
    atomic_uint opened, ended;
    uint64_t broker_bytes, optimizer_bytes; /* resident when the time was over */
    uint32_t actor_count;
    actor actors[GQ_BENCH_ACTORS_MAX];
};

/* Clients ask without an argument.  One loop runs at a time, in one process. */
static atomic_bool stop_asked;

static bool
asked_to_stop (void)
{
    return atomic_load (&stop_asked);
}

/* Does what happens at that time belong to the measurement? */
static bool
counts (const loop *self, uint64_t now_ns)
{
    uint64_t end_ns = atomic_load (&self->end_ns);
    return now_ns >= self->start_ns && (end_ns == 0 || now_ns < end_ns);
}

static void
note_version (actor *self, const gq_weights *weights, uint64_t now_ns)
{
    if (self->seen > 0 && weights->version == self->last_version)
        return;
    if (self->seen++ == 0) {
        self->first_version = weights->version;
        self->first_ns = now_ns;
    }
    self->last_version = weights->version;
    self->last_ns = now_ns;
}

/* Read an element of every cache line, as whoever computes from these weights has to. */
static uint32_t
look_at (const gq_weights *weights)
{
    uint32_t sum = 0;
    for (uint64_t i = 0; i < weights->count; i += LINE_FLOATS) {
        uint32_t bits;
        memcpy (&bits, &weights->data[i], sizeof bits);
        sum += bits;
    }
    return sum;
}

/* One more gradient; with a full window, wait for the oldest. */
static gq_status
turn (actor *self)
{
    loop *shared = self->shared;
    gq_weights weights;
    gq_status status = gq_client_weights (self->client, &weights);
    if (status != GQ_OK)
        return status;
    self->looked += look_at (&weights);
    float *buffer = gq_client_reserve (self->client);
    if (buffer == NULL)
        return gq_fail (&self->error, GQ_MEMORY, "out of memory for a gradient");
    gq_bench_fill (buffer, shared->point->params * sizeof *buffer, shared->gradient);
    uint64_t sequence, now_ns = gq_now_ns ();
    if (counts (shared, now_ns))
        note_version (self, &weights, now_ns);
    status = gq_client_commit (self->client, 1, &sequence);
    if (status != GQ_OK)
        return status;
    self->sent_ns[sequence % GQ_WINDOW_MAX] = now_ns;
    if (sequence < shared->point->window)
        return GQ_OK;
    uint64_t oldest = sequence - shared->point->window + 1;
    status = gq_client_wait (self->client, oldest);
    now_ns = gq_now_ns ();
    if (status == GQ_OK && counts (shared, now_ns)) {
        gq_histogram_add (&self->took_ns, now_ns - self->sent_ns[oldest % GQ_WINDOW_MAX]);
        atomic_fetch_add_explicit (&shared->returned, 1, memory_order_relaxed);
    }
    return status;
}

static gq_status
act (actor *self)
{
    loop *shared = self->shared;
    const gq_client_config config = {.address = shared->service.address,
                                     .actor = GQ_ACTOR_ANY,
                                     .window = shared->point->window,
                                     .timeout_ms = GQ_BENCH_START_MS,
                                     .resend_ms = GQ_BENCH_START_MS,
                                     .lane = shared->point->lane,
                                     .encoding = shared->point->encoding,
                                     .tensors = &shared->tensor,
                                     .tensor_count = 1,
                                     .initial = shared->initial,
                                     .interrupted = asked_to_stop};
    gq_status status = gq_client_open (&self->client, &config, &self->error);
    /* Gradients may be refused later; now it is what the point asks for. */
    if (status == GQ_REFUSED)
        status = GQ_INVALID;
    if (status != GQ_OK)
        return status;
    self->lane = gq_client_lane (self->client, NULL);
    atomic_fetch_add (&shared->opened, 1);
    pthread_mutex_lock (&shared->lock);
    while (!shared->set_off)
        pthread_cond_wait (&shared->go, &shared->lock);
    pthread_mutex_unlock (&shared->lock);
    while (status == GQ_OK && atomic_load (&shared->end_ns) == 0)
        status = asked_to_stop () ? GQ_CLOSED : turn (self);
    gq_client_counts fate = gq_client_count (self->client);
    if (status == GQ_OK && fate.refused > 0)
        status = gq_fail (&self->error, GQ_REFUSED,
                          "%llu gradients were refused, so there is no rate: %s",
                          (unsigned long long)fate.refused, gq_status_text (fate.refused_reason));
    if (status != GQ_OK && self->error.text[0] == '\0')
        gq_fail (&self->error, status, "%s", gq_status_text (status));
    return status;
}

static void *
actor_main (void *argument)
{
    actor *self = argument;
    self->status = act (self);
    /* The others need not go on for a measurement that has failed. */
    if (self->status != GQ_OK)
        atomic_store (&stop_asked, true);
    gq_client_close (&self->client);
    atomic_fetch_add (&self->shared->ended, 1);
    return NULL;
}

static void
set_off (loop *self)
{
    pthread_mutex_lock (&self->lock);
    self->start_ns = gq_now_ns () + gq_bench_warm_ns (self->point->seconds);
    self->set_off = true;
    pthread_cond_broadcast (&self->go);
    pthread_mutex_unlock (&self->lock);
}

/* Over when the time is, but not before enough came back: large vectors, and a busy machine, need
 * longer. */
static void
end_in_time (loop *self)
{
    uint64_t now_ns = gq_now_ns ();
    uint64_t due_ns = self->start_ns + (uint64_t)(self->point->seconds * S_NS);
    if (now_ns >= due_ns + (uint64_t)GQ_BENCH_START_MS * MS_NS ||
        (now_ns >= due_ns && atomic_load (&self->returned) >= GQ_BENCH_COUNT_MIN)) {
        atomic_store (&self->end_ns, now_ns);
        self->broker_bytes = gq_bench_resident (self->service.broker);
        self->optimizer_bytes = gq_bench_resident (self->service.optimizer);
    }
}

/* Until every actor has ended.  The reason when we ended it early. */
static gq_status
watch (loop *self, gq_error *error)
{
    const struct timespec pause = {.tv_nsec = WATCH_MS * MS_NS};
    gq_status status = GQ_OK;
    while (atomic_load (&self->ended) < self->actor_count) {
        if (status == GQ_OK)
            status = gq_bench_service_alive (&self->service, error);
        if (status == GQ_OK && self->point->interrupted ())
            status = gq_fail (error, GQ_CLOSED, "interrupted");
        if (status != GQ_OK)
            atomic_store (&stop_asked, true);
        if (!self->set_off &&
            (asked_to_stop () || atomic_load (&self->opened) == self->point->actors))
            set_off (self);
        if (self->set_off && atomic_load (&self->end_ns) == 0)
            end_in_time (self);
        nanosleep (&pause, NULL);
    }
    return status;
}

static gq_status
run_actors (loop *self, gq_error *error)
{
    gq_status status = GQ_OK;
    for (; status == GQ_OK && self->actor_count < self->point->actors; self->actor_count++) {
        actor *one = &self->actors[self->actor_count];
        one->shared = self;
        if (pthread_create (&one->thread, NULL, actor_main, one) != 0)
            break;
    }
    if (self->actor_count < self->point->actors) {
        status = gq_fail (error, GQ_IO, "no thread for actor %u of %u", self->actor_count + 1,
                          self->point->actors);
        atomic_store (&stop_asked, true);
    }
    gq_status watched = watch (self, status == GQ_OK ? error : NULL);
    for (uint32_t i = 0; i < self->actor_count; i++)
        pthread_join (self->actors[i].thread, NULL);
    if (status == GQ_OK)
        status = watched;
    /* Who was only stopped has nothing to say. */
    for (uint32_t i = 0; i < self->actor_count && status == GQ_OK; i++) {
        const actor *one = &self->actors[i];
        if (one->status == GQ_INVALID) /* any of them would say so */
            status = gq_fail (error, one->status, "%s", one->error.text);
        else if (one->status != GQ_OK && one->status != GQ_CLOSED)
            status = gq_fail (error, one->status, "actor %u: %s", i, one->error.text);
    }
    return status;
}

static gq_status
evaluate (const loop *self, gq_bench_loop *figures, gq_error *error)
{
    gq_histogram all;
    gq_histogram_clear (&all);
    uint64_t slowest = UINT64_MAX;
    for (uint32_t i = 0; i < self->actor_count; i++) {
        const gq_histogram *one = &self->actors[i].took_ns;
        gq_histogram_merge (&all, one);
        slowest = one->count < slowest ? one->count : slowest;
    }
    if (all.count == 0)
        return gq_fail (
            error, GQ_TIMEOUT, "no gradient of %llu elements came back within %g s and %d ms more",
            (unsigned long long)self->point->params, self->point->seconds, GQ_BENCH_START_MS);
    const actor *first = &self->actors[0];
    double span_s = (double)(first->last_ns - first->first_ns) / S_NS;
    snprintf (figures->lane, sizeof figures->lane, "%s", first->lane);
    figures->gradients = all.count;
    figures->seconds = (double)(atomic_load (&self->end_ns) - self->start_ns) / S_NS;
    figures->per_s = (double)all.count / figures->seconds;
    figures->p50_us = (double)gq_histogram_quantile (&all, 0.5) / 1e3;
    figures->p99_us = (double)gq_histogram_quantile (&all, 0.99) / 1e3;
    figures->max_us = (double)all.max / 1e3;
    figures->slowest_share = (double)slowest * self->actor_count / (double)all.count;
    figures->broker_bytes = self->broker_bytes;
    figures->optimizer_bytes = self->optimizer_bytes;
    figures->versions_per_s = 0;
    figures->seen_per_s = 0;
    if (span_s > 0) {
        figures->versions_per_s = (double)(first->last_version - first->first_version) / span_s;
        figures->seen_per_s = (double)(first->seen - 1) / span_s;
    }
    return GQ_OK;
}

static void
loop_free (loop *self)
{
    free (self->gradient);
    free (self->initial);
    pthread_cond_destroy (&self->go);
    pthread_mutex_destroy (&self->lock);
    free (self);
}

gq_status
gq_bench_loop_rate (gq_bench_loop *figures, const gq_bench_point *point, gq_error *error)
{
    loop *self = calloc (1, sizeof *self);
    if (self == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory");
    pthread_mutex_init (&self->lock, NULL);
    pthread_cond_init (&self->go, NULL);
    self->point = point;
    self->tensor = (gq_tensor_shape){.name = "w", .rank = 1, .shape = {point->params}};
    self->gradient = gq_bench_vector (GQ_BENCH_PIECE);
    self->initial = calloc (point->params, sizeof *self->initial);
    atomic_store (&stop_asked, false);
    gq_status status = GQ_OK;
    if (self->gradient == NULL || self->initial == NULL)
        status = gq_fail (error, GQ_MEMORY, "out of memory for %llu parameters",
                          (unsigned long long)point->params);
    if (status == GQ_OK)
        status = gq_bench_service_start (&self->service, point, error);
    if (status == GQ_OK) {
        status = run_actors (self, error);
        gq_bench_service_stop (&self->service);
    }
    if (status == GQ_OK)
        status = evaluate (self, figures, error);
    loop_free (self);
    return status;
}
