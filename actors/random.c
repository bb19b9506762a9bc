/*
 * The actor's randomness: xoshiro256** seeded by splitmix64 (Blackman and Vigna,
 * https://prng.di.unimi.it).  Step 0 of a gradient's path.
 *
 * Must never read a clock or /dev/urandom: a run repeats from its seed.
 */
#include <math.h>

#include "net.h"

static uint64_t
splitmix (uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static uint64_t
rotate (uint64_t x, unsigned bits)
{
    return (x << bits) | (x >> (64 - bits));
}

void
gq_random_seed (gq_random *random, uint64_t seed)
{
    for (int i = 0; i < 4; i++)
        random->state[i] = splitmix (&seed);
}

uint64_t
gq_random_stream (uint64_t seed, uint64_t stream)
{
    /* Two rounds: neighbours (seed, k) and (seed + 1, k - 1) must not meet. */
    uint64_t state = splitmix (&seed) + stream;
    return splitmix (&state);
}

uint64_t
gq_random_next (gq_random *random)
{
    uint64_t *s = random->state;
    uint64_t result = rotate (s[1] * 5, 7) * 9, t = s[1] << 17;

    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotate (s[3], 45);
    return result;
}

double
gq_random_uniform (gq_random *random)
{
    return (double)(gq_random_next (random) >> 11) * 0x1p-53;
}

double
gq_random_normal (gq_random *random)
{
    /* Box and Muller (1958); 1 - u is in (0, 1], so the logarithm is finite. */
    double radius = sqrt (-2 * log (1 - gq_random_uniform (random)));
    return radius * cos (6.283185307179586 * gq_random_uniform (random));
}
