/*
 * Window.  Time-outs carry jitter, so that actors whose gradients were lost together do not send
 * them again together.
 */
#include "window.h"

#include <assert.h>
#include <string.h>

/* 4 s and jitter at the default: what a healed link may still have to wait for. */
#define DOUBLINGS_MAX 2

void
gq_window_init (gq_window *window, uint32_t size, uint64_t resend_ns, uint64_t seed)
{
    assert (size >= 1 && size <= GQ_WINDOW_MAX);
    memset (window, 0, sizeof *window);
    window->size = size;
    window->resend_ns = resend_ns;
    window->random = seed;
}

uint32_t
gq_window_count (const gq_window *window)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < window->size; i++)
        count += window->slots[i].sequence != 0 ? 1 : 0;
    return count;
}

bool
gq_window_room (const gq_window *window)
{
    /* The ledger's map spans 64 numbers behind those that came without a gap: none may be given out
     * beyond it.  What came and waits for its step is no gap: it may wait for just this number. */
    return gq_window_count (window) < window->size &&
           window->sequence - window->received < GQ_WINDOW_MAX;
}

/* splitmix64 */
static uint64_t
next_random (gq_window *window)
{
    uint64_t z = window->random += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* The time-out after `sends` sends, within a quarter either way. */
static uint64_t
patience_ns (gq_window *window, uint32_t sends)
{
    uint32_t doublings = sends - 1 < DOUBLINGS_MAX ? sends - 1 : DOUBLINGS_MAX;
    uint64_t base_ns = window->resend_ns << doublings;
    return base_ns - base_ns / 4 + next_random (window) % (base_ns / 2 + 1);
}

uint64_t
gq_window_sent (gq_window *window, uint64_t now_ns, uint32_t *slot)
{
    assert (gq_window_room (window));
    uint32_t i = 0;
    while (window->slots[i].sequence != 0)
        i++;
    window->slots[i] = (gq_window_slot){
        .sequence = ++window->sequence, .due_ns = now_ns + patience_ns (window, 1), .sends = 1};
    *slot = i;
    return window->sequence;
}

static bool
settled (uint64_t sequence, uint64_t cumulative, uint64_t beyond)
{
    if (sequence <= cumulative)
        return true;
    uint64_t bit = sequence - cumulative - 1;
    return bit < 64 && (beyond >> bit & 1) != 0;
}

uint64_t
gq_window_settle (gq_window *window, uint64_t cumulative, uint64_t beyond)
{
    uint64_t freed = 0;
    if (cumulative > window->sequence)
        return 0; /* of numbers that were never given out: not for us */
    uint64_t given = window->sequence - cumulative;
    if (given < 64 && beyond >> given != 0)
        return 0; /* so are these */
    for (uint32_t i = 0; i < window->size; i++)
        if (window->slots[i].sequence != 0 &&
            settled (window->slots[i].sequence, cumulative, beyond)) {
            window->slots[i].sequence = 0;
            freed |= (uint64_t)1 << i;
        }
    if (cumulative > window->cumulative)
        window->cumulative = cumulative;
    gq_window_received (window, cumulative);
    return freed;
}

void
gq_window_received (gq_window *window, uint64_t number)
{
    if (number > window->received && number <= window->sequence)
        window->received = number;
}

bool
gq_window_rolled_back (const gq_window *window, uint64_t cumulative, uint64_t beyond)
{
    if (cumulative < window->cumulative)
        return true;
    uint64_t on_the_way = 0; /* bit i: number cumulative + 1 + i, as in `beyond` */
    for (uint32_t i = 0; i < window->size; i++) {
        uint64_t bit = window->slots[i].sequence - cumulative - 1; /* huge for what is not beyond */
        if (window->slots[i].sequence > cumulative && bit < 64)
            on_the_way |= (uint64_t)1 << bit;
    }
    uint64_t given = window->sequence > cumulative ? window->sequence - cumulative : 0;
    uint64_t all = given < 64 ? ((uint64_t)1 << given) - 1 : UINT64_MAX;
    return (all & ~(on_the_way | beyond)) != 0;
}

/* The oldest gradient on the way whose time has come by now_ns. */
int
gq_window_due (const gq_window *window, uint64_t now_ns)
{
    int oldest = -1;
    for (uint32_t i = 0; i < window->size; i++)
        if (window->slots[i].sequence != 0 && window->slots[i].due_ns <= now_ns &&
            (oldest < 0 || window->slots[i].sequence < window->slots[oldest].sequence))
            oldest = (int)i;
    return oldest;
}

void
gq_window_resent (gq_window *window, uint32_t slot, uint64_t now_ns)
{
    gq_window_slot *which = &window->slots[slot];
    assert (slot < window->size && which->sequence != 0);
    which->sends++;
    which->due_ns = now_ns + patience_ns (window, which->sends);
    window->resent++;
}

uint64_t
gq_window_next_ns (const gq_window *window)
{
    uint64_t next_ns = UINT64_MAX;
    for (uint32_t i = 0; i < window->size; i++)
        if (window->slots[i].sequence != 0 && window->slots[i].due_ns < next_ns)
            next_ns = window->slots[i].due_ns;
    return next_ns;
}
