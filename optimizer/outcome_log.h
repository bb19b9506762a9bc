/*
 * What became of frames, in the log: each one at level debug, refusals once a second.  Beside step
 * 4 of a gradient's path.
 */
#ifndef GQ_OUTCOME_LOG_H
#define GQ_OUTCOME_LOG_H

#include "core.h"

typedef struct gq_outcome_log {
    uint64_t refused_ns; /* last time that a refusal was logged */
    uint64_t unlogged;   /* refusals since */
    /* First weights that were refused, and logged last. */
    uint64_t start_refused_ns;
    uint32_t start_actor;
    gq_status start_reason; /* GQ_OK: none were */
} gq_outcome_log;

void gq_outcome_log_add (gq_outcome_log *log, const gq_core *core, gq_outcome outcome,
                         const gq_frame *frame, gq_status reason, uint64_t now_ns);

#endif
