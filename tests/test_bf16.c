/*
 * bfloat16: every value that there is, and rounding against arithmetic in double that shares
 * nothing with the code under test.
 */
#include "support.h"

#include <math.h>

#include "bf16.h"

TestSuite (bf16, .timeout = 60);

enum { VALUES = 1 << 16, SMALLEST_EXPONENT = -133, LARGEST_EXPONENT = 127 };

static float
float_of (uint32_t bits)
{
    float value;
    memcpy (&value, &bits, sizeof value);
    return value;
}

static uint32_t
bits_of (float value)
{
    uint32_t bits;
    memcpy (&bits, &value, sizeof bits);
    return bits;
}

/* IEEE 754's definition: 8 significant binary digits, the last of them never below 2^-133, nearest
 * with ties to even, infinity from half a step past the largest on.  Exact: a double has room. */
static uint16_t
reference (uint32_t bits)
{
    const float value = float_of (bits);
    if (isnan (value))
        return (uint16_t)(bits >> 16 | 0x40);
    if (isinf (value) || value == 0)
        return (uint16_t)(bits >> 16);
    int exponent;
    frexp ((double)value, &exponent); /* |value| = 0.5 .. 1 times 2^exponent */
    int last = exponent - 8 > SMALLEST_EXPONENT ? exponent - 8 : SMALLEST_EXPONENT;
    double rounded = ldexp (nearbyint (ldexp ((double)value, -last)), last);
    if (fabs (rounded) >= ldexp (1, LARGEST_EXPONENT + 1))
        return value > 0 ? 0x7f80 : 0xff80;
    const uint32_t exact = bits_of ((float)rounded) | (bits & 0x80000000u); /* a zero has a sign */
    cr_assert_eq (exact & 0xffff, 0, "the reference is no bfloat16: %08x", exact);
    return (uint16_t)(exact >> 16);
}

/* On the level of this CPU and on that of any. */
static void
expect_rounded (const uint32_t *bits, size_t count)
{
    float *vector = malloc (count * sizeof *vector);
    uint16_t *best = malloc (count * sizeof *best), *base = malloc (count * sizeof *base);
    cr_assert (vector != NULL && best != NULL && base != NULL);
    memcpy (vector, bits, count * sizeof *vector); /* no float is copied: NaN might become quiet */
    gq_bf16_encode (vector, best, count);
    gq_bf16_encode_base (vector, base, count);
    for (size_t i = 0; i < count; i++) {
        const uint16_t expected = reference (bits[i]);
        cr_assert (best[i] == expected && base[i] == expected, "%08x: %04x and %04x, not %04x",
                   bits[i], best[i], base[i], expected);
    }
    free (vector);
    free (best);
    free (base);
}

Test (bf16, every_value_is_read_exactly_and_written_as_it_was)
{
    static uint16_t all[VALUES], again[VALUES], base[VALUES];
    static float vector[VALUES];
    for (uint32_t i = 0; i < VALUES; i++)
        all[i] = (uint16_t)i;
    gq_bf16_decode (all, vector, VALUES);
    gq_bf16_encode (vector, again, VALUES);
    gq_bf16_encode_base (vector, base, VALUES);
    for (uint32_t i = 0; i < VALUES; i++) {
        uint32_t bits;
        memcpy (&bits, vector + i, sizeof bits);
        cr_assert_eq (bits, i << 16, "%04x: %08x", i, bits);
        const bool nan = (i & 0x7f80) == 0x7f80 && (i & 0x7f) != 0;
        const uint32_t expected = nan ? i | 0x40 : i;
        cr_assert (again[i] == expected && base[i] == expected, "%04x: %04x and %04x", i, again[i],
                   base[i]);
        if (nan)
            continue;
        /* The value, from the fields: sign, 8 bits of exponent, 7 of significand. */
        const int exponent = (int)(i >> 7 & 0xff), digits = (int)(i & 0x7f);
        double value = exponent == 0 ? ldexp (digits, SMALLEST_EXPONENT)
                                     : ldexp (128 + digits, exponent - 1 + SMALLEST_EXPONENT);
        if (exponent == 0xff)
            value = INFINITY;
        cr_assert ((double)vector[i] == (i >> 15 ? -value : value), "%04x: %a", i,
                   (double)vector[i]);
    }
}

