/*
 * Checkpoints: the whole state of a run as a safetensors file that Python opens.  Beside step 5 of
 * a gradient's path.
 *
 * `<param>` holds the weights, `<slot>.<param>` each state slot, `retired.<rule>.<slot>.<param>`
 * those of the rule before; __metadata__ has the layout, rule and settings, scalars, version,
 * applied, term, run id, an XXH64 of all tensor data and one of the rest, so that no damage goes
 * unnoticed.
 */
#ifndef GQ_CHECKPOINT_H
#define GQ_CHECKPOINT_H

#include <stdint.h>

#include "core.h"

/*
 * Write DIR/checkpoint-VERSION.safetensors atomically and delete all but the newest `kept` up to
 * VERSION.  Files of higher versions, which a resume did not take, neither count nor go.
 * path[PATH_MAX], out, may be NULL.  GQ_OK; GQ_IO, GQ_MEMORY, GQ_NONFINITE (such weights are not
 * worth keeping) with *error, and nothing changed.
 */
GQ_CHECK gq_status gq_checkpoint_write (gq_core *core, const char *directory, uint64_t kept,
                                        char *path, gq_error *error);

/* Where a checkpoint stands in the journal. */
typedef struct gq_checkpoint_place {
    uint64_t lsn;
    uint32_t chain;
} gq_checkpoint_place;

/*
 * Called with the "life" that a checkpoint was written under (life.h), as JSON text: prepares *core
 * (gq_core_init) with that rule.  Anything but GQ_OK with *error ends the loading.
 */
typedef gq_status gq_checkpoint_prepare (void *context, gq_core *core, const char *life,
                                         gq_error *error);

/*
 * Load the newest checkpoint in DIR that verifies, of no higher version than version_max, into a
 * core without a layout: weights, slots, scalars, those of the retired rule, ledger, the step being
 * aggregated.  Older ones are tried when a newer one is damaged; each damaged one is logged.
 *
 * GQ_OK: *place is filled.  GQ_NOTFOUND: there is none at all; GQ_MALFORMED: none verifies;
 * GQ_MEMORY; or what `prepare` answered.
 */
GQ_CHECK gq_status gq_checkpoint_load (gq_core *core, const char *directory, uint64_t version_max,
                                       gq_checkpoint_prepare *prepare, void *context,
                                       gq_checkpoint_place *place, gq_error *error);

/* Does DIR hold any checkpoint? */
bool gq_checkpoint_any (const char *directory);

/*
 * Take layout and weights from any safetensors file, as version 0: the parameters of a checkpoint,
 * or else every tensor, which must all be float32.  From a state file ("gradq-state-1"), which must
 * be of the core's rule, slots, scalars and steps too.  GQ_OK; GQ_NOTFOUND, GQ_IO, GQ_MALFORMED,
 * GQ_INVALID, GQ_MEMORY with *error.
 */
GQ_CHECK gq_status gq_checkpoint_init (gq_core *core, const char *path, gq_error *error);

#endif
