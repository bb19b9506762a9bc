/*
 * Plug-in host: find, load and check an update rule, hold its settings, slots and scalars, and make
 * one step of it.  Step 5 of a gradient's path, and the whole of gradq-try.
 */
#ifndef GQ_PLUGIN_H
#define GQ_PLUGIN_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "crew.h"
#include "gradq/optimizer.h"
#include "gradq/status.h"
#include "reduce.h"
#include "rule_state.h"

/*
 * The host's own settings, beside the plug-in's in `--set`:
 *   clip_norm (0: off), schedule constant|linear|cosine, schedule_steps, warmup_steps.
 * linear: warm-up, then lr falls linearly to 0 at schedule_steps; cosine: warm-up, then half a
 * cosine to 0 at schedule_steps; constant: warm-up only.  After schedule_steps lr stays 0.
 * Steps are the rule's own: a restart and a swap back to it go on where it was.
 */
typedef struct gq_rule gq_rule;

/*
 * Load `name`: a word without '/' and not ending in .so is NAME.so in `directory` (NULL: the
 * directory "plugins" beside the running program); anything else is a path.  sets[set_count] are
 * "key=value" words.  `cpu`: "auto", "sse2", "avx2", "avx512"; a level the CPU lacks is GQ_INVALID.
 * Checks MXCSR after dlopen: a plug-in built with -ffast-math sets flush-to-zero for the process;
 * it is restored and reported in *warning ("" when fine).
 *
 * GQ_OK: *rule_p is yours.  GQ_NOTFOUND (lists the shipped names), GQ_ABI (says both numbers),
 * GQ_INVALID (unknown key: lists the valid ones with defaults; bad value: says the bounds; bad
 * table in the plug-in), GQ_MEMORY.
 */
GQ_CHECK gq_status gq_rule_load (gq_rule **rule_p, const char *name, const char *directory,
                                 const char *const *sets, size_t set_count, const char *cpu,
                                 gq_error *warning, gq_error *error);
void gq_rule_free (gq_rule **rule_p);

/* Allocate (64-byte aligned) and initialise slots and scalars for n elements.  GQ_OK, GQ_MEMORY. */
GQ_CHECK gq_status gq_rule_reset (gq_rule *rule, uint64_t n);

/*
 * Continue where `from` is, at this version of the weights.  When both are of the same plug-in (by
 * name, slots and scalars) its slots, scalars and steps move over.  Otherwise they become *retired,
 * and the rule goes on with what *retired held, when that was its own, or else is reset; what
 * *retired held of a third rule is gone.  `from` may be used no further but to free it.
 *
 * `from`, and *retired when it holds anything, have n elements.  GQ_OK; GQ_MEMORY, and nothing
 * changed.
 */
GQ_CHECK gq_status gq_rule_take_over (gq_rule *rule, gq_rule *from, gq_rule_state *retired,
                                      uint64_t version, uint64_t n);

/*
 * One step: next = rule (weights, gradient * scale), n elements as reset.  Clips gradient * scale
 * to clip_norm, applies the schedule.  The gradient must be finite: the caller checked.
 * weights and next do not overlap.
 */
void gq_rule_step (gq_rule *rule, const float *weights, float *next, const float *gradient,
                   float scale);

/*
 * The same, from block *done on, and *done counts the blocks that are done: a step that was
 * interrupted is finished, given the same rule, vectors and scale, from the counter, the scalars
 * and steps from before it, and the memory of `next` and slots as it was left.
 *
 * Each element of the gradient is read once (twice when clipping), and one that is not finite
 * counts as 0.  false: there were such.  `sound`: it was looked at and nobody writes it, so that
 * none is looked for.
 */
bool gq_rule_step_on (gq_rule *rule, const float *weights, float *next, const float *gradient,
                      float scale, bool sound, atomic_ullong *done);

/* Share steps among these threads from now on: the same bits.  `crew` is borrowed, NULL for none.
 * GQ_OK; GQ_MEMORY: the calling thread does all of a step. */
GQ_CHECK gq_status gq_rule_use_crew (gq_rule *rule, gq_crew *crew);

/* Where another process had the slots of a rule. */
typedef struct gq_rule_place {
    uint64_t slide;                   /* as gq_rule_state.slide */
    const float *rings[GQ_SLOTS_MAX]; /* f32[gq_rule_state_ring (n, slide)] */
    uint64_t at[GQ_SLOTS_MAX];        /* where in its ring the slot began before the step */
} gq_rule_place;

/*
 * Take over a state of the same rule and settings, whose step may have been interrupted, by copying
 * it; scalars and steps are from before that step.  GQ_OK; GQ_MEMORY, and nothing changed.
 */
GQ_CHECK gq_status gq_rule_install (gq_rule *rule, const gq_rule_place *from, const double *scalars,
                                    uint64_t steps);
/* gq_rule_state_move for its state. */
GQ_CHECK gq_status gq_rule_move (gq_rule *rule, int fd, const uint64_t *at);

const gq_optimizer *gq_rule_plugin (const gq_rule *rule);
const gq_rule_state *gq_rule_state_of (const gq_rule *rule); /* borrowed */
size_t gq_rule_slot_count (const gq_rule *rule);
float *gq_rule_slot (gq_rule *rule, size_t index); /* f32[n]; a step moves it */
size_t gq_rule_scalar_count (const gq_rule *rule);
double *gq_rule_scalars (gq_rule *rule);
uint64_t gq_rule_steps (const gq_rule *rule); /* made so far */
void gq_rule_set_steps (gq_rule *rule, uint64_t steps);
double
gq_rule_last_norm (const gq_rule *rule); /* of the last gradient * scale; 0 when not clipping */
/* Learning rate of the next step, as the schedule has it; NaN: the plug-in has no setting lr. */
double gq_rule_lr (const gq_rule *rule);
/* Setting i of the plug-in's and then the host's, as "key" and "value" text; 0 past the end. */
int gq_rule_setting (const gq_rule *rule, size_t index, const char **key, char value[64]);
const char *gq_rule_cpu (const gq_rule *rule); /* the level in use: "avx2" */

#endif
