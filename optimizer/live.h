/*
 * Live state: the optimizer's own arithmetic, kept in the board's file behind the weights, where it
 * outlives every process but not the machine.  With it the journal only has to name a gradient: one
 * of lane shm lies in shared memory, and one of lane inline is put there, beside the state.  Beside
 * step 5 of a gradient's path.
 *
 * Two marks say in turn what the state includes.  From the active one a step runs: it writes a
 * block of the board that nobody reads, slides the slots (rule_state.h), and counts its blocks.
 * Then the other mark is filled and becomes active.  So a process may be killed between any two
 * instructions: given the same gradient, the step is finished from the count.
 *
 * One process writes, after it has locked the run directory.  Readers trust nothing that they find.
 */
#ifndef GQ_LIVE_H
#define GQ_LIVE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "board.h"
#include "rule_state.h"

/* What the state includes, and where it lies. */
typedef struct gq_live_mark {
    uint64_t lsn;   /* of the last record whose arithmetic is in it, */
    uint32_t chain; /* and its CRC */
    uint32_t block; /* of the board that has the weights */
    uint64_t version, applied;
    uint32_t held; /* gradients in the sum of an incomplete step, */
    uint32_t sum;  /* and in which of the two vectors it is */
    double held_weight;
    char rule[GQ_RULE_WORD_MAX];
    uint64_t steps; /* of the rule */
    uint32_t slot_count, scalar_count;
    uint64_t at[GQ_SLOTS_MAX]; /* where in its ring each slot begins */
    double scalars[GQ_SCALARS_MAX];
} gq_live_mark;

/* What was being done when it was last written. */
typedef struct gq_live_step {
    uint64_t done;  /* blocks of the step from the mark; 0: none, or not begun */
    uint32_t block; /* of the board that it writes */
} gq_live_step;

typedef struct gq_live gq_live;

/* A number for this boot of this host: after another one, what lay in shared memory is of no one
 * moment.  0: the host does not say. */
uint64_t gq_live_boot (void);

/* What lies there. */
typedef struct gq_live_shape {
    uint64_t count; /* elements of a slot or sum */
    uint64_t slide; /* as gq_rule_state.slide */
    uint32_t slot_count;
    uint32_t sum_count; /* 2 with --aggregate, else 0 */
} gq_live_shape;

/* Bytes behind the blocks of a board. */
uint64_t gq_live_bytes (const gq_live_shape *shape);

/* Begin one in the room behind the blocks of `board`, which is borrowed.  Nothing is in it before
 * the first commit.  NULL: out of memory, or the host does not say which boot this is. */
gq_live *gq_live_new (gq_board *board, const gq_live_shape *shape);

/* The next step writes block `block`: where to count what is done of it. */
atomic_ullong *gq_live_begin_step (gq_live *live, uint32_t block);

/* What was begun is done, and *mark says what the state includes now. */
void gq_live_commit (gq_live *live, const gq_live_mark *mark);

/*
 * The one that an earlier process left in the file at `path`, to read.  *board_p is its board,
 * yours to close after the live state.
 * GQ_OK; GQ_NOTFOUND: there is none; else *error says why it is worth nothing: GQ_IO, GQ_MALFORMED
 * (another run, model or boot, or damaged), GQ_MEMORY.
 */
GQ_CHECK gq_status gq_live_open (gq_live **live_p, gq_board **board_p, const char *path,
                                 const uint8_t run[GQ_RUN_ID_BYTES], uint64_t digest,
                                 uint64_t count, gq_error *error);
/* Mark and step as they are now; false: they changed meanwhile, some process is at work. */
bool gq_live_read (const gq_live *live, gq_live_mark *mark, gq_live_step *step);

const gq_live_shape *gq_live_shape_of (const gq_live *live);
/* The ring of slot `index`, f32[gq_rule_state_ring (count, slide)]; and where it is in the file. */
const float *gq_live_ring (const gq_live *live, size_t index);
uint64_t gq_live_ring_at (const gq_live *live, size_t index);
float *gq_live_sum (const gq_live *live, size_t index); /* f32[count] */
/* The frame of lane inline whose step runs: header and at most f32[count], aligned for them.  Whole
 * before the journal names it; written over once its step is committed. */
uint8_t *gq_live_hand (gq_live *live);

void gq_live_free (gq_live **live_p);

#endif
