/*
 * What the parts of the core share: taking (core.c), replaying (core_replay.c), and keeping its
 * state in shared memory (core_live.c).
 */
#ifndef GQ_CORE_INTERNAL_H
#define GQ_CORE_INTERNAL_H

#include "core.h"

/* Are shape, bytes and values of the vector sound?  *vector is then where it lies.  `kept`: the
 * frame in bytes[] outlives us until its step is made, and need not be copied for that. */
GQ_CHECK gq_status gq_core_check_vector (gq_core *core, const uint8_t *bytes, bool kept,
                                         const gq_frame *frame, const float **vector);

/* A gradient that is accepted, or one that is refused: ledger, counters and arithmetic. */
gq_outcome gq_core_apply (gq_core *core, const gq_frame *frame, const float *gradient);
void gq_core_refuse (gq_core *core, const gq_frame *frame, gq_status reason);

/* The arithmetic of the newest record is done: say so in the live state, if there is one. */
void gq_core_commit (gq_core *core);

#endif
