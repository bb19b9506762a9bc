/*
 * The jobs of gradq-actor, and what they share.  Step 0 of a gradient's path.
 */
#ifndef GQ_JOBS_H
#define GQ_JOBS_H

#include <stdbool.h>

#include "a3c.h"
#include "env.h"
#include "net.h"
#include "options.h"
#include "rollout.h"
#include "safetensors.h"

/* SIGINT or SIGTERM has come: end at the next step. */
bool gq_stop_requested (void);
/* From now on these two only set that; SIGPIPE is ignored. */
void gq_stop_on_signals (void);

/* --net; the options table allows no other word. */
const gq_net_ops *gq_net_named (const char *name);

/* --env, --env-set, --python; `count` games.  The environment is yours; errors as gq_env_create. */
GQ_CHECK gq_status gq_env_from_options (gq_env **env_p, const gq_options *options, uint32_t count,
                                        gq_error *error);

/* --net, --hidden, for this environment's observations, actions and count of games, and rollouts of
 * `rollout_steps`.  The net is yours; errors as its create. */
GQ_CHECK gq_status gq_net_from_options (gq_net **net_p, const gq_options *options,
                                        const gq_env *env, uint32_t rollout_steps, gq_error *error);

/* *config for these, which it borrows, with the loss of the options; the seed is left to the
 * caller. */
void gq_rollout_from_options (gq_rollout_config *config, const gq_options *options, gq_net *net,
                              gq_env *env, uint32_t rollout_steps);

bool gq_normalise_from_options (const gq_options *options); /* --normalise */

/*
 * Sizes of the net `ops` as the shapes of its parameters in `file` show them: hidden, filters and
 * action_count of *config; the observation's shape and rollout_max are the caller's.
 * GQ_OK, GQ_NOTFOUND or GQ_INVALID with *error.
 */
GQ_CHECK gq_status gq_net_sizes (gq_net_config *config, const gq_net_ops *ops,
                                 const gq_safetensors *file, gq_error *error);

/*
 * The net's parameters from `file` into weights[net->element_count], each with the net's own name
 * and shape; other tensors of the file (an optimizer's slots) are not looked at.
 * GQ_OK, GQ_NOTFOUND or GQ_INVALID with *error.
 */
GQ_CHECK gq_status gq_net_read (const gq_net *net, const gq_safetensors *file, float *weights,
                                gq_error *error);

/* Each job is done at GQ_OK; GQ_CLOSED: interrupted; otherwise *error says why not. */
GQ_CHECK gq_status gq_job_train (const gq_options *options, gq_error *error);
GQ_CHECK gq_status gq_job_evaluate (const gq_options *options, gq_error *error);
GQ_CHECK gq_status gq_job_benchmark (const gq_options *options, gq_error *error);
/* --gradients: the rollout in file `in`, its loss and gradients to file `out`. */
GQ_CHECK gq_status gq_job_gradients (const char *net_name, const char *in, const char *out,
                                     gq_error *error);

#endif
