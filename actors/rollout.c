/*
 * Playing a rollout and computing its gradient.  Step 0 of a gradient's path.
 *
 * Must never see two versions of the weights within one rollout: the caller hands one snapshot to
 * play, and the gradient is that of the very forward passes that chose the actions.
 */
#include "rollout.h"

#include <assert.h>
#include <stdlib.h>

struct gq_rollout {
    gq_rollout_config config;
    gq_random actions_random;
    uint64_t steps;    /* all of this rollout's life */
    double reward_sum; /* of the running episode */
    uint64_t length;
    bool fresh;           /* the last episode has ended: reset before the next step */
    gq_episode *episodes; /* [T], of the last play */
    size_t episode_count;
    float *observation;                          /* [observation_count], the one to act on next */
    float *logits;                               /* (T, A) */
    float *d_logits;                             /* (T, A) */
    float *values, *d_values, *rewards, *beyond; /* (T) */
    int32_t *actions;                            /* (T) */
    uint8_t *cut;                                /* (T) */
    double *returns, *advantages;                /* (T) */
};

void
gq_rollout_destroy (gq_rollout **rollout_p)
{
    gq_rollout *self = *rollout_p;

    if (self == NULL)
        return;
    void *arrays[] = {self->episodes, self->observation, self->logits,  self->d_logits,
                      self->values,   self->d_values,    self->rewards, self->beyond,
                      self->actions,  self->cut,         self->returns, self->advantages};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++)
        free (arrays[i]);
    free (self);
    *rollout_p = NULL;
}

static bool
allocate (gq_rollout *self)
{
    size_t steps = self->config.steps_max;
    size_t outputs = steps * self->config.env->spec.action_count;

    self->episodes = calloc (steps, sizeof *self->episodes);
    self->observation =
        calloc (self->config.env->spec.observation_count, sizeof *self->observation);
    self->logits = calloc (outputs, sizeof *self->logits);
    self->d_logits = calloc (outputs, sizeof *self->d_logits);
    self->values = calloc (steps, sizeof *self->values);
    self->d_values = calloc (steps, sizeof *self->d_values);
    self->rewards = calloc (steps, sizeof *self->rewards);
    self->beyond = calloc (steps, sizeof *self->beyond);
    self->actions = calloc (steps, sizeof *self->actions);
    self->cut = calloc (steps, sizeof *self->cut);
    self->returns = calloc (steps, sizeof *self->returns);
    self->advantages = calloc (steps, sizeof *self->advantages);
    return self->episodes && self->observation && self->logits && self->d_logits && self->values &&
           self->d_values && self->rewards && self->beyond && self->actions && self->cut &&
           self->returns && self->advantages;
}

gq_status
gq_rollout_create (gq_rollout **rollout_p, const gq_rollout_config *config, gq_error *error)
{
    gq_env *env = config->env;

    *rollout_p = NULL;
    assert (config->steps_max >= 1 && config->net->config.rollout_max >= config->steps_max);
    assert (config->net->config.action_count == env->spec.action_count);
    gq_rollout *self = calloc (1, sizeof *self);
    if (self == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory for a rollout");
    self->config = *config;
    /* Two streams: an environment that draws more or less must not change the actions' luck. */
    gq_random_seed (&self->actions_random, gq_random_stream (config->seed, 0));
    uint64_t env_seed = gq_random_stream (config->seed, 1);
    gq_status status;
    if (!allocate (self))
        status = gq_fail (error, GQ_MEMORY, "out of memory for a rollout of %u steps",
                          config->steps_max);
    else
        status = env->ops->reset (env, &env_seed, self->observation, error);
    if (status != GQ_OK)
        gq_rollout_destroy (&self);
    *rollout_p = self;
    return status;
}

/* The episode ended with step t: note it, and take the value of what lies beyond. */
static void
end_episode (gq_rollout *self, const float *weights, size_t t, const gq_env_outcome *outcome)
{
    gq_net *net = self->config.net;

    self->cut[t] = 1;
    /* Where both hold, the termination counts: nothing lies beyond. */
    self->beyond[t] = outcome->terminated ? 0 : net->ops->peek (net, weights, self->observation);
    net->ops->reset (net);
    self->episodes[self->episode_count++] = (gq_episode){
        .reward_sum = self->reward_sum, .length = self->length, .end_step = self->steps};
    self->reward_sum = 0;
    self->length = 0;
    self->fresh = true;
}

static gq_status
play_step (gq_rollout *self, const float *weights, size_t t, gq_error *error)
{
    gq_net *net = self->config.net;
    gq_env *env = self->config.env;
    uint32_t action_count = env->spec.action_count;
    float *logits = self->logits + t * action_count;
    gq_env_outcome outcome;

    if (self->fresh) {
        gq_status status = env->ops->reset (env, NULL, self->observation, error);
        if (status != GQ_OK)
            return status;
        self->fresh = false;
    }
    net->ops->step (net, weights, self->observation, logits, &self->values[t]);
    uint32_t action = gq_a3c_sample (logits, action_count, &self->actions_random);
    gq_status status = env->ops->step (env, action, self->observation, &outcome, error);
    if (status != GQ_OK)
        return status;
    self->actions[t] = (int32_t)action;
    self->rewards[t] = outcome.reward;
    self->cut[t] = 0;
    self->reward_sum += (double)outcome.reward;
    self->length++;
    self->steps++;
    if (outcome.terminated || outcome.truncated)
        end_episode (self, weights, t, &outcome);
    return GQ_OK;
}

gq_status
gq_rollout_play (gq_rollout *self, const float *weights, uint32_t step_count, float *gradient,
                 gq_a3c_loss *loss, gq_error *error)
{
    gq_net *net = self->config.net;

    assert (step_count >= 1 && step_count <= self->config.steps_max);
    self->episode_count = 0;
    net->ops->begin (net);
    for (uint32_t t = 0; t < step_count; t++) {
        if (self->config.interrupted != NULL && self->config.interrupted ())
            return gq_fail (error, GQ_CLOSED, "interrupted");
        gq_status status = play_step (self, weights, t, error);
        if (status != GQ_OK)
            return status;
    }
    if (!self->cut[step_count - 1])
        self->beyond[step_count - 1] = net->ops->peek (net, weights, self->observation);

    gq_a3c_steps steps = {.step_count = step_count,
                          .action_count = net->config.action_count,
                          .logits = self->logits,
                          .values = self->values,
                          .actions = self->actions,
                          .rewards = self->rewards,
                          .cut = self->cut,
                          .beyond = self->beyond};
    gq_a3c_returns (&self->config.loss, &steps, self->returns, self->advantages);
    gq_a3c_loss result = gq_a3c_differentiate (&self->config.loss, &steps, self->returns,
                                               self->advantages, self->d_logits, self->d_values);
    net->ops->backward (net, weights, self->d_logits, self->d_values, gradient);
    if (loss != NULL)
        *loss = result;
    return GQ_OK;
}

const gq_episode *
gq_rollout_episodes (const gq_rollout *self, size_t *count)
{
    *count = self->episode_count;
    return self->episodes;
}

uint64_t
gq_rollout_steps (const gq_rollout *self)
{
    return self->steps;
}
