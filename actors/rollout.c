/*
 * Playing a rollout and computing its gradient.  Step 0 of a gradient's path.
 *
 * Must never see two versions of the weights within one rollout: the caller hands one snapshot to
 * play, and the gradient is that of the very forward passes that chose the actions.
 */
#include "rollout.h"

#include <assert.h>
#include <stdlib.h>

#include "normalise.h"

/* One game's running episode. */
typedef struct gq_game {
    double reward_sum;
    uint64_t length;
    gq_normaliser normaliser;
    bool fresh; /* the last episode has ended: reset before the next step */
} gq_game;

struct gq_rollout {
    gq_rollout_config config;
    gq_random actions_random;
    uint64_t steps;       /* all of this rollout's life */
    gq_game *games;       /* [K] */
    gq_episode *episodes; /* [T K], of the last play */
    size_t episode_count;
    float *observations;                         /* (K, observation_count), to act on next */
    uint32_t *chosen;                            /* (K), actions of one step */
    gq_env_outcome *outcomes;                    /* (K) */
    float *logits;                               /* (T, K, A) */
    float *d_logits;                             /* (T, K, A) */
    float *values, *d_values, *rewards, *beyond; /* (T, K) */
    int32_t *actions;                            /* (T, K) */
    uint8_t *cut;                                /* (T, K) */
    double *returns, *advantages;                /* (T, K) */
};

void
gq_rollout_destroy (gq_rollout **rollout_p)
{
    gq_rollout *self = *rollout_p;

    if (self == NULL)
        return;
    void *arrays[] = {self->games,    self->episodes, self->observations, self->chosen,
                      self->outcomes, self->logits,   self->d_logits,     self->values,
                      self->d_values, self->rewards,  self->beyond,       self->actions,
                      self->cut,      self->returns,  self->advantages};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++)
        free (arrays[i]);
    free (self);
    *rollout_p = NULL;
}

static float *
observation_of (const gq_rollout *self, uint32_t k)
{
    return self->observations + k * self->config.env->spec.observation_count;
}

static bool
allocate (gq_rollout *self)
{
    const gq_env *env = self->config.env;
    size_t steps = (size_t)self->config.steps_max * env->count;
    size_t outputs = steps * env->spec.action_count;

    self->games = calloc (env->count, sizeof *self->games);
    self->episodes = calloc (steps, sizeof *self->episodes);
    self->observations =
        calloc (env->count * env->spec.observation_count, sizeof *self->observations);
    self->chosen = calloc (env->count, sizeof *self->chosen);
    self->outcomes = calloc (env->count, sizeof *self->outcomes);
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
    return self->games && self->episodes && self->observations && self->chosen && self->outcomes &&
           self->logits && self->d_logits && self->values && self->d_values && self->rewards &&
           self->beyond && self->actions && self->cut && self->returns && self->advantages;
}

static void
normalise (gq_rollout *self, uint32_t k)
{
    if (self->config.normalise)
        gq_normalise (&self->games[k].normaliser, observation_of (self, k),
                      self->config.env->spec.observation_count);
}

static gq_status
begin_episode (gq_rollout *self, uint32_t k, const uint64_t *seed, gq_error *error)
{
    gq_env *env = self->config.env;
    gq_status status = env->ops->reset (env, k, seed, observation_of (self, k), error);

    if (status == GQ_OK)
        normalise (self, k);
    self->games[k].fresh = false;
    return status;
}