/* Each upper half, so each exponent, sign and kind; each lower half around both ties. */
Test (bf16, values_around_every_tie_are_rounded_as_arithmetic_in_double_does)
{
    static const uint32_t lower[] = {0,      1,      2,      0x4000, 0x7ffe, 0x7fff,
                                     0x8000, 0x8001, 0x8002, 0xc000, 0xfffe, 0xffff};
    enum { LOWER = sizeof lower / sizeof lower[0] };
    uint32_t *bits = malloc (sizeof *bits * VALUES * LOWER);
    cr_assert_not_null (bits);
    for (uint32_t upper = 0; upper < VALUES; upper++)
        for (size_t i = 0; i < LOWER; i++)
            bits[upper * LOWER + i] = upper << 16 | lower[i];
    expect_rounded (bits, (size_t)VALUES * LOWER);
    free (bits);
}

Test (bf16, random_bits_are_rounded_as_arithmetic_in_double_does)
{
    enum { COUNT = 1 << 20, ROUNDS = 4 };
    uint64_t seed = 17;
    uint32_t *bits = malloc (COUNT * sizeof *bits);
    cr_assert_not_null (bits);
    printf ("seed %llu\n", (unsigned long long)seed);
    for (int round = 0; round < ROUNDS; round++) {
        for (size_t i = 0; i < COUNT; i++)
            bits[i] = (uint32_t)(support_random (&seed) >> 32);
        expect_rounded (bits, COUNT);
    }
    free (bits);
}

/* The numbers of the page, written out. */
Test (bf16, the_cases_that_the_protocol_names)
{
    static const struct {
        uint32_t from;
        uint16_t to;
    } cases[] = {
        {0x00000000, 0x0000}, {0x80000000, 0x8000}, {0x3f800000, 0x3f80}, /* 1 */
        {0x3f808000, 0x3f80}, {0x3f818000, 0x3f82},                       /* ties, to even */
        {0x3f808001, 0x3f81}, {0x3f817fff, 0x3f81}, {0x3fffffff, 0x4000}, /* into the exponent */
        {0x7f7f7fff, 0x7f7f}, {0x7f7f8000, 0x7f80}, {0xff7fffff, 0xff80}, /* overflow */
        {0x7f800000, 0x7f80}, {0xff800000, 0xff80},                       /* infinities */
        {0x7f800001, 0x7fc0}, {0x7fc12345, 0x7fc1}, {0xffffffff, 0xffff}, /* NaN */
        {0x00000001, 0x0000}, {0x00008000, 0x0000}, {0x00008001, 0x0001}, /* subnormal */
        {0x00018000, 0x0002}, {0x007fffff, 0x0080}, {0x80400000, 0x8040},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        expect_rounded (&cases[i].from, 1);
        cr_assert_eq (reference (cases[i].from), cases[i].to, "%08x", cases[i].from);
    }
}

/* Lengths on both sides of every vector register, at odd addresses, up to a page nobody may touch.
 */
Test (bf16, no_byte_beyond_the_last_is_read_or_written)
{
    enum { LONGEST = 70, SHIFTS = 4 };
    uint64_t seed = 3;
    uint8_t *bytes_end = support_guarded_end (LONGEST * 2 + SHIFTS);
    float *vector_end = (float *)(void *)support_guarded_end (LONGEST * sizeof (float));
    for (size_t count = 0; count <= LONGEST; count++)
        for (size_t shift = 0; shift < SHIFTS; shift++) {
            uint8_t *bytes = bytes_end - 2 * count - shift;
            float *vector = vector_end - count;
            for (size_t i = 0; i < count; i++)
                vector[i] = (float)(int32_t)support_random (&seed);
            memset (bytes_end - 2 * LONGEST - SHIFTS, 0xa5, 2 * LONGEST + SHIFTS);
            gq_bf16_encode (vector, bytes, count);
            for (uint8_t *at = bytes_end - 2 * LONGEST - SHIFTS; at < bytes_end; at++)
                if (at < bytes || at >= bytes + 2 * count)
                    cr_assert_eq (*at, 0xa5);
            for (size_t i = 0; i < count; i++)
                cr_assert_eq (bytes[2 * i] | bytes[2 * i + 1] << 8,
                              reference (bits_of (vector[i])));
            gq_bf16_decode (bytes, vector, count);
            for (size_t i = 0; i < count; i++)
                cr_assert_eq (bits_of (vector[i]) >> 16, bytes[2 * i] | bytes[2 * i + 1] << 8);
        }
}
