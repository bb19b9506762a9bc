/*
 * Products of matrices against sums in double, of shapes that are taken whole and in pieces.
 */
#include "actors/blas.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>

#include "actors/net.h"

#define SEED 20260101u

typedef struct shape {
    size_t m, n, k;
} shape;

static float *
noise (gq_random *random, size_t count)
{
    float *array = malloc (count * sizeof *array);
    cr_assert_not_null (array);
    for (size_t i = 0; i < count; i++)
        array[i] = (float)(2.0 * gq_random_uniform (random) - 1.0);
    return array;
}

/* Element (row, column) of a matrix of that many rows and columns. */
static double
at (CBLAS_TRANSPOSE order, const float *x, size_t rows, size_t columns, size_t row, size_t column)
{
    return order == CblasNoTrans ? x[row * columns + column] : x[column * rows + row];
}

static void
check (CBLAS_TRANSPOSE a_order, CBLAS_TRANSPOSE b_order, shape s, float beta)
{
    gq_random random;
    gq_random_seed (&random, SEED);
    float *a = noise (&random, s.m * s.k), *b = noise (&random, s.k * s.n);
    float *before = noise (&random, s.m * s.n), *c = malloc (s.m * s.n * sizeof *c);
    cr_assert_not_null (c);
    for (size_t i = 0; i < s.m * s.n; i++)
        c[i] = beta == 0.0f ? NAN : before[i]; /* what is overwritten may be anything */
    gq_multiply (a_order, b_order, s.m, s.n, s.k, a, b, beta, c);
    for (size_t row = 0; row < s.m; row++)
        for (size_t column = 0; column < s.n; column++) {
            double sum = beta == 0.0f ? 0.0 : before[row * s.n + column], size = fabs (sum);
            for (size_t i = 0; i < s.k; i++) {
                double term =
                    at (a_order, a, s.m, s.k, row, i) * at (b_order, b, s.k, s.n, i, column);
                sum += term, size += fabs (term);
            }
            double difference = fabs (sum - (double)c[row * s.n + column]);
            /* Rounding of k additions in any order, at most. */
            cr_assert_leq (
                difference, 0x1p-24 * (double)(s.k + 2) * size,
                "%zu x %zu x %zu, orders %d %d, beta %g: element (%zu, %zu) is off by %g", s.m, s.n,
                s.k, a_order, b_order, (double)beta, row, column, difference);
        }
    free (a);
    free (b);
    free (before);
    free (c);
}

Test (blas, products_of_every_shape_and_order_are_those_of_the_definition)
{
    /* Whole ones; and each side in turn so long that it is cut, into pieces unlike the last. */
    static const shape shapes[] = {{1, 1, 1},     {3, 5, 7},     {64, 64, 300},  {37, 32, 288},
                                   {38, 32, 33},  {509, 32, 72}, {4, 1021, 72},  {8, 1021, 257},
                                   {509, 72, 32}, {32, 72, 997}, {8, 256, 1021}, {441, 32, 9},
                                   {32, 9, 4001}, {1201, 2, 40}, {2, 1301, 40}};
    static const CBLAS_TRANSPOSE orders[] = {CblasNoTrans, CblasTrans};
    gq_blas_begin ();
    gq_blas_cut (true); /* on any processor */
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (size_t a = 0; a < 2; a++)
            for (size_t b = 0; b < 2; b++) {
                check (orders[a], orders[b], shapes[i], 0.0f);
                check (orders[a], orders[b], shapes[i], 1.0f);
            }
}
