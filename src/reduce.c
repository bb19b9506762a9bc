/*
 * Passes over a whole gradient before the update rule sees it.
 *
 * Never lets the compiler, the CPU or a thread count choose the order of a sum: the order is
 * written out here, so that a clipped step has the same bits wherever it is replayed.
 */
#include "reduce.h"

#include <assert.h>
#include <string.h>

#include "frame.h"

/* Elements in a block: 16 KiB of float32, within every first-level cache. */
#define BLOCK 4096
/* Elements that are looked at while the first-level cache still has them from the checksum. */
#define CHECKED 2048
/* Running sums in a block: two AVX-512 registers of double, so no CPU level waits for itself. */
#define LANES 16
/* Levels of the tree: one bit of the block count each. */
#define LEVELS_MAX 64

/* IEEE 754 binary32: all ones in the exponent is NaN or infinity. */
#define EXPONENT UINT32_C (0x7f800000)

static inline __attribute__ ((always_inline)) bool
all_finite (const float *x, uint64_t n)
{
    uint32_t found = 0;
    /* Bits, not values: no comparison of floats that -ffast-math could think away. */
    for (uint64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy (&bits, x + i, sizeof bits);
        found |= (bits & EXPONENT) == EXPONENT;
    }
    return found == 0;
}

static inline __attribute__ ((always_inline)) bool
copy_finite (float *restrict to, const float *restrict from, size_t n)
{
    uint32_t found = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy (&bits, from + i, sizeof bits);
        uint32_t bad = (bits & EXPONENT) == EXPONENT;
        found |= bad;
        bits &= bad - 1;
        memcpy (to + i, &bits, sizeof bits);
    }
    return found == 0;
}

#if defined(__x86_64__)
static __attribute__ ((target ("avx2"))) bool
all_finite_avx2 (const float *x, uint64_t n)
{
    return all_finite (x, n);
}

static __attribute__ ((target ("avx2"))) bool
copy_finite_avx2 (float *restrict to, const float *restrict from, size_t n)
{
    return copy_finite (to, from, n);
}
#endif

bool
gq_all_finite (const float *x, uint64_t n)
{
    bool finite = true;
    for (uint64_t start = 0; start < n && finite; start += BLOCK) {
        uint64_t count = n - start < BLOCK ? n - start : BLOCK;
#if defined(__x86_64__)
        if (__builtin_cpu_supports ("avx2")) {
            finite = all_finite_avx2 (x + start, count);
            continue;
        }
#endif
        finite = all_finite (x + start, count);
    }
    return finite;
}

bool
gq_copy_finite (float *restrict to, const float *restrict from, size_t n)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports ("avx2"))
        return copy_finite_avx2 (to, from, n);
#endif
    return copy_finite (to, from, n);
}

/* What is known of a vector after some of its pieces. */
typedef struct findings {
    uint32_t crc;
    bool finite;
} findings;

static void
look_at (findings *so_far, const float *piece, uint64_t count)
{
    so_far->crc = gq_crc32c_more (so_far->crc, piece, (size_t)count * sizeof *piece);
    so_far->finite = so_far->finite && gq_all_finite (piece, count);
}

static gq_status
verdict (const findings *found, uint32_t crc)
{
    if (found->crc != crc)
        return GQ_CHECKSUM;
    return found->finite ? GQ_OK : GQ_NONFINITE;
}

gq_status
gq_check_vector (const float *x, uint64_t n, uint32_t crc)
{
    findings found = {.finite = true};
    for (uint64_t start = 0; start < n; start += CHECKED)
        look_at (&found, x + start, n - start < CHECKED ? n - start : CHECKED);
    return verdict (&found, crc);
}

gq_status
gq_copy_vector (float *restrict to, const void *restrict from, uint64_t n, uint32_t crc)
{
    findings found = {.finite = true};
    for (uint64_t start = 0; start < n; start += CHECKED) {
        const uint64_t count = n - start < CHECKED ? n - start : CHECKED;
        memcpy (to + start, (const uint8_t *)from + start * sizeof *to, (size_t)count * sizeof *to);
        look_at (&found, to + start, count);
    }
    return verdict (&found, crc);
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
