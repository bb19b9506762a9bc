/*
 * Rollouts: what is bootstrapped where, repeatability, interruption, and that the whole learns.
 */
#include <cblas.h>
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "actors/rollout.h"

static void *
grab (size_t count, size_t size)
{
    void *memory = calloc (count, size);
    cr_assert_not_null (memory);
    return memory;
}

/* An environment of two actions whose step s of an episode shows (s, episode) and pays s + 1;
 * episodes end after `length` steps in the way told. */
typedef struct script {
    gq_env env;
    int length, step, episode;
    bool terminates, truncates;
} script;

static gq_status
script_reset (gq_env *env, uint32_t index, const uint64_t *seed, float *observation,
              gq_error *error)
{
    script *s = (script *)env;
    (void)index, (void)seed, (void)error;
    s->step = 0;
    s->episode++;
    observation[0] = 0, observation[1] = (float)s->episode;
    return GQ_OK;
}

static gq_status
script_step (gq_env *env, const uint32_t *actions, float *observation, gq_env_outcome *outcome,
             gq_error *error)
{
    script *s = (script *)env;
    (void)actions, (void)error;
    s->step++;
    observation[0] = (float)s->step, observation[1] = (float)s->episode;
    bool over = s->step == s->length;
    *outcome = (gq_env_outcome){.reward = (float)s->step,
                                .terminated = over && s->terminates,
                                .truncated = over && s->truncates};
    return GQ_OK;
}

static const gq_env_ops script_ops = {.reset = script_reset, .step = script_step};

enum { STEPS = 8, LENGTH = 3 };

static const gq_a3c_config loss_config = {
    .gamma = 0.9, .lambda = 0.8, .value_weight = 0.5, .entropy_weight = 0.01, .mean = true};

static gq_net *
make_net (uint64_t inputs, uint32_t steps)
{
    gq_net_config config = {.observation_rank = 1,
                            .observation_shape = {inputs},
                            .action_count = 2,
                            .hidden = 64,
                            .rollout_max = steps};
    gq_net *net = NULL;
    gq_error error = {""};
    openblas_set_num_threads (1);
    cr_assert_eq (gq_net_dense.create (&net, &config, &error), GQ_OK, "%s", error.text);
    return net;
}

/* Play one rollout of the script, and recompute its gradient from the rules of bootstrapping. */
static void
check_bootstrap (bool terminates, bool truncates)
{
    script s = {.env = {.ops = &script_ops,
                        .count = 1,
                        .spec = {.observation_rank = 1,
                                 .observation_shape = {2},
                                 .observation_count = 2,
                                 .action_count = 2}},
                .length = LENGTH,
                .terminates = terminates,
                .truncates = truncates};
    gq_net *net = make_net (2, STEPS);
    size_t count = net->element_count;
    float *weights = grab (count, sizeof *weights), *gradient = grab (count, sizeof *gradient);
    float *expected = grab (count, sizeof *expected);
    gq_rollout_config config = {
        .net = net, .env = &s.env, .steps_max = STEPS, .seed = 4, .loss = loss_config};
    gq_rollout *rollout = NULL;
    gq_a3c_loss loss;
    gq_error error = {""};

    net->ops->initialise (net, 1, weights);
    cr_assert_eq (gq_rollout_create (&rollout, &config, &error), GQ_OK, "%s", error.text);
    cr_assert_eq (gq_rollout_play (rollout, weights, STEPS, gradient, &loss, &error), GQ_OK);

    float logits[2 * STEPS], values[STEPS], rewards[STEPS], beyond[STEPS] = {0};
    float d_logits[2 * STEPS], d_values[STEPS];
    int32_t actions[STEPS];
    uint8_t cut[STEPS];
    double returns[STEPS], advantages[STEPS];
    gq_random random;
    gq_random_seed (&random, gq_random_stream (4, 0)); /* the stream of the actions */
    net->ops->begin (net);
    for (int t = 0; t < STEPS; t++) {
        const int episode = 1 + t / LENGTH;
        float now[2] = {(float)(t % LENGTH), (float)episode};
        float then[2] = {now[0] + 1, now[1]};
        net->ops->step (net, weights, now, logits + 2 * t, &values[t]);
        actions[t] = (int32_t)gq_a3c_sample (logits + 2 * t, 2, &random);
        rewards[t] = then[0];
        cut[t] = t % LENGTH == LENGTH - 1;
        beyond[t] = cut[t] && terminates ? 0 : net->ops->peek (net, weights, 0, then);
    }
    gq_a3c_steps steps = {.step_count = STEPS,
                          .env_count = 1,
                          .action_count = 2,
                          .logits = logits,
                          .values = values,
                          .actions = actions,
                          .rewards = rewards,
                          .cut = cut,
                          .beyond = beyond};
    gq_a3c_returns (&loss_config, &steps, returns, advantages);
    gq_a3c_loss wanted =
        gq_a3c_differentiate (&loss_config, &steps, returns, advantages, d_logits, d_values);
    net->ops->backward (net, weights, d_logits, d_values, expected);
    cr_assert_eq (loss.total, wanted.total);
    cr_assert_arr_eq (gradient, expected, count * sizeof *gradient);

    size_t episode_count;
    const gq_episode *episodes = gq_rollout_episodes (rollout, &episode_count);
    cr_assert_eq (episode_count, STEPS / LENGTH);
    for (size_t i = 0; i < episode_count; i++) {
        cr_assert_eq (episodes[i].reward_sum, 6.0); /* 1 + 2 + 3 */
        cr_assert_eq (episodes[i].length, LENGTH);
        cr_assert_eq (episodes[i].end_step, LENGTH * (i + 1));
    }
    gq_rollout_destroy (&rollout);
    net->ops->destroy (&net);
    free (weights), free (gradient), free (expected);
}

