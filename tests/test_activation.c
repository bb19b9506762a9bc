/*
 * The vectorised activations against libm in double, and each instruction set against the base.
 */
#include "actors/activation.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "actors/net.h"

static void *
grab (size_t count, size_t size)
{
    void *memory = calloc (count > 0 ? count : 1, size);
    cr_assert_not_null (memory, "out of memory");
    return memory;
}

static float *
normal_floats (gq_random *random, size_t count, double deviation)
{
    float *values = grab (count, sizeof *values);
    for (size_t i = 0; i < count; i++)
        values[i] = (float)(deviation * gq_random_normal (random));
    return values;
}

static gq_random
seeded (uint64_t seed)
{
    gq_random random;
    gq_random_seed (&random, seed);
    printf ("seed %llu\n", (unsigned long long)seed);
    return random;
}

static bool
same_bits (const float *a, const float *b, size_t count)
{
    return memcmp (a, b, count * sizeof *a) == 0;
}

enum { POINTS = 40001 }; /* no multiple of a vector's width */

/* -10 .. 10 densely, then the range where gates saturate. */
static float
point (size_t i)
{
    return i < 30000 ? (float)i / 1500.0f - 10.0f : ((float)i - 35000.0f) / 60.0f;
}

Test (activation, results_are_within_their_documented_errors)
{
    const gq_activation *loops = gq_activation_pick ();
    float *x = grab (POINTS, sizeof *x), *y = grab (POINTS, sizeof *y), zero = 0.0f;
    for (size_t i = 0; i < POINTS; i++)
        x[i] = point (i);
    loops->elu (POINTS, 1, &zero, x, y);
    for (size_t i = 0; i < POINTS; i++) {
        double expected = x[i] < 0.0f ? expm1 ((double)x[i]) : (double)x[i];
        cr_assert_float_eq ((double)y[i], expected, 2e-7, "elu (%.9g)", (double)x[i]);
    }
    memcpy (y, x, POINTS * sizeof *y);
    loops->sigmoid (POINTS, y);
    for (size_t i = 0; i < POINTS; i++) {
        double expected = 1.0 / (1.0 + exp (-(double)x[i]));
        cr_assert_float_eq ((double)y[i], expected, 5e-7 * expected, "sigmoid (%.9g)",
                            (double)x[i]);
    }
    memcpy (y, x, POINTS * sizeof *y);
    loops->tanh (POINTS, y);
    for (size_t i = 0; i < POINTS; i++) {
        double expected = tanh ((double)x[i]);
        cr_assert_float_eq ((double)y[i], expected, 5e-7 * fabs (expected), "tanh (%.9g)",
                            (double)x[i]);
    }
    free (x), free (y);
}

Test (activation, every_instruction_set_gives_the_same_bits)
{
    gq_random random = seeded (13);
    float *x = normal_floats (&random, POINTS, 5.0), *d = normal_floats (&random, POINTS, 1.0);
    float *out[2] = {grab (5 * POINTS, sizeof (float)), grab (5 * POINTS, sizeof (float))};
    float bias = 0.25f;
    x[POINTS / 2] = NAN, x[POINTS / 3] = INFINITY, x[POINTS / 4] = -INFINITY;
    for (size_t row = 0; row < gq_activation_rows; row++) {
        const gq_activation *loops = &gq_activation_table[row];
        if (!gq_activation_runs (row)) {
            printf ("%s: this CPU has it not\n", loops->cpu);
            continue;
        }
        float *to = out[row > 0];
        loops->elu (POINTS, 1, &bias, x, to);
        loops->elu_backward (POINTS, to, d, to + POINTS);
        for (size_t i = 2; i < 5; i++)
            memcpy (to + i * POINTS, x, POINTS * sizeof *x);
        loops->sigmoid (POINTS, to + 2 * POINTS);
        loops->tanh (POINTS, to + 3 * POINTS);
        loops->add (POINTS, d, to + 4 * POINTS);
        for (size_t i = 0; i < 4; i++)
            cr_expect (isnan (to[i * POINTS + POINTS / 2]), "%s hides NaN in loop %zu", loops->cpu,
                       i);
        for (size_t i = 0; i < 5 * POINTS && row > 0; i++)
            /* NaN's sign and payload carry no meaning and may differ. */
            cr_assert ((isnan (out[0][i]) && isnan (to[i])) || same_bits (&out[0][i], &to[i], 1),
                       "%s differs from base at %zu: %.9g, %.9g", loops->cpu, i, (double)to[i],
                       (double)out[0][i]);
    }
    free (x), free (d), free (out[0]), free (out[1]);
}
