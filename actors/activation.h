/*
 * Element-wise loops of the nets.  Step 0 of a gradient's path.
 *
 * libm's scalar calls would cost more than the matrix products around them: a step at 42x42 needs
 * 20,000 exponentials.  These loops vectorise, and each instruction set gives the same bits: they
 * use +, -, *, / and comparisons only, and the build forbids contraction.
 * They must never hide NaN: NaN in is NaN out, so that broken weights show in the gradient.
 * Arrays of one call never overlap.
 */
#ifndef GQ_ACTIVATION_H
#define GQ_ACTIVATION_H

#include <stdbool.h>
#include <stddef.h>

typedef struct gq_activation {
    const char *cpu; /* "base", "avx2", "avx512" */

    /* out[rows, n] = elu (in[rows, n] + bias[n]), elu (x) = x < 0 ? exp (x) - 1 : x.
     * Absolute error below 2e-7: exp - 1 cancels near 0, as in PyTorch's own kernel. */
    void (*elu) (size_t rows, size_t n, const float *bias, const float *in, float *out);

    /* d_x[n] = d_y[n] * elu' (x), where y[n] = elu (x): 1 for y > 0, else y + 1.  */
    void (*elu_backward) (size_t n, const float *y, const float *d_y, float *d_x);

    /* x[n] = 1 / (1 + exp (-x[n])), relative error below 5e-7 for |x| < 87. */
    void (*sigmoid) (size_t n, float *x);

    /* x[n] = tanh (x[n]), relative error below 5e-7. */
    void (*tanh) (size_t n, float *x);

    /* sum[n] += in[n]. */
    void (*add) (size_t n, const float *in, float *sum);
} gq_activation;

/* One row per instruction set, the best last. */
#define GQ_ACTIVATION_ROWS_MAX 3
extern const gq_activation gq_activation_table[];
extern const size_t gq_activation_rows;

/* Whether this CPU runs gq_activation_table[row]; row 0 always runs. */
bool gq_activation_runs (size_t row);

/* The best row that this CPU runs.  Never NULL. */
const gq_activation *gq_activation_pick (void);

#endif
