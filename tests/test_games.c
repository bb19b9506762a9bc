/*
 * Several games of one actor: a net that acts on K of them does what K nets do.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "actors/env.h"
#include "actors/net.h"
#include "actors/rollout.h"

enum { GAMES = 3, STEPS = 7, ACTIONS = 4 };

static float *
grab (size_t count)
{
    float *floats = calloc (count, sizeof *floats);
    cr_assert_not_null (floats);
    return floats;
}

static float *
normal_floats (gq_random *random, size_t count)
{
    float *floats = grab (count);
    for (size_t i = 0; i < count; i++)
        floats[i] = (float)gq_random_normal (random);
    return floats;
}

static gq_net *
make_net (const gq_net_ops *ops, uint32_t games)
{
    gq_net_config config = {.observation_rank = ops == &gq_net_dense ? 1 : 3,
                            .observation_shape = {2, 9, 6},
                            .action_count = ACTIONS,
                            .hidden = 12,
                            .filters = 5,
                            .rollout_max = STEPS,
                            .env_count = games};
    gq_net *net = NULL;
    gq_error error = {""};
    cr_assert_eq (ops->create (&net, &config, &error), GQ_OK, "%s", error.text);
    return net;
}

/* Games end here, so that some are reset while the others go on, and one at the very end. */
static bool
ends (size_t t, size_t game)
{
    return (t == 2 && game != 1) || (t == 4 && game == 1) || (t == STEPS - 1 && game == 2);
}

static void
expect_close (float actual, float expected, const char *what, size_t t, size_t game)
{
    cr_expect_float_eq (actual, expected, 1e-5f * (1 + fabsf (expected)),
                        "%s, step %zu, game %zu: %.9g, alone %.9g", what, t, game, (double)actual,
                        (double)expected);
}

/* Two rollouts, the state carried from one to the other; the gradient of all games is the sum of
 * those of each. */
static void
check_net (const gq_net_ops *ops)
{
    gq_random random;
    gq_random_seed (&random, 71);
    printf ("seed 71\n");
    gq_net *all = make_net (ops, GAMES), *each[GAMES];
    const size_t count = (size_t)all->element_count;
    const size_t inputs = ops == &gq_net_dense ? 2 : 108;
    float *weights = normal_floats (&random, count);
    float *gradient = grab (count), *part = grab (count), *sum = grab (count);
    for (size_t i = 0; i < count; i++)
        weights[i] *= 0.3f;
    for (size_t k = 0; k < GAMES; k++)
        each[k] = make_net (ops, 1);
    for (int rollout = 0; rollout < 2; rollout++) {
        float *x = normal_floats (&random, STEPS * GAMES * inputs);
        float *d_logits = normal_floats (&random, STEPS * GAMES * ACTIONS);
        float *d_values = normal_floats (&random, STEPS * GAMES);
        float own_logits[GAMES][STEPS * ACTIONS], own_values[GAMES][STEPS];
        all->ops->begin (all);
        for (size_t k = 0; k < GAMES; k++)
            each[k]->ops->begin (each[k]);
        for (size_t t = 0; t < STEPS; t++) {
            float logits[GAMES * ACTIONS], values[GAMES];
            for (size_t k = 0; k < GAMES; k++) {
                const float *own = x + (t * GAMES + k) * inputs;
                float seen = all->ops->peek (all, weights, (uint32_t)k, own);
                each[k]->ops->step (each[k], weights, own, own_logits[k] + t * ACTIONS,
                                    &own_values[k][t]);
                expect_close (seen, own_values[k][t], "peek", t, k);
            }
            all->ops->step (all, weights, x + t * GAMES * inputs, logits, values);
            for (size_t k = 0; k < GAMES; k++) {
                expect_close (values[k], own_values[k][t], "value", t, k);
                for (size_t a = 0; a < ACTIONS; a++)
                    expect_close (logits[k * ACTIONS + a], own_logits[k][t * ACTIONS + a], "logit",
                                  t, k);
                if (ends (t, k)) {
                    all->ops->reset (all, (uint32_t)k);
                    each[k]->ops->reset (each[k], 0);
                }
            }
        }
        all->ops->backward (all, weights, d_logits, d_values, gradient);
        memset (sum, 0, count * sizeof *sum);
        for (size_t k = 0; k < GAMES; k++) {
            float own_d[STEPS * ACTIONS], own_d_values[STEPS];
            for (size_t t = 0; t < STEPS; t++) {
                memcpy (own_d + t * ACTIONS, d_logits + (t * GAMES + k) * ACTIONS,
                        ACTIONS * sizeof *own_d);
                own_d_values[t] = d_values[t * GAMES + k];
            }
            each[k]->ops->backward (each[k], weights, own_d, own_d_values, part);
            for (size_t i = 0; i < count; i++)
                sum[i] += part[i];
        }
        for (size_t i = 0; i < count; i++)
            cr_expect_float_eq (gradient[i], sum[i], 1e-4f * (1 + fabsf (sum[i])),
                                "element %zu: %.9g, sum of each %.9g", i, (double)gradient[i],
                                (double)sum[i]);
        free (x), free (d_logits), free (d_values);
    }
    for (size_t k = 0; k < GAMES; k++)
        each[k]->ops->destroy (&each[k]);
    all->ops->destroy (&all);
    free (weights), free (gradient), free (part), free (sum);
}

