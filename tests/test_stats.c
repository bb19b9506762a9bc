/*
 * Histogram and clocks.  The oracle of a quantile is the sorted array.
 */
#include <criterion/criterion.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "stats.h"

TestSuite (stats, .timeout = 60);

static gq_histogram histogram;

/* splitmix64 (Steele, Lea, Flood 2014): any seed will do. */
static uint64_t
next_random (uint64_t *state)
{
    uint64_t z = (*state += UINT64_C (0x9e3779b97f4a7c15));
    z = (z ^ z >> 30) * UINT64_C (0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C (0x94d049bb133111eb);
    return z ^ z >> 31;
}

static int
ascending (const void *left, const void *right)
{
    const uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return (a > b) - (a < b);
}

/* The smallest of sorted[count] such that a share q of them is not above it. */
static uint64_t
true_quantile (const uint64_t *sorted, size_t count, double q)
{
    size_t i = 0;
    while (i + 1 < count && (double)(i + 1) < q * (double)count)
        i++;
    return sorted[i];
}

static void
expect_quantiles (const uint64_t *sorted, size_t count)
{
    static const double shares[] = {0, 0.001, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999, 1};
    for (size_t i = 0; i < sizeof shares / sizeof shares[0]; i++) {
        const uint64_t truth = true_quantile (sorted, count, shares[i]);
        const uint64_t got = gq_histogram_quantile (&histogram, shares[i]);
        /* The edge of a bucket 1/32 of its lowest value wide: never below, at most 1/32 above. */
        cr_assert (got >= truth && got - truth <= truth / 32, "q %g of %zu: %llu, truly %llu",
                   shares[i], count, (unsigned long long)got, (unsigned long long)truth);
        if (truth < 32)
            cr_assert_eq (got, truth);
    }
    cr_assert_eq (gq_histogram_quantile (&histogram, 1), sorted[count - 1]);
}

Test (stats, quantiles_are_within_a_32nd_of_the_sorted_array)
{
    static uint64_t values[5000];
    for (uint64_t seed = 1; seed <= 20; seed++) {
        uint64_t state = seed;
        const size_t count = 1 + (size_t)(next_random (&state) % 5000);
        printf ("seed %llu, %zu values\n", (unsigned long long)seed, count);
        gq_histogram_clear (&histogram);
        for (size_t i = 0; i < count; i++) {
            /* Every magnitude: up to 64 random bits, some of them dropped. */
            const unsigned dropped = (unsigned)(next_random (&state) % 64);
            values[i] = next_random (&state) >> dropped;
            gq_histogram_add (&histogram, values[i]);
        }
        qsort (values, count, sizeof values[0], ascending);
        expect_quantiles (values, count);
        cr_assert_eq (histogram.count, count);
        cr_assert_eq (histogram.max, values[count - 1]);
    }
}

Test (stats, small_values_are_exact)
{
    static uint64_t values[32];
    gq_histogram_clear (&histogram);
    for (uint64_t i = 0; i < 32; i++) {
        values[i] = i;
        gq_histogram_add (&histogram, i);
    }
    expect_quantiles (values, 32);
    cr_assert_eq (gq_histogram_mean (&histogram), 15.5);
}

Test (stats, values_around_every_power_of_two_fall_into_rising_buckets)
{
    uint64_t before = 0;
    for (unsigned bit = 0; bit < 64; bit++) {
        const uint64_t power = UINT64_C (1) << bit;
        for (uint64_t value = power - (bit > 1); value <= power; value++) {
            /* Alone, with a larger one so that max does not hide the bucket's edge. */
            gq_histogram_clear (&histogram);
            gq_histogram_add (&histogram, value);
            gq_histogram_add (&histogram, UINT64_MAX);
            const uint64_t edge = gq_histogram_quantile (&histogram, 0.5);
            cr_assert (edge >= value && edge - value <= value / 32, "%llu: %llu",
                       (unsigned long long)value, (unsigned long long)edge);
            cr_assert (edge > before || value == power - 1 || bit < 2, "%llu",
                       (unsigned long long)value);
            before = edge;
        }
    }
    gq_histogram_add (&histogram, UINT64_MAX);
    cr_assert_eq (gq_histogram_quantile (&histogram, 1), UINT64_MAX);
}

Test (stats, empty_histogram_answers_zero)
{
    gq_histogram_clear (&histogram);
    cr_assert_eq (gq_histogram_quantile (&histogram, 0), 0);
    cr_assert_eq (gq_histogram_quantile (&histogram, 1), 0);
    cr_assert_eq (gq_histogram_mean (&histogram), 0);
    gq_histogram_decay (&histogram);
    cr_assert_eq (histogram.count, 0);
}

Test (stats, mean_is_the_mean_and_a_full_sum_saturates)
{
    gq_histogram_clear (&histogram);
    gq_histogram_add (&histogram, 10);
    gq_histogram_add (&histogram, 1000);
    cr_assert_eq (gq_histogram_mean (&histogram), 505);
    gq_histogram_add (&histogram, UINT64_MAX);
    cr_assert_eq (histogram.sum, UINT64_MAX);
}

Test (stats, merging_is_adding_every_value)
{
    static gq_histogram other, both;
    gq_histogram_clear (&histogram);
    gq_histogram_clear (&other);
    gq_histogram_clear (&both);
    for (uint64_t value = 1; value < 100000; value += value / 7 + 1) {
        gq_histogram_add (value % 3 == 0 ? &other : &histogram, value);
        gq_histogram_add (&both, value);
    }
    gq_histogram_merge (&histogram, &other);
    cr_assert_arr_eq (&histogram, &both, sizeof both);
}

Test (stats, decay_halves_the_weight_of_the_past)
{
    gq_histogram_clear (&histogram);
    for (int i = 0; i < 100; i++)
        gq_histogram_add (&histogram, 1000);
    gq_histogram_decay (&histogram);
    cr_assert_eq (histogram.count, 50);
    cr_assert_eq (gq_histogram_mean (&histogram), 1000);
    for (int i = 0; i < 51; i++)
        gq_histogram_add (&histogram, 7);
    cr_assert_eq (gq_histogram_quantile (&histogram, 0.5), 7, "the recent ones are the majority");
}

Test (stats, decay_forgets_a_lone_maximum)
{
    gq_histogram_clear (&histogram);
    gq_histogram_add (&histogram, 1000000);
    for (int i = 0; i < 4; i++)
        gq_histogram_add (&histogram, 20);
    gq_histogram_decay (&histogram);
    cr_assert_eq (histogram.count, 2);
    cr_assert_eq (histogram.max, 20);
    cr_assert_eq (gq_histogram_quantile (&histogram, 1), 20);
}

Test (stats, monotonic_clock_never_falls)
{
    uint64_t before = gq_now_ns ();
    for (int i = 0; i < 100000; i++) {
        const uint64_t now = gq_now_ns ();
        cr_assert_geq (now, before);
        before = now;
    }
}

Test (stats, wall_clock_is_in_nanoseconds_since_1970)
{
    const uint64_t seconds_2020 = 1577836800; /* 2020-01-01T00:00:00Z */
    cr_assert_gt (gq_wall_ns (), seconds_2020 * UINT64_C (1000000000));
    cr_assert_lt (gq_wall_ns (), seconds_2020 * UINT64_C (1000000000) * 4);
}
