/*
 * bfloat16: the upper half of a float32, which halves the bytes of a gradient on lane inline.
 * Steps 1 and 4 of its path.
 *
 * Never refuses a value: what is not finite stays so, and the optimizer looks at it.
 */
#ifndef GQ_BF16_H
#define GQ_BF16_H

#include <stdint.h>

/*
 * Round each of vector[count] to the nearest bfloat16, ties to even, as IEEE 754 rounds: what lies
 * beyond the largest becomes infinity, subnormals stay, a NaN stays one and becomes quiet.  The
 * same bits on every CPU.
 *
 * bytes  u16[count], little-endian, at any address; does not overlap.  One pass.
 */
void gq_bf16_encode (const float *vector, void *bytes, uint64_t count);

/* The same for any CPU; gq_bf16_encode takes it where there is nothing faster. */
void gq_bf16_encode_base (const float *vector, void *bytes, uint64_t count);

/* The float32 of each u16 of bytes[2 count], exactly: its bits, then 16 that are 0.  `bytes` may
 * lie at any address; does not overlap.  One pass. */
void gq_bf16_decode (const void *bytes, float *vector, uint64_t count);

#endif
