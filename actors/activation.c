/*
 * Element-wise loops of the nets, one variant per instruction set.  Step 0 of a gradient's
 * path.  They must never differ between instruction sets, and never hide NaN.
 *
 * The approximations are expf and tanhf of the Cephes library (S. Moshier, netlib.org/cephes,
 * single/expf.c and single/tanhf.c), written without branches so that the compiler vectorises them.
 */
#include "activation.h"

#include <stdint.h>
#include <string.h>

#define KERNEL static inline __attribute__ ((always_inline))

/* Clamping keeps 2^n a normal float; exp (-87) is 1.6e-38 and 1 + exp (88) still finite.
 * The comparisons are turned so that NaN passes. */
#define EXP_LEAST    -87.0f
#define EXP_GREATEST 88.0f
#define LOG2_E       1.44269504088896341f
#define LN2_HIGH     0.693359375f /* LN2_HIGH + LN2_LOW = ln 2, n * LN2_HIGH is exact */
#define LN2_LOW      -2.12194440e-4f
#define ROUND_TO_INT 12582912.0f /* 1.5 * 2^23: adding it leaves round (x) in the low bits */

KERNEL float
exp_of (float x)
{
    x = x < EXP_LEAST ? EXP_LEAST : x;
    x = x > EXP_GREATEST ? EXP_GREATEST : x;
    float shifted = x * LOG2_E + ROUND_TO_INT;
    float n = shifted - ROUND_TO_INT;
    float r = x - n * LN2_HIGH - n * LN2_LOW;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    uint32_t bits;
    memcpy (&bits, &shifted, sizeof bits);
    bits = (bits + 127u) << 23; /* the exponent of 2^n; ROUND_TO_INT's own bits fall off */
    float power;
    memcpy (&power, &bits, sizeof power);
    return p * power;
}

KERNEL float
tanh_of (float x)
{
    float size = x < 0.0f ? -x : x;
    float far = 1.0f - 2.0f / (exp_of (2.0f * size) + 1.0f);
    far = x < 0.0f ? -far : far;
    float z = x * x;
    float p = -5.70498872745e-3f;
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    float near = p * z * x + x;
    return size < 0.625f ? near : far; /* Cephes' switch: below it `far` cancels */
}

KERNEL void
elu (size_t rows, size_t n, const float *restrict bias, const float *restrict in,
     float *restrict out)
{
    for (size_t row = 0; row < rows; row++)
        for (size_t i = 0; i < n; i++) {
            float x = in[row * n + i] + bias[i];
            float below = exp_of (x) - 1.0f;
            out[row * n + i] = x < 0.0f ? below : x;
        }
}

KERNEL void
elu_backward (size_t n, const float *restrict y, const float *restrict d_y, float *restrict d_x)
{
    for (size_t i = 0; i < n; i++) {
        float slope = y[i] > 0.0f ? 1.0f : y[i] + 1.0f;
        d_x[i] = d_y[i] * slope;
    }
}

KERNEL void
sigmoid (size_t n, float *x)
{
    for (size_t i = 0; i < n; i++)
        x[i] = 1.0f / (1.0f + exp_of (-x[i]));
}

KERNEL void
hyperbolic (size_t n, float *x)
{
    for (size_t i = 0; i < n; i++)
        x[i] = tanh_of (x[i]);
}

KERNEL void
add (size_t n, const float *restrict in, float *restrict sum)
{
    for (size_t i = 0; i < n; i++)
        sum[i] += in[i];
}

#define VARIANT(cpu, attribute)                                                                 \
    attribute static void elu_##cpu (size_t rows, size_t n, const float *bias, const float *in, \
                                     float *out)                                                \
    {                                                                                           \
        elu (rows, n, bias, in, out);                                                           \
    }                                                                                           \
    attribute static void elu_backward_##cpu (size_t n, const float *y, const float *d_y,       \
                                              float *d_x)                                       \
    {                                                                                           \
        elu_backward (n, y, d_y, d_x);                                                          \
    }                                                                                           \
    attribute static void sigmoid_##cpu (size_t n, float *x)                                    \
    {                                                                                           \
        sigmoid (n, x);                                                                         \
    }                                                                                           \
    attribute static void tanh_##cpu (size_t n, float *x)                                       \
    {                                                                                           \
        hyperbolic (n, x);                                                                      \
    }                                                                                           \
    attribute static void add_##cpu (size_t n, const float *in, float *sum)                     \
    {                                                                                           \
        add (n, in, sum);                                                                       \
    }
#define ROW(name)                                                             \
    {                                                                         \
        .cpu = #name, .elu = elu_##name, .elu_backward = elu_backward_##name, \
        .sigmoid = sigmoid_##name, .tanh = tanh_##name, .add = add_##name     \
    }

VARIANT (base, )
#if defined(__x86_64__)
VARIANT (avx2, __attribute__ ((target ("avx2"))))
VARIANT (avx512, __attribute__ ((target ("avx512f,avx512vl,avx512dq,avx512bw,"
                                         "prefer-vector-width=512"))))
const gq_activation gq_activation_table[] = {ROW (base), ROW (avx2), ROW (avx512)};
#else
const gq_activation gq_activation_table[] = {ROW (base)};
#endif
const size_t gq_activation_rows = sizeof gq_activation_table / sizeof gq_activation_table[0];

bool
gq_activation_runs (size_t row)
{
#if defined(__x86_64__)
    if (row == 1)
        return __builtin_cpu_supports ("avx2");
    if (row == 2)
        return __builtin_cpu_supports ("avx512f") && __builtin_cpu_supports ("avx512vl") &&
               __builtin_cpu_supports ("avx512dq") && __builtin_cpu_supports ("avx512bw");
#endif
    return row == 0;
}

const gq_activation *
gq_activation_pick (void)
{
    size_t row = gq_activation_rows - 1;
    while (!gq_activation_runs (row))
        row--;
    return &gq_activation_table[row];
}