Test (games, a_dense_net_of_several_does_what_as_many_nets_do)
{
    check_net (&gq_net_dense);
}

Test (games, a_conv_lstm_net_of_several_does_what_as_many_nets_do)
{
    check_net (&gq_net_conv_lstm);
}

/* A game whose observation, reward and end tell which game and step it is. */
typedef struct counted {
    gq_env env;
    unsigned step[GAMES], episode[GAMES];
} counted;

static void
show (const counted *games, uint32_t k, float *observation)
{
    observation[0] = (float)k;
    observation[1] = (float)(10 * games->episode[k] + games->step[k]);
}

static gq_status
counted_reset (gq_env *env, uint32_t k, const uint64_t *seed, float *observation, gq_error *error)
{
    counted *games = (counted *)env;
    (void)seed, (void)error;
    games->step[k] = 0;
    games->episode[k]++;
    show (games, k, observation);
    return GQ_OK;
}

/* Game k's episodes are k + 2 steps long, and pay k + 1 a step. */
static gq_status
counted_step (gq_env *env, const uint32_t *actions, float *observations, gq_env_outcome *outcomes,
              gq_error *error)
{
    counted *games = (counted *)env;
    (void)actions, (void)error;
    for (uint32_t k = 0; k < GAMES; k++) {
        games->step[k]++;
        show (games, k, observations + 2 * k);
        outcomes[k] =
            (gq_env_outcome){.reward = (float)(k + 1), .terminated = games->step[k] == k + 2};
    }
    return GQ_OK;
}

static const gq_env_ops counted_ops = {.reset = counted_reset, .step = counted_step};

static counted
counted_games (void)
{
    return (counted){.env = {.ops = &counted_ops,
                             .count = GAMES,
                             .spec = {.observation_rank = 1,
                                      .observation_shape = {2},
                                      .observation_count = 2,
                                      .action_count = ACTIONS}}};
}

Test (games, each_ends_by_itself_and_all_steps_count)
{
    counted games = counted_games ();
    gq_net *net = make_net (&gq_net_dense, GAMES);
    float *weights = grab (net->element_count), *gradient = grab (net->element_count);
    gq_rollout_config config = {.net = net, .env = &games.env, .steps_max = STEPS, .seed = 3};
    gq_rollout *rollout = NULL;
    gq_error error = {""};
    size_t count, by_length[GAMES + 2] = {0};

    cr_assert_eq (gq_rollout_create (&rollout, &config, &error), GQ_OK, "%s", error.text);
    cr_assert_eq (gq_rollout_play (rollout, weights, STEPS, gradient, NULL, &error), GQ_OK);
    cr_expect_eq (gq_rollout_steps (rollout), STEPS * GAMES);
    const gq_episode *episodes = gq_rollout_episodes (rollout, &count);
    for (size_t i = 0; i < count; i++) {
        cr_assert_leq (episodes[i].length, GAMES + 1);
        by_length[episodes[i].length]++;
        cr_expect_eq (episodes[i].reward_sum,
                      (double)(episodes[i].length * (episodes[i].length - 1)));
    }
    for (size_t k = 0; k < GAMES; k++)
        cr_expect_eq (by_length[k + 2], STEPS / (k + 2), "game %zu", k);
    gq_rollout_destroy (&rollout);
    net->ops->destroy (&net);
    free (weights), free (gradient);
}

