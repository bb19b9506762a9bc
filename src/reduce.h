/*
 * Passes over a whole gradient: is it finite, and how long is it?  Steps 1, 4 and 5 of a gradient's
 * path.
 */
#ifndef GQ_REDUCE_H
#define GQ_REDUCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gradq/status.h"

/* All of x[n] finite?  Vectorised, one pass. */
bool gq_all_finite (const float *x, uint64_t n);
/* Has x[n] this CRC32C, and is all of it finite?  One pass over memory for both.  GQ_OK,
 * GQ_CHECKSUM, GQ_NONFINITE. */
GQ_CHECK gq_status gq_check_vector (const float *x, uint64_t n, uint32_t crc);
/* to[n] = from[n], of any alignment; has it this CRC32C, and is all of it finite?  One pass. */
GQ_CHECK gq_status gq_copy_vector (float *restrict to, const void *restrict from, uint64_t n,
                                   uint32_t crc);
/* to[n] = from[n], and 0 for what is not finite, in one pass.  false: there was such. */
bool gq_copy_finite (float *restrict to, const float *restrict from, size_t n);
/* sum of squares in double by fixed blocks and a fixed tree: the same bits on every CPU level and
 * thread count. */
double gq_sum_squares (const float *x, uint64_t n);

#endif