Test (rollout, terminated_episode_has_nothing_beyond)
{
    check_bootstrap (true, false);
}

Test (rollout, truncated_episode_is_bootstrapped_from_its_last_observation)
{
    check_bootstrap (false, true);
}

Test (rollout, termination_wins_over_truncation_in_the_same_step)
{
    check_bootstrap (true, true);
}

/* A net that writes down how it is called: b(egin) s(tep) p(eek) r(eset) g(radient). */
static char calls[64];

static void
spy_begin (gq_net *net)
{
    (void)net;
    strcat (calls, "b");
}

static void
spy_step (gq_net *net, const float *weights, const float *observation, float *logits, float *value)
{
    (void)net, (void)weights, (void)observation;
    logits[0] = logits[1] = *value = 0;
    strcat (calls, "s");
}

static float
spy_peek (gq_net *net, const float *weights, uint32_t k, const float *observation)
{
    (void)k, (void)net, (void)weights, (void)observation;
    strcat (calls, "p");
    return 0;
}

static void
spy_reset (gq_net *net, uint32_t k)
{
    (void)net, (void)k;
    strcat (calls, "r");
}

static void
spy_backward (gq_net *net, const float *weights, const float *d_logits, const float *d_values,
              float *gradient)
{
    (void)net, (void)weights, (void)d_logits, (void)d_values, (void)gradient;
    strcat (calls, "g");
}

static const gq_net_ops spy_ops = {.begin = spy_begin,
                                   .step = spy_step,
                                   .peek = spy_peek,
                                   .reset = spy_reset,
                                   .backward = spy_backward};

Test (rollout, recurrent_state_is_reset_at_episode_ends_only_and_after_the_bootstrap)
{
    script s = {.env = {.ops = &script_ops,
                        .count = 1,
                        .spec = {.observation_rank = 1,
                                 .observation_shape = {2},
                                 .observation_count = 2,
                                 .action_count = 2}},
                .length = LENGTH,
                .truncates = true};
    gq_net net = {.ops = &spy_ops, .config = {.action_count = 2, .rollout_max = 4}};
    gq_rollout_config config = {.net = &net, .env = &s.env, .steps_max = 4, .loss = loss_config};
    gq_rollout *rollout = NULL;
    gq_error error = {""};
    float none;

    cr_assert_eq (gq_rollout_create (&rollout, &config, &error), GQ_OK, "%s", error.text);
    cr_assert_eq (gq_rollout_play (rollout, &none, 4, &none, NULL, &error), GQ_OK);
    cr_assert_str_eq (calls, "bsssprspg");
    cr_assert_eq (gq_rollout_play (rollout, &none, 2, &none, NULL, &error), GQ_OK);
    cr_assert_str_eq (calls, "bsssprspgbssprg");
    gq_rollout_destroy (&rollout);
}

typedef struct cartpole_player {
    gq_env *env;
    gq_net *net;
    gq_rollout *rollout;
} cartpole_player;

static bool stop;

static bool
stopped (void)
{
    return stop;
}

static cartpole_player
make_player (uint64_t seed)
{
    cartpole_player p = {.net = make_net (4, 20)};
    gq_env_config env_config = GQ_ENV_CONFIG;
    gq_error error = {""};
    cr_assert_eq (gq_env_create (&p.env, &env_config, &error), GQ_OK, "%s", error.text);
    gq_rollout_config config = {
        .net = p.net,
        .env = p.env,
        .steps_max = 20,
        .seed = seed,
        .loss = {.gamma = 0.99, .lambda = 1, .value_weight = 0.5, .mean = true},
        .interrupted = stopped};
    cr_assert_eq (gq_rollout_create (&p.rollout, &config, &error), GQ_OK, "%s", error.text);
    return p;
}

