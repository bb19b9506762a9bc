/*
 * A rollout: T steps of K games with one snapshot of the weights, and the gradient of their A3C
 * loss.  Step 0 of a gradient's path.
 *
 * It knows no client and no clock, so that training, tests and experiments in one process run the
 * same code.
 */
#ifndef GQ_ROLLOUT_H
#define GQ_ROLLOUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "a3c.h"
#include "env.h"
#include "net.h"

typedef struct gq_episode {
    double reward_sum; /* the episode's return, undiscounted */
    uint64_t length;   /* steps */
    uint64_t end_step; /* steps of all of this player's games by its end */
} gq_episode;

typedef struct gq_rollout_config {
    gq_net *net;        /* borrowed, with rollout_max >= steps_max and the env's count of games */
    gq_env *env;        /* borrowed, of K games */
    uint32_t steps_max; /* T */
    uint64_t seed;      /* of the environment and the actions */
    bool normalise;     /* observations, see normalise.h */
    float reward_clip;  /* rewards are learnt within +- this; 0: as they are; returns never are */
    gq_a3c_config loss;
    bool (*interrupted) (void); /* asked before each step; may be NULL */
} gq_rollout_config;

typedef struct gq_rollout gq_rollout;

/* GQ_OK: *rollout_p is yours and the first episode has begun; GQ_MEMORY, or as the environment's
 * reset, with *error. */
GQ_CHECK gq_status gq_rollout_create (gq_rollout **rollout_p, const gq_rollout_config *config,
                                      gq_error *error);
void gq_rollout_destroy (gq_rollout **rollout_p);

/*
 * Play `step_count` in [1, steps_max] steps of each game with weights[element_count], sampling
 * actions, over as many episodes as they take.  gradient[element_count] is overwritten; *loss may
 * be NULL.
 *
 * GQ_OK; GQ_CLOSED: interrupted, the gradient is not valid; or as the environment's step.
 */
GQ_CHECK gq_status gq_rollout_play (gq_rollout *rollout, const float *weights, uint32_t step_count,
                                    float *gradient, gq_a3c_loss *loss, gq_error *error);

/* Episodes that ended within the last play, in order; valid until the next. */
const gq_episode *gq_rollout_episodes (const gq_rollout *rollout, size_t *count);

uint64_t gq_rollout_steps (const gq_rollout *rollout); /* so far, of all games */

#endif