gq_status
gq_rollout_create (gq_rollout **rollout_p, const gq_rollout_config *config, gq_error *error)
{
    gq_env *env = config->env;

    *rollout_p = NULL;
    assert (config->steps_max >= 1 && config->net->config.rollout_max >= config->steps_max);
    assert (config->net->config.action_count == env->spec.action_count);
    assert (env->count == 1 || config->net->config.env_count == env->count);
    gq_rollout *self = calloc (1, sizeof *self);
    if (self == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory for a rollout");
    self->config = *config;
    /* Two streams: an environment that draws more or less must not change the actions' luck. */
    gq_random_seed (&self->actions_random, gq_random_stream (config->seed, 0));
    gq_status status = GQ_OK;
    if (!allocate (self))
        status = gq_fail (error, GQ_MEMORY, "out of memory for a rollout of %u steps",
                          config->steps_max);
    for (uint32_t k = 0; status == GQ_OK && k < env->count; k++) {
        uint64_t seed = gq_random_stream (config->seed, 1 + k);
        status = begin_episode (self, k, &seed, error);
    }
    if (status != GQ_OK)
        gq_rollout_destroy (&self);
    *rollout_p = self;
    return status;
}

/* Game k's episode ended with the step of row `row`: note it, and take the value of what lies
 * beyond. */
static void
end_episode (gq_rollout *self, const float *weights, size_t row, uint32_t k)
{
    gq_net *net = self->config.net;
    gq_game *game = &self->games[k];

    self->cut[row] = 1;
    /* Where both hold, the termination counts: nothing lies beyond. */
    self->beyond[row] = self->outcomes[k].terminated
                            ? 0
                            : net->ops->peek (net, weights, k, observation_of (self, k));
    net->ops->reset (net, k);
    self->episodes[self->episode_count++] = (gq_episode){
        .reward_sum = game->reward_sum, .length = game->length, .end_step = self->steps};
    game->reward_sum = 0;
    game->length = 0;
    game->fresh = true;
}

static float
clipped (float reward, float limit)
{
    if (limit <= 0)
        return reward;
    return reward > limit ? limit : reward < -limit ? -limit : reward;
}

/* Game k's outcome into the rollout. */
static void
note (gq_rollout *self, const float *weights, size_t row, uint32_t k)
{
    const gq_env_outcome *outcome = &self->outcomes[k];

    normalise (self, k);
    self->actions[row] = (int32_t)self->chosen[k];
    self->rewards[row] = clipped (outcome->reward, self->config.reward_clip);
    self->cut[row] = 0;
    self->games[k].reward_sum += (double)outcome->reward;
    self->games[k].length++;
    self->steps++;
    if (outcome->terminated || outcome->truncated)
        end_episode (self, weights, row, k);
}

static gq_status
play_step (gq_rollout *self, const float *weights, size_t t, gq_error *error)
{
    gq_net *net = self->config.net;
    gq_env *env = self->config.env;
    uint32_t action_count = env->spec.action_count;
    size_t row = t * env->count;
    const float *logits = self->logits + row * action_count;

    for (uint32_t k = 0; k < env->count; k++) {
        if (!self->games[k].fresh)
            continue;
        gq_status status = begin_episode (self, k, NULL, error);
        if (status != GQ_OK)
            return status;
    }
    net->ops->step (net, weights, self->observations, self->logits + row * action_count,
                    &self->values[row]);
    for (uint32_t k = 0; k < env->count; k++)
        self->chosen[k] =
            gq_a3c_sample (logits + k * action_count, action_count, &self->actions_random);
    gq_status status =
        env->ops->step (env, self->chosen, self->observations, self->outcomes, error);
    for (uint32_t k = 0; status == GQ_OK && k < env->count; k++)
        note (self, weights, row + k, k);
    return status;
}

/* The loss of the steps played, and its derivatives by the net's outputs. */
static gq_a3c_loss
differentiate (gq_rollout *self, const float *weights, uint32_t step_count)
{
    gq_net *net = self->config.net;
    uint32_t env_count = self->config.env->count;
    size_t last = (size_t)(step_count - 1) * env_count;

    for (uint32_t k = 0; k < env_count; k++)
        if (!self->cut[last + k])
            self->beyond[last + k] = net->ops->peek (net, weights, k, observation_of (self, k));
    gq_a3c_steps steps = {.step_count = step_count,
                          .env_count = env_count,
                          .action_count = net->config.action_count,
                          .logits = self->logits,
                          .values = self->values,
                          .actions = self->actions,
                          .rewards = self->rewards,
                          .cut = self->cut,
                          .beyond = self->beyond};
    gq_a3c_returns (&self->config.loss, &steps, self->returns, self->advantages);
    return gq_a3c_differentiate (&self->config.loss, &steps, self->returns, self->advantages,
                                 self->d_logits, self->d_values);
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
    gq_a3c_loss result = differentiate (self, weights, step_count);
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
