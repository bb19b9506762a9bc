/*
 * What an update rule remembers, as plain data: slots, scalars, the steps made, and the names by
 * which it is known again.  Outlives the plug-in.  Beside step 5 of a gradient's path.
 *
 * Slots slide: a slot lies in a ring that is longer than it, and a step moves it towards the ring's
 * beginning, block by block, each to where blocks lay that were moved before it.  So what a block
 * was before the step is there until the block is done, at the price of an update in place.
 */
#ifndef GQ_RULE_STATE_H
#define GQ_RULE_STATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gradq/limits.h"
#include "gradq/status.h"

/* Elements of a block of a step, and how far slots slide with it: 1 KiB, the fastest of 256 to 2048
 * elements, and no slower than in place: what is written was read a moment before. */
#define GQ_SLIDE 256

/* Bytes of a rule's, slot's or scalar's name, final NUL included. */
#define GQ_RULE_WORD_MAX 64

typedef struct gq_rule_state {
    char name[GQ_RULE_WORD_MAX]; /* of the rule; "": there is no state */
    size_t slot_count, scalar_count;
    char slot_names[GQ_SLOTS_MAX][GQ_RULE_WORD_MAX];
    char scalar_names[GQ_SCALARS_MAX][GQ_RULE_WORD_MAX];
    uint64_t n;                 /* elements of a slot; 0 before there are any */
    uint64_t slide;             /* elements that a step moves slots by, a multiple of GQ_SLIDE */
    uint64_t ring;              /* elements of a ring */
    float *rings[GQ_SLOTS_MAX]; /* f32[2 * ring], the second half another view of the first */
    float *slots[GQ_SLOTS_MAX]; /* f32[n], which begins in the first half; 64-byte aligned */
    double scalars[GQ_SCALARS_MAX];
    uint64_t steps;   /* made so far */
    uint64_t version; /* of a retired rule: the weights' at which another one took over */
} gq_rule_state;

/* A word of a-z, 0-9 and _ that fits: what rules, slots and scalars are called. */
bool gq_rule_word (const char *text);

/* Are both of the same rule: by name, names of slots and of scalars, in their order? */
bool gq_rule_state_same (const gq_rule_state *a, const gq_rule_state *b);

/* Slots of n zeros each, which slide by `slide`; all else stays.  GQ_OK, GQ_MEMORY: nothing
 * changed. */
GQ_CHECK gq_status gq_rule_state_allocate (gq_rule_state *state, uint64_t n, uint64_t slide);

/* Elements of a ring for such slots. */
uint64_t gq_rule_state_ring (uint64_t n, uint64_t slide);

/* Move the slots, each to the same place of a ring at offset at[i] of the file.
 * GQ_OK; GQ_MEMORY, and nothing changed. */
GQ_CHECK gq_status gq_rule_state_move (gq_rule_state *state, int fd, const uint64_t *at);

void gq_rule_state_free_rings (const gq_rule_state *state);

/* Free the slots; there is no state then. */
void gq_rule_state_clear (gq_rule_state *state);

#endif
