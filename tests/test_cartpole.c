/*
 * The built-in CartPole against episodes recorded from Gymnasium's CartPole-v1
 * (tests/record_cartpole.py), and against its own contract.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "actors/env.h"
#include "safetensors.h"

#define RECORDING "tests/data/cartpole/episodes.safetensors"

typedef struct recording {
    gq_safetensors *file;
    size_t episodes, steps; /* E, N */
    double *start;          /* (E, 4) */
    int32_t *length;        /* (E) */
    int32_t *actions;       /* (N) */
    float *observations;    /* (N, 4) */
    double *states;         /* (N, 4) */
    float *rewards;         /* (N) */
    uint8_t *terminated, *truncated;
} recording;

static void *
column (const recording *r, const char *name, gq_dtype dtype, size_t count, size_t size)
{
    gq_error error = {""};
    void *data = calloc (count, size);
    cr_assert_not_null (data);
    cr_assert_eq (gq_safetensors_copy (r->file, name, dtype, count, data, &error), GQ_OK, "%s",
                  error.text);
    return data;
}

static recording
load (void)
{
    recording r = {0};
    gq_error error = {""};
    cr_assert_eq (gq_safetensors_read (&r.file, RECORDING, &error), GQ_OK, "%s", error.text);
    r.episodes = gq_safetensors_find (r.file, "length")->element_count;
    r.steps = gq_safetensors_find (r.file, "actions")->element_count;
    r.start = column (&r, "start", GQ_DTYPE_F64, 4 * r.episodes, sizeof (double));
    r.length = column (&r, "length", GQ_DTYPE_I32, r.episodes, sizeof (int32_t));
    r.actions = column (&r, "actions", GQ_DTYPE_I32, r.steps, sizeof (int32_t));
    r.observations = column (&r, "observations", GQ_DTYPE_F32, 4 * r.steps, sizeof (float));
    r.states = column (&r, "states", GQ_DTYPE_F64, 4 * r.steps, sizeof (double));
    r.rewards = column (&r, "rewards", GQ_DTYPE_F32, r.steps, sizeof (float));
    r.terminated = column (&r, "terminated", GQ_DTYPE_U8, r.steps, 1);
    r.truncated = column (&r, "truncated", GQ_DTYPE_U8, r.steps, 1);
    return r;
}

static void
unload (recording *r)
{
    gq_safetensors_free (&r->file);
    free (r->start), free (r->length), free (r->actions), free (r->observations);
    free (r->states), free (r->rewards), free (r->terminated), free (r->truncated);
}

static gq_env *
make (void)
{
    gq_env_config config = GQ_ENV_CONFIG;
    gq_error error = {""};
    gq_env *env = NULL;
    cr_assert_eq (gq_env_create (&env, &config, &error), GQ_OK, "%s", error.text);
    return env;
}

Test (cartpole, recording_has_1000_steps_falls_both_edges_and_a_time_limit)
{
    recording r = load ();
    size_t left = 0, right = 0, falls = 0, limits = 0, step = 0;

    for (size_t e = 0; e < r.episodes; e++) {
        step += (size_t)r.length[e];
        double x = r.states[4 * (step - 1)];
        left += r.terminated[step - 1] && x < -2.4;
        right += r.terminated[step - 1] && x > 2.4;
        falls += r.terminated[step - 1] && fabs (x) < 2.4;
        limits += r.truncated[step - 1] && r.length[e] == 500;
    }
    cr_assert_eq (step, r.steps);
    cr_assert (r.steps >= 1000 && left > 0 && right > 0 && falls > 0 && limits > 0,
               "%zu steps, %zu left, %zu right, %zu falls, %zu limits", r.steps, left, right, falls,
               limits);
    unload (&r);
}