/* The net that saw each observation last: of a rollout it learns what was really shown. */
static float seen[GAMES * 2];
static float kept_rewards;

static void
look_step (gq_net *net, const float *weights, const float *observations, float *logits,
           float *values)
{
    (void)net, (void)weights;
    memcpy (seen, observations, sizeof seen);
    memset (logits, 0, GAMES * ACTIONS * sizeof *logits);
    memset (values, 0, GAMES * sizeof *values);
}

static float
look_peek (gq_net *net, const float *weights, uint32_t k, const float *observation)
{
    (void)net, (void)weights, (void)k, (void)observation;
    return 0;
}

static void
look_reset (gq_net *net, uint32_t k)
{
    (void)net, (void)k;
}

static void
look_begin (gq_net *net)
{
    (void)net;
}

/* With values 0, gamma 0 and value weight 1, the derivative by a value is -reward / games. */
static void
look_backward (gq_net *net, const float *weights, const float *d_logits, const float *d_values,
               float *gradient)
{
    (void)net, (void)weights, (void)d_logits, (void)gradient;
    kept_rewards = 0;
    for (size_t k = 0; k < GAMES; k++)
        kept_rewards -= d_values[k] * GAMES;
}

static const gq_net_ops look_ops = {.begin = look_begin,
                                    .step = look_step,
                                    .peek = look_peek,
                                    .reset = look_reset,
                                    .backward = look_backward};

static void
look (bool normalise, float reward_clip, double *reward_sum)
{
    counted games = counted_games ();
    gq_net net = {.ops = &look_ops,
                  .config = {.action_count = ACTIONS, .rollout_max = 4, .env_count = GAMES}};
    gq_rollout_config config = {.net = &net,
                                .env = &games.env,
                                .steps_max = 4,
                                .normalise = normalise,
                                .reward_clip = reward_clip,
                                .loss = {.value_weight = 1}};
    gq_rollout *rollout = NULL;
    gq_error error = {""};
    float none;
    size_t count;

    cr_assert_eq (gq_rollout_create (&rollout, &config, &error), GQ_OK, "%s", error.text);
    cr_assert_eq (gq_rollout_play (rollout, &none, 1, &none, NULL, &error), GQ_OK);
    for (int i = 0; i < 3; i++)
        cr_assert_eq (gq_rollout_play (rollout, &none, 1, &none, NULL, &error), GQ_OK);
    const gq_episode *episodes = gq_rollout_episodes (rollout, &count);
    *reward_sum = 0;
    for (size_t i = 0; i < count; i++)
        *reward_sum += episodes[i].reward_sum;
    gq_rollout_destroy (&rollout);
}

Test (games, rewards_are_clipped_for_learning_only)
{
    double sum;
    look (false, 0, &sum);
    cr_expect_float_eq (kept_rewards, 6, 1e-5f, "unclipped: %.9g", (double)kept_rewards);
    look (false, 1.5f, &sum);
    cr_expect_float_eq (kept_rewards, 4, 1e-5f, "clipped: %.9g", (double)kept_rewards);
    cr_expect_eq (sum, 12 + 2, "the fourth step ends game 2 (4 x 3) and game 0 (2 x 1)");
}

/* Running means by hand, of game 1: observations (1, 10 e + s). */
Test (games, observations_are_normalised_by_running_means)
{
    double sum, mean = 0, deviation = 0, weight = 0, last = 0;
    const double decay = 0.9999, shown[] = {10, 11, 12, 13, 20}; /* 13 ends an episode */

    look (true, 0, &sum);
    for (size_t i = 0; i < 5; i++) {
        last = shown[i];
        mean = decay * mean + (1 - decay) * (1 + last) / 2;
        deviation = decay * deviation + (1 - decay) * (last - 1) / 2;
        weight = decay * weight + (1 - decay);
    }
    /* At the fourth step game 1, whose episodes are 3 long, has begun its second. */
    double expected = (last - mean / weight) / (deviation / weight + 1e-8);
    cr_expect_float_eq ((double)seen[3], expected, 1e-5 * fabs (expected), "%.9g, by hand %.9g",
                        (double)seen[3], expected);
    look (false, 0, &sum);
    cr_expect_eq (seen[3], 20.0f);
}
