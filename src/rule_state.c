/*
 * State of a rule: names, slots, scalars, steps.
 */
#include "rule_state.h"

#include <assert.h>
#include <string.h>

#include "shm.h"

_Static_assert(GQ_SLIDE * sizeof (float) % 64 == 0, "slots stay aligned to cache lines");

bool
gq_rule_word (const char *text)
{
    size_t length = strlen (text);
    return length > 0 && length < GQ_RULE_WORD_MAX &&
           strspn (text, "abcdefghijklmnopqrstuvwxyz0123456789_") == length;
}

bool
gq_rule_state_same (const gq_rule_state *a, const gq_rule_state *b)
{
    bool same = strcmp (a->name, b->name) == 0 && a->slot_count == b->slot_count &&
                a->scalar_count == b->scalar_count;
    for (size_t i = 0; same && i < a->slot_count; i++)
        same = strcmp (a->slot_names[i], b->slot_names[i]) == 0;
    for (size_t i = 0; same && i < a->scalar_count; i++)
        same = strcmp (a->scalar_names[i], b->scalar_names[i]) == 0;
    return same;
}

uint64_t
gq_rule_state_ring (uint64_t n, uint64_t slide)
{
    const uint64_t page = GQ_SHM_PAGE / sizeof (float);
    return (n + slide + page - 1) / page * page;
}

static void
free_rings (float *const *rings, uint64_t ring)
{
    for (size_t i = 0; i < GQ_SLOTS_MAX; i++)
        gq_shm_ring_free (rings[i], (size_t)ring * sizeof (float));
}

gq_status
gq_rule_state_allocate (gq_rule_state *state, uint64_t n, uint64_t slide)
{
    assert (n <= GQ_PARAMETERS_MAX && state->slot_count <= GQ_SLOTS_MAX && slide % GQ_SLIDE == 0);
    const uint64_t ring = gq_rule_state_ring (n, slide);
    float *rings[GQ_SLOTS_MAX] = {NULL};
    for (size_t i = 0; i < state->slot_count; i++) {
        rings[i] = gq_shm_ring_private ((size_t)ring * sizeof (float));
        if (rings[i] == NULL) {
            free_rings (rings, ring);
            return GQ_MEMORY;
        }
    }
    free_rings (state->rings, state->ring);
    memcpy (state->rings, rings, sizeof rings);
    memcpy (state->slots, rings, sizeof rings);
    state->n = n;
    state->slide = slide;
    state->ring = ring;
    return GQ_OK;
}

gq_status
gq_rule_state_move (gq_rule_state *state, int fd, const uint64_t *at)
{
    const size_t bytes = (size_t)state->ring * sizeof (float);
    float *rings[GQ_SLOTS_MAX] = {NULL};
    for (size_t i = 0; i < state->slot_count; i++) {
        rings[i] = gq_shm_ring (fd, at[i], bytes);
        if (rings[i] == NULL) {
            free_rings (rings, state->ring);
            return GQ_MEMORY;
        }
    }
    for (size_t i = 0; i < state->slot_count; i++) {
        memcpy (rings[i], state->rings[i], bytes);
        state->slots[i] = rings[i] + (state->slots[i] - state->rings[i]);
    }
    free_rings (state->rings, state->ring);
    memcpy (state->rings, rings, sizeof rings);
    return GQ_OK;
}

void
gq_rule_state_free_rings (const gq_rule_state *state)
{
    free_rings (state->rings, state->ring);
}

void
gq_rule_state_clear (gq_rule_state *state)
{
    free_rings (state->rings, state->ring);
    *state = (gq_rule_state){0};
}
