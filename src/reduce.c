/*
 * Passes over a whole gradient before the update rule sees it: finite, and how long.  Steps 4 and 5
 * of a gradient's path.
 *
 * Never lets the compiler, the CPU or a thread count choose the order of a sum: the order is
 * written out here, so that a clipped step has the same bits wherever it is replayed.
 */
#include "plugin.h"

#include <assert.h>
#include <string.h>

/* Elements in a block: 16 KiB of float32, within every first-level cache. */
#define BLOCK 4096
/* Running sums in a block: two AVX-512 registers of double, so no CPU level waits for itself. */
#define LANES 16
/* Levels of the tree: one bit of the block count each. */
#define LEVELS_MAX 64

/* IEEE 754 binary32: all ones in the exponent is NaN or infinity. */
#define EXPONENT UINT32_C (0x7f800000)

int
gq_all_finite (const float *x, uint64_t n)
{
    for (uint64_t start = 0; start < n; start += BLOCK) {
        uint64_t count = n - start < BLOCK ? n - start : BLOCK;
        uint32_t found = 0;
        /* Bits, not values: no comparison of floats that -ffast-math could think away. */
        for (uint64_t i = 0; i < count; i++) {
            uint32_t bits;
            memcpy (&bits, x + start + i, sizeof bits);
            found |= (bits & EXPONENT) == EXPONENT;
        }
        if (found != 0)
            return 0;
    }
    return 1;
}

/* Element i of x[n], n <= BLOCK, goes to lane i % LANES; then the upper half of the lanes is added
 * to the lower half until one is left.  A product of two float32 is exact in double. */
static inline __attribute__ ((always_inline)) double
block_kernel (const float *x, uint64_t n)
{
    double lanes[LANES] = {0};
    uint64_t whole = n - n % LANES;
    for (uint64_t i = 0; i < whole; i += LANES)
        for (uint64_t lane = 0; lane < LANES; lane++)
            lanes[lane] += (double)x[i + lane] * (double)x[i + lane];
    for (uint64_t i = whole; i < n; i++)
        lanes[i - whole] += (double)x[i] * (double)x[i];
    for (unsigned half = LANES / 2; half > 0; half /= 2)
        for (unsigned lane = 0; lane < half; lane++)
            lanes[lane] += lanes[lane + half];
    return lanes[0];
}

static double
block_base (const float *x, uint64_t n)
{
    return block_kernel (x, n);
}

#if defined(__x86_64__)
static __attribute__ ((target ("avx2"))) double
block_avx2 (const float *x, uint64_t n)
{
    return block_kernel (x, n);
}
#endif

/* Both give the same bits: -ffp-contract=off keeps products apart from sums. */
static double
block_sum_squares (const float *x, uint64_t n)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports ("avx2"))
        return block_avx2 (x, n);
#endif
    return block_base (x, n);
}

/*
 * Blocks are summed pairwise, as a binary counter carries: tree[k] holds the sum of 2^k
 * neighbouring blocks while bit k of the number of blocks so far is set.  The error grows with the
 * logarithm of n (Higham, Accuracy and Stability of Numerical Algorithms, section 4.1).
 */
double
gq_sum_squares (const float *x, uint64_t n)
{
    double tree[LEVELS_MAX];
    uint64_t blocks = 0;
    for (uint64_t start = 0; start < n; start += BLOCK) {
        double sum = block_sum_squares (x + start, n - start < BLOCK ? n - start : BLOCK);
        unsigned level = 0;
        for (uint64_t carry = blocks; carry & 1; carry >>= 1)
            sum = tree[level++] + sum;
        assert (level < LEVELS_MAX);
        tree[level] = sum;
        blocks++;
    }
    double total = 0;
    for (unsigned level = 0; level < LEVELS_MAX && blocks >> level != 0; level++)
        if (blocks >> level & 1)
            total = tree[level] + total;
    return total;
}
