/*
 * Limits of one thread: memory bandwidth and the bare update rule.  Step 5 of a gradient's path
 * without the others.
 *
 * Must never be cleverer than the loop it stands beside: one thread, the plug-in host's own step.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench.h"
#include "plugin.h"
#include "stats.h"

#define S_NS 1e9
/* STREAM asks for arrays of at least four times the last cache. */
#define CACHES          4
#define TRIAD_BYTES_MIN ((size_t)64 << 20)
/* Where the system names an L3 that many cores share: enough to be beyond our part of it. */
#define TRIAD_BYTES_MAX ((size_t)256 << 20)
/* Batches at least: the first ones bring pages and clocks up. */
#define TRIAD_BATCHES 4
/* Steps between two looks at the clock take about this long, so that looking costs nothing. */
#define BATCH_NS   500000u
#define WARM_S_MAX 0.25
/* The best pass of a triad comes soon. */
#define TRIAD_S_MAX 0.5
/* Rates of which the kernel's is the median: what else runs on the machine hits a few of them. */
#define SLICES 21
/* What plug-ins are promised, and what a cache line is. */
#define ALIGNMENT 64

uint64_t
gq_bench_warm_ns (double seconds)
{
    return (uint64_t)(fmin (seconds / 4, WARM_S_MAX) * S_NS);
}

void
gq_bench_fill (void *to, uint64_t bytes, const float *piece)
{
    const uint64_t size = GQ_BENCH_PIECE * sizeof *piece;
    for (uint64_t at = 0; at < bytes; at += size)
        memcpy ((uint8_t *)to + at, piece, (size_t)(bytes - at < size ? bytes - at : size));
}

