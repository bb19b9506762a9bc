/*
 * Several Gymnasium games of one actor, and Atari's.  Without Gymnasium or ale-py in build/venv
 * these tests say so and are skipped.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "actors/env.h"
#include "actors/net.h"

#define PYTHON  "build/venv/bin/python"
#define WAIT_MS 60000 /* longest wait for anything here; fails loudly */

enum { GAMES = 3 };

static void
need (const char *package)
{
    char command[200];
    snprintf (command, sizeof command, PYTHON " -c 'import %s' >/dev/null 2>&1", package);
    if (access (PYTHON, X_OK) != 0 || system (command) != 0)
        cr_skip_test ("no %s in " PYTHON "; `make venv` installs it", package);
}

static gq_env *
make (const char *name, uint32_t count, const char *const *sets, size_t set_count)
{
    gq_env_config config = GQ_ENV_CONFIG;
    gq_env *env = NULL;
    gq_error error = {""};
    config.name = name;
    config.count = count;
    config.sets = sets, config.set_count = set_count;
    config.python = PYTHON;
    config.start_timeout_ms = config.step_timeout_ms = WAIT_MS;
    cr_assert_eq (gq_env_create (&env, &config, &error), GQ_OK, "%s", error.text);
    return env;
}

static float *
grab (size_t count)
{
    float *floats = calloc (count, sizeof *floats);
    cr_assert_not_null (floats);
    return floats;
}

static void
reset (gq_env *env, uint32_t k, const uint64_t *seed, float *observation)
{
    gq_error error = {""};
    cr_assert_eq (env->ops->reset (env, k, seed, observation, &error), GQ_OK, "%s", error.text);
}

static void
step (gq_env *env, const uint32_t *actions, float *observations, gq_env_outcome *outcomes)
{
    gq_error error = {""};
    cr_assert_eq (env->ops->step (env, actions, observations, outcomes, &error), GQ_OK, "%s",
                  error.text);
}

/* GAMES games of one object beside as many objects of one game, with the same seeds and actions. */
static void
play_side_by_side (const char *name, size_t steps, const char *const *sets, size_t set_count)
{
    gq_env *all = make (name, GAMES, sets, set_count), *each[GAMES];
    const size_t n = (size_t)all->spec.observation_count, bytes = n * sizeof (float);
    float *observations = grab (GAMES * n), *own = grab (n);
    gq_random random;

    printf ("seed 5\n");
    gq_random_seed (&random, 5);
    cr_assert_eq (all->count, GAMES);
    for (uint32_t k = 0; k < GAMES; k++) {
        uint64_t seed = 100 + k;
        each[k] = make (name, 1, sets, set_count);
        reset (all, k, &seed, observations + k * n);
        reset (each[k], 0, &seed, own);
        cr_assert_arr_eq (observations + k * n, own, bytes, "game %u begins differently", k);
    }
    for (size_t t = 0; t < steps; t++) {
        uint32_t actions[GAMES];
        gq_env_outcome outcomes[GAMES], outcome;
        for (uint32_t k = 0; k < GAMES; k++)
            actions[k] = (uint32_t)(gq_random_next (&random) % all->spec.action_count);
        step (all, actions, observations, outcomes);
        for (uint32_t k = 0; k < GAMES; k++) {
            step (each[k], &actions[k], own, &outcome);
            cr_assert_arr_eq (observations + k * n, own, bytes, "step %zu, game %u", t, k);
            cr_assert_eq (outcomes[k].reward, outcome.reward, "step %zu, game %u", t, k);
            cr_assert_eq (outcomes[k].terminated, outcome.terminated, "step %zu, game %u", t, k);
            if (outcome.terminated || outcome.truncated) {
                reset (all, k, NULL, observations + k * n);
                reset (each[k], 0, NULL, own);
                cr_assert_arr_eq (observations + k * n, own, bytes, "reset after step %zu", t);
            }
        }
    }
    for (uint32_t k = 0; k < GAMES; k++)
        gq_env_destroy (&each[k]);
    gq_env_destroy (&all);
    free (observations), free (own);
}

Test (gym_games, several_in_one_child_play_as_several_children_do)
{
    need ("gymnasium");
    play_side_by_side ("gym:CartPole-v1", 200, NULL, 0);
}

Test (gym_games, ataris_too)
{
    static const char *const sets[] = {"repeat_action_probability=0"};
    need ("ale_py");
    play_side_by_side ("gym:ALE/Pong-v5", 100, sets, 1);
}

Test (gym_games, atari_screens_are_reduced_unless_another_view_is_asked_for)
{
    static const char *const grey[] = {"obs_type=grayscale"};
    uint64_t seed = 1;
    need ("ale_py");
    gq_env *reduced = make ("gym:ALE/Pong-v5", 1, NULL, 0);
    gq_env *whole = make ("gym:ALE/Pong-v5", 1, grey, 1);
    const uint64_t *shape = reduced->spec.observation_shape;
    cr_assert_eq (reduced->spec.observation_rank, 3);
    cr_assert (shape[0] == 1 && shape[1] == 42 && shape[2] == 42);
    cr_assert_eq (reduced->spec.action_count, 6);
    shape = whole->spec.observation_shape;
    cr_assert_eq (whole->spec.observation_rank, 3);
    cr_assert (shape[0] == 1 && shape[1] == 210 && shape[2] == 160);

    /* The mean of the reduced picture is that of the field, rows 34 to 193. */
    float small[42 * 42], *large = grab (210 * 160);
    double sums[2] = {0, 0};
    reset (reduced, 0, &seed, small);
    reset (whole, 0, &seed, large);
    for (size_t i = 0; i < 42 * 42; i++)
        sums[0] += (double)small[i] / (42 * 42);
    for (size_t i = 34 * 160; i < 194 * 160; i++)
        sums[1] += (double)large[i] / (160 * 160);
    cr_expect_float_eq (sums[0], sums[1], 0.005, "%.6g, whole %.6g", sums[0], sums[1]);
    cr_expect_gt (sums[0], 0.1);
    gq_env_destroy (&reduced);
    gq_env_destroy (&whole);
    free (large);
}

/* Breakout has five lives: with them as episodes, play goes on where it was. */
Test (gym_games, a_lost_life_ends_an_episode_when_asked_for)
{
    static const char *const sets[] = {"terminal_on_life_loss=true", "repeat_action_probability=0"};
    uint64_t seed = 3;
    uint32_t ended[2] = {0, 0};
    need ("ale_py");
    for (size_t by_life = 0; by_life < 2; by_life++) {
        gq_env *env = make ("gym:ALE/Breakout-v5", 1, by_life ? sets : sets + 1, 1 + by_life);
        float *observation = grab ((size_t)env->spec.observation_count);
        gq_env_outcome outcome;
        reset (env, 0, &seed, observation);
        for (uint32_t t = 0; t < 600; t++) {
            uint32_t fire = t % 2; /* FIRE serves; the paddle stays where it is */
            step (env, &fire, observation, &outcome);
            if (outcome.terminated) {
                ended[by_life]++;
                reset (env, 0, NULL, observation);
            }
        }
        gq_env_destroy (&env);
        free (observation);
    }
    cr_expect_geq (ended[0], 1u);
    cr_expect_geq (ended[1], 4 * ended[0], "%u episodes by life, %u games", ended[1], ended[0]);
}
