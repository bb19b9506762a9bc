/*
 * What an update rule remembers, as plain data: slots, scalars, the steps made, and the names by
 * which it is known again.  Outlives the plug-in.  Beside step 5 of a gradient's path.
 */
#ifndef GQ_RULE_STATE_H
#define GQ_RULE_STATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gradq/limits.h"
#include "gradq/status.h"

/* Bytes of a rule's, slot's or scalar's name, final NUL included. */
#define GQ_RULE_WORD_MAX 64

typedef struct gq_rule_state {
    char name[GQ_RULE_WORD_MAX]; /* of the rule; "": there is no state */
    size_t slot_count, scalar_count;
    char slot_names[GQ_SLOTS_MAX][GQ_RULE_WORD_MAX];
    char scalar_names[GQ_SCALARS_MAX][GQ_RULE_WORD_MAX];
    uint64_t n;                 /* elements of a slot; 0 before there are any */
    void *memory[GQ_SLOTS_MAX]; /* what to free */
    float *slots[GQ_SLOTS_MAX]; /* f32[n], aligned, inside memory */
    double scalars[GQ_SCALARS_MAX];
    uint64_t steps;   /* made so far */
    uint64_t version; /* of a retired rule: the weights' at which another one took over */
} gq_rule_state;

/* A word of a-z, 0-9 and _ that fits: what rules, slots and scalars are called. */
bool gq_rule_word (const char *text);

/* Are both of the same rule: by name, names of slots and of scalars, in their order? */
bool gq_rule_state_same (const gq_rule_state *a, const gq_rule_state *b);

/* Slots of n zeros each, 64-byte aligned; all else stays.  GQ_OK, GQ_MEMORY: nothing changed. */
GQ_CHECK gq_status gq_rule_state_allocate (gq_rule_state *state, uint64_t n);

/* Free the slots; there is no state then. */
void gq_rule_state_clear (gq_rule_state *state);

#endif
