/*
 * What the suites of the plug-in host share: where plug-ins lie, loading one that must load, and
 * hard numbers from a seed.  Never fails quietly: each helper asserts.
 */
#ifndef GQ_RULE_TESTING_H
#define GQ_RULE_TESTING_H

#include <criterion/criterion.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "plugin.h"

#define SEED 20240229u
/* "key=value" words and the NULL at their end. */
#define SETS_MAX 8
/* Sizes up to this: every remainder of the widest vector, four times over. */
#define SIZE_SMALL_MAX 67

/* build/tests/unit: the plug-ins lie in build/plugins, the bad ones in build/tests/plugins. */
static inline const char *
build_path (const char *below)
{
    static char paths[4][600];
    static int turn = 0;
    char *path = paths[turn++ % 4], program[512];
    ssize_t length = readlink ("/proc/self/exe", program, sizeof program - 1);
    cr_assert (length > 0 && length < (ssize_t)sizeof program - 1);
    program[length] = '\0';
    for (int up = 0; up < 2; up++)
        *strrchr (program, '/') = '\0';
    snprintf (path, sizeof paths[0], "%s/%s", program, below);
    return path;
}

/* x[n] and y[n] agree to the last bit, the sign of zero included. */
static inline int
same_bits (const float *x, const float *y, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t a, b;
        memcpy (&a, &x[i], sizeof a);
        memcpy (&b, &y[i], sizeof b);
        if (a != b)
            return 0;
    }
    return 1;
}

static inline size_t
count_words (const char *const *words)
{
    size_t count = 0;
    while (words[count] != NULL)
        count++;
    return count;
}

static inline gq_rule *
load (const char *name, const char *cpu, const char *const *sets)
{
    gq_rule *rule = NULL;
    gq_error error = {.text = ""}, warning;
    gq_status status = gq_rule_load (&rule, name, build_path ("plugins"), sets, count_words (sets),
                                     cpu, &warning, &error);
    cr_assert_eq (status, GQ_OK, "%s: %s", name, error.text);
    cr_assert_str_empty (warning.text);
    return rule;
}
#define SETS(...) ((const char *const[]){__VA_ARGS__, NULL})
#define NO_SETS   ((const char *const[]){NULL})

/* splitmix64 (Steele, Lea and Flood, 2014). */
static inline uint64_t
random_next (uint64_t *state)
{
    uint64_t z = *state += UINT64_C (0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C (0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C (0x94d049bb133111eb);
    return z ^ z >> 31;
}

/* Mostly ordinary numbers of all sizes, one in four a hard one: signed zeros, denormals, the
 * smallest normal, numbers whose square under- or overflows.  No NaN can come of a few steps on
 * them: sums stay below FLT_MAX. */
static inline float
random_float (uint64_t *state)
{
    static const float hard[] = {0.0f,   -0.0f,  1e-45f,  -1e-45f, FLT_MIN, -FLT_MIN,
                                 1e-40f, 1e-20f, -1e-20f, 1.0f,    -1.0f,   1e4f,
                                 -1e4f,  1e18f,  1e30f,   -1e30f};
    uint64_t bits = random_next (state);
    if (bits % 4 == 0)
        return hard[bits / 4 % (sizeof hard / sizeof *hard)];
    float unit = (float)(bits >> 40) * 0x1p-23f - 1;
    return ldexpf (unit, (int)(bits / 4 % 24) - 16);
}

#endif