float *
gq_bench_vector (uint64_t count)
{
    size_t bytes = (size_t)count * sizeof (float);
    float *vector = aligned_alloc (ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    if (vector == NULL)
        return NULL;
    /* Knuth's 64-bit linear congruential generator; the size of a gradient, around 1e-3. */
    uint64_t state = 1;
    for (uint64_t i = 0; i < count; i++) {
        state = state * UINT64_C (6364136223846793005) + UINT64_C (1442695040888963407);
        float magnitude = 1e-3f * (0.5f + (float)(state >> 40) * 0x1p-24f);
        vector[i] = (state >> 33 & 1) != 0 ? magnitude : -magnitude;
    }
    return vector;
}

static __attribute__ ((noinline)) void
triad (double *restrict a, const double *restrict b, const double *restrict c, size_t count,
       double s)
{
    for (size_t i = 0; i < count; i++)
        a[i] = b[i] + s * c[i];
}

static size_t
triad_bytes (void)
{
    long cache = sysconf (_SC_LEVEL3_CACHE_SIZE);
    size_t bytes = cache > 0 ? CACHES * (size_t)cache : 0;
    if (bytes < TRIAD_BYTES_MIN)
        return TRIAD_BYTES_MIN;
    return bytes > TRIAD_BYTES_MAX ? TRIAD_BYTES_MAX : bytes;
}

/* The best of all batches of passes; they are long enough to be timed. */
static double
triad_rate (double *a, const double *b, const double *c, size_t count, const gq_bench_point *point)
{
    double best_ns = INFINITY;
    uint64_t end_ns = gq_now_ns () + (uint64_t)(fmin (point->seconds, TRIAD_S_MAX) * S_NS);
    unsigned batch = 1, timed = 0;
    while ((timed < TRIAD_BATCHES || gq_now_ns () < end_ns) && !point->interrupted ()) {
        uint64_t start_ns = gq_now_ns ();
        for (unsigned i = 0; i < batch; i++)
            triad (a, b, c, count, 1.0 + i);
        double took_ns = (double)(gq_now_ns () - start_ns);
        if (took_ns < BATCH_NS) {
            batch *= 2;
            continue;
        }
        best_ns = fmin (best_ns, took_ns / batch);
        timed++;
    }
    return 3.0 * sizeof *a * (double)count * S_NS / best_ns;
}

gq_status
gq_bench_triad (double *bytes_per_s, uint64_t array_bytes, const gq_bench_point *point,
                gq_error *error)
{
    size_t count = (array_bytes > 0 ? array_bytes : triad_bytes ()) / sizeof (double) + 1;
    double *a = malloc (count * sizeof *a);
    double *b = malloc (count * sizeof *b);
    double *c = malloc (count * sizeof *c);
    gq_status status = GQ_OK;
    if (a == NULL || b == NULL || c == NULL) {
        status = gq_fail (error, GQ_MEMORY, "out of memory for three arrays of %zu bytes",
                          count * sizeof *a);
    } else {
        for (size_t i = 0; i < count; i++) {
            a[i] = 0;
            b[i] = (double)i;
            c[i] = 1;
        }
        *bytes_per_s = triad_rate (a, b, c, count, point);
        if (point->interrupted ())
            status = gq_fail (error, GQ_CLOSED, "interrupted");
    }
    free (a);
    free (b);
    free (c);
    return status;
}

typedef struct bare {
    gq_rule *rule;
    float *weights, *next, *gradient; /* f32[params] */
    uint64_t batch;                   /* steps between two looks at the clock */
} bare;

static void
step (bare *self, uint64_t steps)
{
    for (uint64_t i = 0; i < steps; i++) {
        gq_rule_step (self->rule, self->weights, self->next, self->gradient, 1);
        float *old = self->weights;
        self->weights = self->next;
        self->next = old;
    }
}

/* Steps in batches from now on, for `for_ns`.  The rate; 0 when interrupted. */
static double
rate (bare *self, const gq_bench_point *point, uint64_t for_ns)
{
    uint64_t steps = 0, start_ns = gq_now_ns (), now_ns = start_ns, before_ns = start_ns;
    while (now_ns < start_ns + for_ns) {
        step (self, self->batch);
        steps += self->batch;
        now_ns = gq_now_ns ();
        if (now_ns - before_ns < BATCH_NS)
            self->batch *= 2;
        before_ns = now_ns;
        if (point->interrupted ())
            return 0;
    }
    return (double)steps * S_NS / (double)(now_ns - start_ns);
}

static int
ascending (const void *left, const void *right)
{
    const double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static gq_status
measure (bare *self, gq_bench_kernel *kernel, const gq_bench_point *point, gq_error *error)
{
    uint64_t count = point->params;
    double rates[SLICES];
    self->batch = 1;
    self->weights = gq_bench_vector (count);
    self->next = gq_bench_vector (count);
    self->gradient = gq_bench_vector (count);
    if (self->weights == NULL || self->next == NULL || self->gradient == NULL ||
        gq_rule_reset (self->rule, count) != GQ_OK)
        return gq_fail (error, GQ_MEMORY, "out of memory for an update rule on %llu parameters",
                        (unsigned long long)count);
    /* At least one step warms up, whatever the time. */
    (void)rate (self, point, gq_bench_warm_ns (point->seconds) + 1);
    for (size_t i = 0; i < SLICES; i++)
        rates[i] = rate (self, point, (uint64_t)(point->seconds * S_NS / SLICES));
    qsort (rates, SLICES, sizeof *rates, ascending);
    kernel->per_s = rates[SLICES / 2];
    kernel->best_per_s = rates[SLICES - 1];
    size_t slots = gq_rule_slot_count (self->rule);
    kernel->bytes_per_s =
        kernel->per_s * (double)count * sizeof (float) * (3.0 + 2.0 * (double)slots);
    snprintf (kernel->cpu, sizeof kernel->cpu, "%s", gq_rule_cpu (self->rule));
    return point->interrupted () ? gq_fail (error, GQ_CLOSED, "interrupted") : GQ_OK;
}

gq_status
gq_bench_kernel_rate (gq_bench_kernel *kernel, const gq_bench_point *point, gq_error *error)
{
    bare self = {.rule = NULL};
    gq_error warning = {""};
    gq_status status = gq_rule_load (&self.rule, point->optimizer, point->plugins, point->sets,
                                     point->set_count, point->cpu, &warning, error);
    if (status == GQ_OK)
        status = measure (&self, kernel, point, error);
    gq_rule_free (&self.rule);
    free (self.weights);
    free (self.next);
    free (self.gradient);
    return status;
}
