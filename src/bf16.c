/*
 * bfloat16 <-> float32.  Integers alone: no rounding mode, no flush to zero, no instruction set and
 * no -ffast-math has a say in the bits.
 */
#include "bf16.h"

#include <string.h>

#define MAGNITUDE UINT32_C (0x7fffffff)
#define INFINITE  UINT32_C (0x7f800000)
#define QUIET     UINT32_C (0x00400000)

static inline __attribute__ ((always_inline)) void
encode_kernel (const float *restrict vector, void *restrict bytes, uint64_t count)
{
    uint8_t *to = bytes;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy (&bits, vector + i, sizeof bits);
        /* Half of the last place that stays, less one where that place is even.  A carry goes on
         * from the significand into the exponent, and so to infinity. */
        uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
        uint32_t chosen = (bits & MAGNITUDE) > INFINITE ? bits | QUIET : rounded;
        uint16_t half = (uint16_t)(chosen >> 16);
        memcpy (to + 2 * i, &half, sizeof half);
    }
}

void
gq_bf16_encode_base (const float *vector, void *bytes, uint64_t count)
{
    encode_kernel (vector, bytes, count);
}

#if defined(__x86_64__)
/* Less than half of the time: SSE2 cannot narrow 32 bits to 16 in one instruction. */
static __attribute__ ((target ("avx2"))) void
encode_avx2 (const float *vector, void *bytes, uint64_t count)
{
    encode_kernel (vector, bytes, count);
}
#endif

void
gq_bf16_encode (const float *vector, void *bytes, uint64_t count)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports ("avx2")) {
        encode_avx2 (vector, bytes, count);
        return;
    }
#endif
    gq_bf16_encode_base (vector, bytes, count);
}

/* As fast as memory with SSE2 already. */
void
gq_bf16_decode (const void *restrict bytes, float *restrict vector, uint64_t count)
{
    const uint8_t *from = bytes;
    for (uint64_t i = 0; i < count; i++) {
        uint16_t half;
        memcpy (&half, from + 2 * i, sizeof half);
        uint32_t bits = (uint32_t)half << 16;
        memcpy (vector + i, &bits, sizeof bits);
    }
}
