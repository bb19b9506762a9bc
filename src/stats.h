/*
 * Latency histogram and rate counters.  No clock, no allocation, no lock: the owner is one thread.
 */
#ifndef GQ_STATS_H
#define GQ_STATS_H

#include <stdint.h>

/*
 * Log-linear histogram of uint64 values (HdrHistogram's idea): exact below 32, then 32 buckets to
 * each power of two, so a quantile is within 1/32 of the truth.
 */
#define GQ_HISTOGRAM_BUCKETS (32 * 60)
typedef struct gq_histogram {
    uint64_t count;
    uint64_t sum;
    uint64_t max;
    uint64_t buckets[GQ_HISTOGRAM_BUCKETS];
} gq_histogram;

void gq_histogram_clear (gq_histogram *histogram);
void gq_histogram_add (gq_histogram *histogram, uint64_t value);
/* As if every value of `other` had been added here. */
void gq_histogram_merge (gq_histogram *histogram, const gq_histogram *other);
/* Halve every bucket: quantiles then follow the recent past. */
void gq_histogram_decay (gq_histogram *histogram);
/* Smallest value v such that at least a share q in [0, 1] of the values is <= v (upper edge of its
 * bucket, never above max); 0 when empty. */
uint64_t gq_histogram_quantile (const gq_histogram *histogram, double q);
double gq_histogram_mean (const gq_histogram *histogram);

/* CLOCK_MONOTONIC and CLOCK_REALTIME in nanoseconds; the only clock reads in libgradq's users. */
uint64_t gq_now_ns (void);
uint64_t gq_wall_ns (void);

#endif
