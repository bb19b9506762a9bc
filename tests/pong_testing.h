/*
 * What the suites of Pong share: one game behind short names, and players to play it.  Never fails
 * quietly.
 */
#ifndef GQ_PONG_TESTING_H
#define GQ_PONG_TESTING_H

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>

#include "actors/env.h"
#include "actors/net.h"

#define FIELD  160.0
#define BALL   4.0
#define PADDLE 16.0
#define SIDE   42
#define PIXELS (SIDE * SIDE)

enum { STAY = 0, UP = 2, DOWN = 3 };

static inline gq_env *
make (uint32_t count, size_t set_count, const char *const *sets)
{
    gq_env_config config = GQ_ENV_CONFIG;
    gq_error error = {""};
    gq_env *env = NULL;
    config.name = "Pong";
    config.count = count;
    config.sets = sets, config.set_count = set_count;
    cr_assert_eq (gq_env_create (&env, &config, &error), GQ_OK, "%s", error.text);
    return env;
}

static inline gq_env *
make_one (const char *set)
{
    return make (1, set != NULL, &set);
}

static inline void
reset (gq_env *env, uint32_t index, const uint64_t *seed, float *observation)
{
    gq_error error = {""};
    if (seed != NULL)
        printf ("seed %llu\n", (unsigned long long)*seed);
    cr_assert_eq (env->ops->reset (env, index, seed, observation, &error), GQ_OK);
}

/* One step of the only game, and what it looks like then. */
static inline gq_env_outcome
step (gq_env *env, uint32_t action, float *observation, gq_pong_state *state)
{
    gq_error error = {""};
    gq_env_outcome outcome;
    cr_assert_eq (env->ops->step (env, &action, observation, &outcome, &error), GQ_OK);
    gq_pong_look (env, 0, state);
    return outcome;
}

static inline bool
ended (const gq_env_outcome *outcome)
{
    return outcome->terminated || outcome->truncated;
}

/* ---- players ------------------------------------------------------------------------------ */

typedef uint32_t player (const gq_pong_state *state, gq_random *random);

static inline uint32_t
play_randomly (const gq_pong_state *state, gq_random *random)
{
    (void)state;
    return (uint32_t)(gq_random_next (random) % 6);
}

/* Brings the paddle's middle to `y`. */
static inline uint32_t
go (const gq_pong_state *state, double y)
{
    double middle = state->right_y + PADDLE / 2;
    return y < middle - 4 ? UP : y > middle + 4 ? DOWN : STAY;
}

static inline uint32_t
follow_ball (const gq_pong_state *state, gq_random *random)
{
    (void)random;
    return state->in_play ? go (state, state->ball_y + BALL / 2) : STAY;
}

/* Waits where the ball will come, and meets it with the edge that sends it away from the opponent.
 * The walls fold the ball's straight line into the field. */
static inline uint32_t
hit_with_edge (const gq_pong_state *state, gq_random *random)
{
    double room = FIELD - BALL, x = 140 - BALL;

    (void)random;
    if (!state->in_play || state->ball_dx < 0 || state->ball_x > x)
        return go (state, FIELD / 2);
    double y = state->ball_y + state->ball_dy * (x - state->ball_x) / state->ball_dx;
    y = fabs (fmod (y, 2 * room));
    y = (y > room ? 2 * room - y : y) + BALL / 2;
    return go (state, state->left_y + PADDLE / 2 < FIELD / 2 ? y - 5.5 : y + 5.5);
}

#endif
