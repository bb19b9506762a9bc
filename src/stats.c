/*
 * Latency histogram, and the process' only reads of the clocks.  Beside the gradient's path: it
 * measures the steps.
 *
 * It must never allocate, lock or loop over more than its buckets: it is called for each gradient.
 */
#include "stats.h"

#include <assert.h>
#include <math.h>
#include <stddef.h>
#include <string.h>
#include <time.h>

/* 32 buckets to a power of two, as the header promises. */
#define SUB_BITS  5
#define SUB_COUNT (1U << SUB_BITS)

_Static_assert(GQ_HISTOGRAM_BUCKETS == SUB_COUNT * (64 - SUB_BITS + 1),
               "one group for values below 32, one for each power of two from 2^5 to 2^63");

/*
 * Group 0 holds 0..31, a bucket each.  Group g >= 1 holds [2^(g+4), 2^(g+5)), cut into 32 buckets
 * of 2^(g-1) values; within it the bucket is the five bits below the leading one.
 */
static size_t
bucket_of (uint64_t value)
{
    if (value < SUB_COUNT)
        return (size_t)value;
    const unsigned exponent = 63 - (unsigned)__builtin_clzll (value);
    const unsigned group = exponent - SUB_BITS + 1;
    return group * SUB_COUNT + (size_t)(value >> (exponent - SUB_BITS) & (SUB_COUNT - 1));
}

/* The largest value that bucket_of puts into `bucket`. */
static uint64_t
bucket_edge (size_t bucket)
{
    const size_t group = bucket / SUB_COUNT, sub = bucket % SUB_COUNT;
    if (group == 0)
        return sub;
    const uint64_t width = UINT64_C (1) << (group - 1);
    return (SUB_COUNT + sub) * width + (width - 1);
}

void
gq_histogram_clear (gq_histogram *histogram)
{
    memset (histogram, 0, sizeof *histogram);
}

void
gq_histogram_add (gq_histogram *histogram, uint64_t value)
{
    histogram->count++;
    if (__builtin_add_overflow (histogram->sum, value, &histogram->sum))
        histogram->sum = UINT64_MAX; /* 584 years of nanoseconds: only absurd values get here */
    if (value > histogram->max)
        histogram->max = value;
    histogram->buckets[bucket_of (value)]++;
}

void
gq_histogram_merge (gq_histogram *histogram, const gq_histogram *other)
{
    histogram->count += other->count;
    if (__builtin_add_overflow (histogram->sum, other->sum, &histogram->sum))
        histogram->sum = UINT64_MAX;
    if (other->max > histogram->max)
        histogram->max = other->max;
    for (size_t i = 0; i < GQ_HISTOGRAM_BUCKETS; i++)
        histogram->buckets[i] += other->buckets[i];
}

void
gq_histogram_decay (gq_histogram *histogram)
{
    const double mean = gq_histogram_mean (histogram);
    uint64_t count = 0, top = 0;
    for (size_t i = 0; i < GQ_HISTOGRAM_BUCKETS; i++) {
        histogram->buckets[i] /= 2;
        count += histogram->buckets[i];
        if (histogram->buckets[i] > 0)
            top = bucket_edge (i);
    }
    /* The mean survives; the maximum falls with the bucket that held it. */
    const double sum = mean * (double)count;
    histogram->sum = sum < 0x1p64 ? (uint64_t)sum : UINT64_MAX;
    histogram->count = count;
    if (top < histogram->max)
        histogram->max = top;
}

uint64_t
gq_histogram_quantile (const gq_histogram *histogram, double q)
{
    assert (q >= 0 && q <= 1);
    if (histogram->count == 0)
        return 0;
    /* At least one value: the smallest value is the 0-quantile. */
    const double wanted = fmax (1, ceil (q * (double)histogram->count));
    uint64_t seen = 0;
    for (size_t i = 0; i < GQ_HISTOGRAM_BUCKETS; i++) {
        seen += histogram->buckets[i];
        if ((double)seen >= wanted) {
            const uint64_t edge = bucket_edge (i);
            return edge < histogram->max ? edge : histogram->max;
        }
    }
    return histogram->max;
}

double
gq_histogram_mean (const gq_histogram *histogram)
{
    return histogram->count > 0 ? (double)histogram->sum / (double)histogram->count : 0;
}

static uint64_t
read_clock (clockid_t clock)
{
    struct timespec now;
    /* Fails only for a clock that the system does not have; POSIX has both. */
    int failed = clock_gettime (clock, &now);
    assert (failed == 0);
    return (uint64_t)now.tv_sec * UINT64_C (1000000000) + (uint64_t)now.tv_nsec;
}

uint64_t
gq_now_ns (void)
{
    return read_clock (CLOCK_MONOTONIC);
}

uint64_t
gq_wall_ns (void)
{
    return read_clock (CLOCK_REALTIME);
}