static void
drop_player (cartpole_player *p)
{
    gq_rollout_destroy (&p->rollout);
    p->net->ops->destroy (&p->net);
    gq_env_destroy (&p->env);
}

Test (rollout, same_seed_repeats_every_gradient_and_another_does_not)
{
    cartpole_player players[3] = {make_player (6), make_player (6), make_player (7)};
    size_t count = players[0].net->element_count;
    float *weights = grab (count, sizeof *weights), *gradients[3];
    gq_error error;

    players[0].net->ops->initialise (players[0].net, 1, weights);
    for (int i = 0; i < 3; i++)
        gradients[i] = grab (count, sizeof **gradients);
    for (int round = 0; round < 20; round++) {
        for (int i = 0; i < 3; i++)
            cr_assert_eq (
                gq_rollout_play (players[i].rollout, weights, 20, gradients[i], NULL, &error),
                GQ_OK);
        cr_assert_arr_eq (gradients[0], gradients[1], count * sizeof *weights, "round %d", round);
        cr_assert_arr_neq (gradients[0], gradients[2], count * sizeof *weights);
    }
    cr_assert_eq (gq_rollout_steps (players[0].rollout), 400u);
    for (int i = 0; i < 3; i++) {
        drop_player (&players[i]);
        free (gradients[i]);
    }
    free (weights);
}

Test (rollout, interrupted_one_ends_before_its_next_step)
{
    cartpole_player p = make_player (8);
    float *weights = grab (p.net->element_count, sizeof *weights);
    float *gradient = grab (p.net->element_count, sizeof *gradient);
    gq_error error = {""};

    cr_assert_eq (gq_rollout_play (p.rollout, weights, 5, gradient, NULL, &error), GQ_OK);
    stop = true;
    cr_assert_eq (gq_rollout_play (p.rollout, weights, 5, gradient, NULL, &error), GQ_CLOSED);
    cr_assert_eq (gq_rollout_steps (p.rollout), 5u);
    drop_player (&p);
    free (weights), free (gradient);
}

/* Adam as Kingma and Ba (2015) write it; the service's own rules have their own tests. */
static void
adam_step (float *weights, const float *gradient, float *m, float *v, size_t count, uint64_t step)
{
    float first = (float)(1 - pow (0.9, (double)step));
    float second = (float)(1 - pow (0.999, (double)step));

    for (size_t i = 0; i < count; i++) {
        m[i] = 0.9f * m[i] + 0.1f * gradient[i];
        v[i] = 0.999f * v[i] + 0.001f * gradient[i] * gradient[i];
        weights[i] -= 1e-3f * (m[i] / first) / (sqrtf (v[i] / second) + 1e-8f);
    }
}

Test (rollout, cartpole_is_solved_with_adam_and_the_default_settings)
{
    enum { KEPT = 100, STEPS_MAX = 300000 };
    const uint64_t seed = 1;
    cartpole_player p = make_player (seed);
    size_t count = p.net->element_count, episode_total = 0;
    float *weights = grab (count, sizeof *weights), *gradient = grab (count, sizeof *gradient);
    float *m = grab (count, sizeof *m), *v = grab (count, sizeof *v);
    double last[KEPT] = {0}, mean = 0;
    gq_error error;

    printf ("seed %llu\n", (unsigned long long)seed);
    p.net->ops->initialise (p.net, seed, weights);
    while (mean < 475 && gq_rollout_steps (p.rollout) < STEPS_MAX) {
        size_t ended;
        cr_assert_eq (gq_rollout_play (p.rollout, weights, 20, gradient, NULL, &error), GQ_OK);
        adam_step (weights, gradient, m, v, count, gq_rollout_steps (p.rollout) / 20);
        const gq_episode *episodes = gq_rollout_episodes (p.rollout, &ended);
        for (size_t i = 0; i < ended; i++)
            last[episode_total++ % KEPT] = episodes[i].reward_sum;
        mean = 0;
        for (int i = 0; i < KEPT; i++)
            mean += last[i] / KEPT;
    }
    /* The worst of 60 runs with 1, 4 or 8 players took 155,000 steps. */
    cr_assert_geq (mean, 475.0, "mean %g of the last 100 episodes after %llu steps", mean,
                   (unsigned long long)gq_rollout_steps (p.rollout));
    drop_player (&p);
    free (weights), free (gradient), free (m), free (v);
}