Test (cartpole, observations_equal_recorded_ones_of_gymnasium_bit_for_bit)
{
    recording r = load ();
    gq_env *env = make ();
    gq_error error;
    size_t i = 0;

    for (size_t e = 0; e < r.episodes; e++) {
        gq_cartpole_set_state (env, r.start + 4 * e);
        for (int32_t t = 0; t < r.length[e]; t++, i++) {
            float observation[4];
            double state[4];
            gq_env_outcome outcome;
            cr_assert_eq (env->ops->step (env, &(uint32_t){(uint32_t)r.actions[i]}, observation,
                                          &outcome, &error),
                          GQ_OK);
            gq_cartpole_state (env, state);
            cr_assert_arr_eq (observation, r.observations + 4 * i, sizeof observation,
                              "episode %zu step %d: observation differs", e, t);
            cr_assert_eq (outcome.terminated, r.terminated[i] != 0, "episode %zu step %d", e, t);
            cr_assert_eq (outcome.truncated, r.truncated[i] != 0, "episode %zu step %d", e, t);
            cr_assert_eq ((double)outcome.reward, (double)r.rewards[i]);
            /* In double not bit for bit: numpy's sine and cosine and this C library's may differ
             * in the last place, 1e-16, and the dynamics of 500 steps amplify that. */
            for (int k = 0; k < 4; k++)
                cr_assert_float_eq (state[k], r.states[4 * i + (size_t)k], 1e-12,
                                    "episode %zu step %d component %d: %.17g is not %.17g", e, t, k,
                                    state[k], r.states[4 * i + (size_t)k]);
        }
    }
    cr_assert_eq (i, r.steps);
    env->ops->destroy (&env);
    unload (&r);
}

Test (cartpole, same_seed_gives_same_starts_and_another_seed_others)
{
    gq_env *one = make (), *two = make ();
    gq_error error;
    float a[4], b[4];
    uint64_t seed = 7, other = 8;

    cr_assert_eq (one->ops->reset (one, 0, &seed, a, &error), GQ_OK);
    cr_assert_eq (two->ops->reset (two, 0, &seed, b, &error), GQ_OK);
    cr_assert_arr_eq (a, b, sizeof a);
    cr_assert_eq (one->ops->reset (one, 0, NULL, a, &error), GQ_OK);
    cr_assert_arr_neq (a, b, sizeof a, "the second start repeats the first");
    cr_assert_eq (two->ops->reset (two, 0, NULL, b, &error), GQ_OK);
    cr_assert_arr_eq (a, b, sizeof a);
    cr_assert_eq (two->ops->reset (two, 0, &other, b, &error), GQ_OK);
    cr_assert_arr_neq (a, b, sizeof a);
    one->ops->destroy (&one);
    two->ops->destroy (&two);
}

Test (cartpole, starts_fill_the_range_of_0_05_evenly)
{
    enum { COUNT = 10000 };
    gq_env *env = make ();
    gq_error error;
    uint64_t seed = 3;
    double sum[4] = {0}, square[4] = {0};

    printf ("seed %llu\n", (unsigned long long)seed);
    for (int i = 0; i < COUNT; i++) {
        float x[4];
        cr_assert_eq (env->ops->reset (env, 0, i == 0 ? &seed : NULL, x, &error), GQ_OK);
        for (int k = 0; k < 4; k++) {
            cr_assert (fabsf (x[k]) <= 0.05f, "%g", (double)x[k]);
            sum[k] += (double)x[k];
            square[k] += (double)x[k] * (double)x[k];
        }
    }
    /* Mean 0 and variance w^2 / 12 of the uniform law of width w = 0.1; five standard errors. */
    double variance = 0.01 / 12;
    for (int k = 0; k < 4; k++) {
        cr_assert_float_eq (sum[k] / COUNT, 0, 5 * sqrt (variance / COUNT));
        cr_assert_float_eq (square[k] / COUNT, variance, 5 * sqrt (0.8 / COUNT) * variance);
    }
    env->ops->destroy (&env);
}

Test (cartpole, refuses_arguments_and_names_the_environment_that_takes_them)
{
    const char *sets[] = {"sutton_barto_reward=true"};
    gq_env_config config = GQ_ENV_CONFIG;
    gq_error error = {""};
    gq_env *env = NULL;

    config.sets = sets, config.set_count = 1;
    cr_assert_eq (gq_env_create (&env, &config, &error), GQ_INVALID);
    cr_assert_null (env);
    cr_assert_not_null (strstr (error.text, "gym:CartPole-v1"), "%s", error.text);
}

Test (cartpole, unknown_environment_is_refused_with_the_names_there_are)
{
    static const char *const names[] = {"CartPole-v0", "", "gym:", "Gym:CartPole-v1"};

    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        gq_env_config config = GQ_ENV_CONFIG;
        gq_error error = {""};
        gq_env *env = NULL;
        config.name = names[i];
        cr_assert_eq (gq_env_create (&env, &config, &error), GQ_INVALID, "%s", names[i]);
        cr_assert_not_null (strstr (error.text, "CartPole-v1"), "%s", error.text);
    }
}
