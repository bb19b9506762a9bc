/*
 * State of a rule: names, slots, scalars, steps.
 */
#include "rule_state.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* Where slots begin: a cache line, and one AVX-512 register. */
#define SLOT_ALIGNMENT 64

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

gq_status
gq_rule_state_allocate (gq_rule_state *state, uint64_t n)
{
    assert (n <= GQ_PARAMETERS_MAX && state->slot_count <= GQ_SLOTS_MAX);
    void *memory[GQ_SLOTS_MAX] = {NULL};
    for (size_t i = 0; i < state->slot_count; i++) {
        /* calloc, not memset: a slot that the rule never touches never takes memory. */
        memory[i] = calloc (1, (size_t)n * sizeof (float) + SLOT_ALIGNMENT);
        if (memory[i] == NULL) {
            for (size_t j = 0; j < i; j++)
                free (memory[j]);
            return GQ_MEMORY;
        }
    }
    for (size_t i = 0; i < state->slot_count; i++) {
        free (state->memory[i]);
        state->memory[i] = memory[i];
        uintptr_t past = (uintptr_t)memory[i] % SLOT_ALIGNMENT;
        state->slots[i] = (float *)(void *)((char *)memory[i] + (SLOT_ALIGNMENT - past));
    }
    state->n = n;
    return GQ_OK;
}

void
gq_rule_state_clear (gq_rule_state *state)
{
    for (size_t i = 0; i < GQ_SLOTS_MAX; i++)
        free (state->memory[i]);
    *state = (gq_rule_state){0};
}
