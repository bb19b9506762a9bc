/*
 * What a player of the built-in Pong sees, and that its opponent is worth beating and can be
 * beaten.
 */
#include "pong_testing.h"

/* ---- what is seen ------------------------------------------------------------------------- */

/* How much of [at, at + size] lies in pixel `i` of a side, as a share of the pixel. */
static double
share (int i, double at, double size)
{
    double low = fmax (at * SIDE / FIELD, i), high = fmin ((at + size) * SIDE / FIELD, i + 1);
    return fmax (high - low, 0);
}

/* Atari's greys: background 87, paddles 148 and 147, ball 236 of 255. */
static double
expected_pixel (const gq_pong_state *state, int row, int column)
{
    double left = share (row, state->left_y, PADDLE) * share (column, 16, 4);
    double right = share (row, state->right_y, PADDLE) * share (column, 140, 4);
    double ball = share (row, state->ball_y, BALL) * share (column, state->ball_x, BALL);
    return (87 + (148 - 87) * left + (147 - 87) * right +
            (state->in_play ? (236 - 87) * ball : 0)) /
           255;
}

/* The ball passes beside a paddle, or over it when it is lost. */
static bool
overlaps (const gq_pong_state *state)
{
    double x = state->ball_x + BALL / 2;
    return state->in_play && (x < 20 + 2 * BALL || x > 140 - 2 * BALL);
}

Test (pong, objects_are_seen_by_the_exact_area_that_they_cover)
{
    static float observation[PIXELS];
    gq_env *env = make_one ("frameskip=1");
    gq_pong_state state = {0};
    gq_env_outcome outcome = {.truncated = true};
    int with_ball = 0, without = 0;

    for (int t = 0; t < 3000; t++) {
        if (ended (&outcome))
            reset (env, 0, NULL, observation);
        outcome = step (env, follow_ball (&state, NULL), observation, &state);
        double above = 0;
        for (int i = 0; i < PIXELS; i++) {
            cr_assert (observation[i] >= 0 && observation[i] <= 1);
            above += (double)observation[i] - 87.0 / 255;
            if (!overlaps (&state))
                cr_assert_float_eq ((double)observation[i],
                                    expected_pixel (&state, i / SIDE, i % SIDE), 1e-6,
                                    "frame %d, row %d, column %d", t, i / SIDE, i % SIDE);
        }
        if (overlaps (&state))
            continue;
        /* Square pixels of the field, whatever falls where; the ball never vanishes. */
        double area = above * 255 * (FIELD / SIDE) * (FIELD / SIDE);
        cr_assert_float_eq (area, 64 * 61 + 64 * 60 + (state.in_play ? 16 * 149 : 0), 1,
                            "frame %d: %g", t, area);
        with_ball += state.in_play;
        without += !state.in_play;
    }
    cr_assert (with_ball > 100 && without > 10);
    gq_env_destroy (&env);
}

static int
count_colour (const uint8_t *rgb, uint8_t red)
{
    int count = 0;
    for (int i = 0; i < 160 * 160; i++)
        count += rgb[3 * i] == red;
    return count;
}

Test (pong, picture_shows_two_paddles_and_the_ball_in_their_colours)
{
    static float observation[PIXELS];
    static uint8_t rgb[160 * 160 * 3 + 1];
    gq_env *env = make_one ("frameskip=1");
    gq_pong_state state = {0};

    reset (env, 0, NULL, observation);
    rgb[sizeof rgb - 1] = 77;
    for (int t = 0; t < 400; t++) {
        gq_env_outcome outcome = step (env, STAY, observation, &state);
        cr_assert_not (ended (&outcome));
        gq_pong_picture (env, 0, rgb);
        cr_assert_eq (rgb[sizeof rgb - 1], 77, "painted beyond the picture");
        if (overlaps (&state))
            continue;
        int ball = state.in_play ? 16 : 0;
        cr_assert_eq (count_colour (rgb, 213), 64);
        cr_assert_eq (count_colour (rgb, 92), 64);
        cr_assert_eq (count_colour (rgb, 236), ball);
        cr_assert_eq (count_colour (rgb, 144), 160 * 160 - 128 - ball);
        int at = 3 * (160 * ((int)state.right_y + 8) + 141);
        cr_assert_eq (rgb[at], 92, "the player's paddle is elsewhere");
    }
    gq_env_destroy (&env);
}

/* ---- an opponent worth beating ------------------------------------------------------------ */

/* Mean return. */
static double
mean_return (player *play, const char *set, int episodes, uint64_t seed)
{
    static float observation[PIXELS];
    gq_env *env = make_one (set);
    gq_random random;
    double sum = 0;

    gq_random_seed (&random, seed);
    for (int e = 0; e < episodes; e++) {
        gq_pong_state state;
        gq_env_outcome outcome = {0};
        reset (env, 0, e == 0 ? &seed : NULL, observation);
        gq_pong_look (env, 0, &state);
        while (!ended (&outcome)) {
            outcome = step (env, play (&state, &random), observation, &state);
            sum += (double)outcome.reward;
        }
    }
    gq_env_destroy (&env);
    return sum / episodes;
}

/* Margins of these tests are over five standard errors of a mean over GAMES. */
#define GAMES 400

Test (pong, random_player_loses_nearly_every_point)
{
    double mean = mean_return (play_randomly, NULL, GAMES, 11);
    cr_assert_leq (mean, -17.5, "%g", mean);
}

/* One step in five at random. */
static uint32_t
follow_carelessly (const gq_pong_state *state, gq_random *random)
{
    return gq_random_uniform (random) < 0.2 ? play_randomly (state, random)
                                            : follow_ball (state, random);
}

Test (pong, following_the_ball_solves_the_game_and_doing_it_carelessly_does_not)
{
    double mean = mean_return (follow_ball, NULL, GAMES, 12);
    cr_assert_geq (mean, 20, "%g", mean);
    mean = mean_return (follow_carelessly, NULL, GAMES, 12);
    cr_assert (mean > 10 && mean < 17, "%g", mean);
}

Test (pong, hitting_with_the_edge_solves_the_game)
{
    double mean = mean_return (hit_with_edge, NULL, GAMES, 13);
    cr_assert_geq (mean, 19, "%g", mean);
}

Test (pong, slow_opponent_is_easier)
{
    double mean = mean_return (follow_carelessly, "opponent=0.5", GAMES, 14);
    cr_assert_geq (mean, 17, "%g", mean); /* see above: less against the default */
}
