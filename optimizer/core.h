/*
 * Core of the optimizer: check, enter in the ledger, aggregate, apply.  Steps 4 and 5 of a
 * gradient's path.  The only writer of weights and moments.  Owns no socket, reads no clock.
 */
#ifndef GQ_CORE_H
#define GQ_CORE_H

#include <stdbool.h>
#include <stdint.h>

#include "buffers.h"
#include "gradq/protocol.h"
#include "journal.h"
#include "lanes.h"
#include "layout.h"
#include "ledger.h"
#include "live.h"
#include "plugin.h"
#include "stats.h"

/* What a checkpoint calls the sum of a step being aggregated: "held.<parameter>". */
#define GQ_HELD_NAME "held"
/* And the slots of the rule before the current one: "retired.<rule>.<slot>.<parameter>". */
#define GQ_RETIRED_NAME "retired"

typedef struct gq_core_config {
    uint32_t aggregate;     /* gradients per step, >= 1 */
    bool weigh_samples;     /* weight them by their sample count */
    uint64_t max_staleness; /* steps; UINT64_MAX: any */
    bool damp;              /* damp stale gradients instead of refusing them */
} gq_core_config;

typedef struct gq_core {
    gq_core_config config;
    uint8_t run[GQ_RUN_ID_BYTES];
    uint32_t term;
    gq_rule *rule;              /* borrowed */
    gq_rule_state retired;      /* of the one before it, for its return; no name: there was none */
    gq_layout layout;           /* tensor_count 0: none yet */
    gq_buffers *buffers;        /* NULL: no layout yet */
    gq_lanes *lanes;            /* shared memory with actors; NULL: none */
    bool early;                 /* the frame being taken is gq_lanes_ready's, not a message */
    const char *lane_directory; /* where gq_core_share makes them; NULL: nowhere.  Borrowed */
    bool name_gradients;        /* in the journal, and keep the state in shared memory for it */
    gq_live *live;              /* where slots and sums lie then; NULL: in memory of our own */
    uint64_t boot;              /* which NAMED records are of (gq_live_boot) */
    bool has_weights;
    float *sum;        /* f32[count] of the step being aggregated; NULL until one is */
    float *spare;      /* f32[count] that it becomes with the next gradient */
    float *aligned;    /* f32[count] for payloads in bf16, unaligned, or in an actor's memory */
    bool numbers_only; /* while replaying what the live state has: no arithmetic on vectors */
    uint64_t pending;  /* blocks of the next step that a process before us had made */

    uint64_t version;       /* steps made in the run's whole life */
    uint64_t start_version; /* of this term */
    gq_journal *journal;    /* borrowed; NULL: nothing is journaled */
    const char *life;   /* JSON of rule and settings in force (life.h), borrowed, for checkpoints */
    uint64_t applied;   /* gradients in those steps */
    uint32_t held;      /* gradients in `sum` */
    double held_weight; /* sum of their weights */

    gq_ledger ledger;
    uint64_t rejected_by[GQ_STATUS_COUNT];
    uint64_t unsound;   /* gradients that were not what they had been called (not in checkpoints) */
    uint64_t malformed; /* frames that named nobody whom we could answer */
    gq_histogram staleness;   /* steps, of gradients applied */
    double staleness_sum;     /* of all gradients that were not refused, */
    uint64_t staleness_count; /* for the mean that damping needs */
} gq_core;

/* What became of a frame. */
typedef enum gq_outcome {
    GQ_OUTCOME_STEPPED, /* applied: there is a new version */
    GQ_OUTCOME_HELD,    /* waits for the rest of its step */
    GQ_OUTCOME_REFUSED, /* settled without being applied; an ack is owed */
    GQ_OUTCOME_IGNORED, /* not ours, or not new */
    GQ_OUTCOME_STARTED, /* first weights: version 0 */
    GQ_OUTCOME_BLOCKED  /* the journal could not take it: nothing changed, *reason says why */
} gq_outcome;

/* `rule` is borrowed and must outlive the core. */
void gq_core_init (gq_core *core, const gq_core_config *config, gq_rule *rule);
/* After the ZeroMQ context is gone: buffers may be lent to it. */
void gq_core_clear (gq_core *core);

/*
 * Can a run with this layout and rule be kept?  A checkpoint calls a slot's part
 * "<slot>.<parameter>", and once the rule has retired "retired.<rule>.<slot>.<parameter>".  GQ_OK;
 * GQ_INVALID with *error: that is another parameter's name already, or a slot is called as
 * checkpoints call something else.
 */
GQ_CHECK gq_status gq_core_check_layout (const gq_rule *rule, const gq_layout *layout,
                                         gq_error *error);

/* Take over a layout (moved out of *layout) and allocate for it.  Once.  GQ_OK, GQ_MEMORY. */
GQ_CHECK gq_status gq_core_set_layout (gq_core *core, gq_layout *layout);

/*
 * Share memory with the actors of this host, if there is a directory for it and a layout: weights
 * move to a board, and with name_gradients slots and sums behind them.  Once; before anything is
 * lent; what was recovered is in a checkpoint, or in the journal by itself.  A failure is logged,
 * and actors take lane inline.
 */
void gq_core_share (gq_core *core);

/*
 * While replaying numbers only, at the record that an earlier process committed last: take weights,
 * slots, scalars and sum from the state that it left.  The next gradient finishes the step that it
 * was interrupted in.
 *
 * GQ_OK; GQ_CHECKSUM: it does not fit; GQ_AGAIN: a process is changing it.  After either *error
 * says so, and the core is only good for gq_core_clear.
 */
GQ_CHECK gq_status gq_core_install (gq_core *core, const gq_live *live, const gq_board *board,
                                    gq_error *error);

/* Copy weights[count] in as the current version.  A layout is set. */
void gq_core_set_weights (gq_core *core, const float *weights, uint64_t version, uint64_t applied);

/*
 * One frame as it came: decide, journal the decision, then act on it.  *frame and *reason (why it
 * was refused) are filled as far as known, for the log.  Cost: CRC, finiteness, the record, and one
 * step of the rule.
 */
gq_outcome gq_core_take (gq_core *core, const void *bytes, size_t size, gq_frame *frame,
                         gq_status *reason);

/*
 * Grant an actor an epoch, journaled first.  GQ_OK; GQ_FULL, GQ_IO: nothing changed.
 */
GQ_CHECK gq_status gq_core_grant (gq_core *core, uint32_t actor, uint32_t epoch,
                                  const uint8_t nonce[GQ_NONCE_BYTES]);

/*
 * Do again what a record of the journal says: GRANT, GRADIENT, NAMED or REFUSAL.  Decisions are
 * taken from the record, never made anew.  GQ_OK; GQ_MALFORMED with *error: it does not fit the
 * state; GQ_NOTFOUND with *error: its gradient was only named, and record->vector is NULL.
 */
GQ_CHECK gq_status gq_core_replay (gq_core *core, const gq_record *record, gq_error *error);

/*
 * Go on with another rule and settings: weights and version stay; slots, scalars and steps move
 * over when both are of the same plug-in.  Otherwise they are kept as the retired state, and the
 * new rule goes on from the state retired before, if that was its own, or starts anew.  The old
 * rule stays its owner's.  A step being aggregated is made at once if it is complete under the new
 * settings.
 *
 * gq_core_check_layout allowed the rule.  GQ_OK; GQ_MEMORY, and nothing changed.
 */
GQ_CHECK gq_status gq_core_switch (gq_core *core, const gq_core_config *config, gq_rule *rule);

uint64_t gq_core_rejected (const gq_core *core); /* sum over reasons */

#endif
