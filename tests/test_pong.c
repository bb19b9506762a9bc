/*
 * The built-in Pong: the contract of an environment, its settings, and the rules of the game.
 */
#include <string.h>

#include "pong_testing.h"

/* ---- the contract of an environment ------------------------------------------------------- */

Test (pong, has_the_shape_and_the_actions_of_preprocessed_atari_pong)
{
    gq_env *env = make (3, 0, NULL);
    cr_assert_eq (env->count, 3);
    cr_assert_eq (env->spec.observation_rank, 3);
    cr_assert_eq (env->spec.observation_shape[0], 1);
    cr_assert_eq (env->spec.observation_shape[1], SIDE);
    cr_assert_eq (env->spec.observation_shape[2], SIDE);
    cr_assert_eq (env->spec.observation_count, PIXELS);
    cr_assert_eq (env->spec.action_count, 6);
    gq_env_destroy (&env);
}

/* Every game has a single twin in an object of its own; game 1 starts anew half-way. */
Test (pong, games_repeat_from_their_seeds_and_know_nothing_of_each_other)
{
    enum { COUNT = 3, STEPS = 600 };
    static float many[COUNT * PIXELS], one[PIXELS];
    gq_env *env = make (COUNT, 0, NULL), *twins[COUNT];
    gq_pong_state state;
    gq_random random;

    gq_random_seed (&random, 4);
    for (uint32_t k = 0; k < COUNT; k++) {
        uint64_t seed = 10 + k;
        twins[k] = make_one (NULL);
        reset (env, k, &seed, many + k * PIXELS);
        reset (twins[k], 0, &seed, one);
        cr_assert_arr_eq (one, many + k * PIXELS, sizeof one);
    }
    for (int t = 0; t < STEPS; t++) {
        gq_error error = {""};
        uint32_t actions[COUNT];
        gq_env_outcome outcomes[COUNT];
        for (int k = 0; k < COUNT; k++)
            actions[k] = play_randomly (NULL, &random);
        cr_assert_eq (env->ops->step (env, actions, many, outcomes, &error), GQ_OK);
        for (uint32_t k = 0; k < COUNT; k++) {
            gq_env_outcome outcome = step (twins[k], actions[k], one, &state);
            cr_assert_arr_eq (one, many + k * PIXELS, sizeof one, "game %u, step %d", k, t);
            cr_assert_eq ((int)outcome.reward, (int)outcomes[k].reward);
            cr_assert_eq (ended (&outcome), ended (&outcomes[k]));
            if (ended (&outcome) || (k == 1 && t == STEPS / 2)) {
                reset (env, k, NULL, many + k * PIXELS);
                reset (twins[k], 0, NULL, one);
            }
        }
    }
    for (int k = 0; k < COUNT; k++)
        gq_env_destroy (&twins[k]);
    gq_env_destroy (&env);
}

/* Where the first serve appears tells streams apart. */
static double
first_serve (gq_env *env, uint32_t index, const uint64_t *seed)
{
    static float observation[PIXELS * GQ_ENV_COUNT_MAX];
    static const uint32_t actions[GQ_ENV_COUNT_MAX];
    static gq_env_outcome outcomes[GQ_ENV_COUNT_MAX];
    gq_error error = {""};
    gq_pong_state state;

    reset (env, index, seed, observation);
    for (int t = 0; t < 100; t++) {
        gq_pong_look (env, index, &state);
        if (state.in_play)
            return state.ball_y;
        cr_assert_eq (env->ops->step (env, actions, observation, outcomes, &error), GQ_OK);
    }
    cr_assert_fail ("nothing was served");
    return 0;
}

Test (pong, another_seed_another_episode_and_another_game_are_other_games)
{
    gq_env *env = make (2, 0, NULL), *again = make (2, 0, NULL);
    static float observation[PIXELS];
    uint64_t seed = 7, other = 8;

    for (uint32_t k = 0; k < 2; k++) {
        reset (env, k, NULL, observation);
        reset (again, k, NULL, observation);
    }
    cr_assert_neq (first_serve (env, 0, NULL), first_serve (again, 1, NULL),
                   "both games of an object play the same");
    double first = first_serve (env, 0, &seed), second = first_serve (env, 0, NULL);
    cr_assert_neq (first, second);
    cr_assert_neq (first, first_serve (env, 0, &other));
    cr_assert_eq (first, first_serve (env, 1, &seed));
    gq_env_destroy (&env);
    gq_env_destroy (&again);
}

Test (pong, rewards_are_points_and_the_game_ends_at_21)
{
    static float observation[PIXELS];
    gq_env *env = make_one (NULL);
    uint64_t seed = 5;
    player *players[2] = {play_randomly, hit_with_edge};

    for (int p = 0; p < 2; p++) {
        gq_random random;
        gq_pong_state state;
        gq_env_outcome outcome = {0};
        int sum = 0;
        gq_random_seed (&random, seed);
        reset (env, 0, &seed, observation);
        gq_pong_look (env, 0, &state);
        cr_assert (state.left_score == 0 && state.right_score == 0);
        while (!ended (&outcome)) {
            cr_assert (state.left_score < 21 && state.right_score < 21, "played on after 21");
            outcome = step (env, players[p](&state, &random), observation, &state);
            sum += (int)outcome.reward;
            cr_assert_eq (sum, (int)state.right_score - (int)state.left_score);
        }
        cr_assert (outcome.terminated && !outcome.truncated);
        cr_assert_eq (p == 0 ? state.left_score : state.right_score, 21);
    }
    gq_env_destroy (&env);
}

Test (pong, episode_is_cut_at_max_steps_and_the_next_has_its_full_length)
{
    static float observation[PIXELS];
    gq_env *env = make_one ("max_steps=50");
    gq_pong_state state;

    for (int episode = 0; episode < 3; episode++) {
        reset (env, 0, NULL, observation);
        for (int t = 1; t <= 50; t++) {
            gq_env_outcome outcome = step (env, STAY, observation, &state);
            cr_assert_eq (outcome.truncated, t == 50, "step %d", t);
            cr_assert_not (outcome.terminated);
        }
    }
    gq_env_destroy (&env);
}

static void
refused (const char *set, const char *said)
{
    gq_env_config config = GQ_ENV_CONFIG;
    gq_error error = {""};
    gq_env *env = NULL;
    config.name = "Pong";
    config.sets = &set, config.set_count = 1;
    cr_assert_eq (gq_env_create (&env, &config, &error), GQ_INVALID, "%s", set);
    cr_assert_null (env);
    cr_assert_not_null (strstr (error.text, said), "%s: %s", set, error.text);
}

Test (pong, wrong_settings_are_refused_with_what_would_be_right)
{
    refused ("oponent=1", "did you mean opponent?");
    refused ("colour=red", "frameskip=4");
    refused ("opponent", "key=value");
    refused ("opponent=fast", "takes a number");
    refused ("opponent=-1", "out of bounds: 0 .. 10");
    refused ("opponent=nan", "takes a number");
    refused ("frameskip=0", "out of bounds: 1 .. 60");
    refused ("frameskip=2.5", "whole numbers");
    refused ("max_steps=0", "out of bounds");
    refused ("max_steps=1.5", "whole numbers");
    refused ("repeat_action_probability=1.1", "out of bounds: 0 .. 1");
}

/* ---- the rules ---------------------------------------------------------------------------- */

Test (pong, each_action_moves_the_paddle_as_in_atari_and_the_field_ends)
{
    static const int directions[6] = {0, 0, -1, 1, -1, 1};
    static float observation[PIXELS];
    gq_env *env = make_one ("frameskip=1");
    gq_pong_state state;

    for (uint32_t action = 0; action < 6; action++) {
        reset (env, 0, NULL, observation);
        gq_pong_look (env, 0, &state);
        double before = state.right_y;
        step (env, action, observation, &state);
        cr_assert_eq ((state.right_y > before) - (state.right_y < before), directions[action]);
        for (int t = 0; t < 150; t++)
            step (env, action, observation, &state);
        double end = directions[action] < 0 ? 0 : directions[action] > 0 ? FIELD - PADDLE : before;
        cr_assert_eq (state.right_y, end, "action %u: %g", action, state.right_y);
    }
    gq_env_destroy (&env);
}

Test (pong, one_step_is_frameskip_frames)
{
    static float a[PIXELS], b[PIXELS];
    gq_env *slow = make_one ("frameskip=1"), *fast = make_one ("frameskip=3");
    gq_pong_state one, three;
    gq_random random;
    uint64_t seed = 6;

    gq_random_seed (&random, seed);
    reset (slow, 0, &seed, a);
    reset (fast, 0, &seed, b);
    for (int t = 0; t < 200; t++) {
        uint32_t action = play_randomly (NULL, &random);
        for (int frame = 0; frame < 3; frame++)
            step (slow, action, a, &one);
        step (fast, action, b, &three);
        cr_assert_arr_eq (a, b, sizeof a, "step %d", t);
    }
    gq_env_destroy (&slow);
    gq_env_destroy (&fast);
}

/* Frame by frame: the ball's line folds at the walls, turns at paddles, and stays in sight. */
Test (pong, ball_flies_straight_bounces_off_walls_and_paddles_and_stays_in_the_field)
{
    static float observation[PIXELS];
    gq_env *env = make_one ("frameskip=1");
    double room = FIELD - BALL;
    gq_pong_state before, now = {0};
    gq_env_outcome outcome = {0};
    int walls[2] = {0}, paddles[2] = {0};
    uint64_t seed = 2;

    reset (env, 0, &seed, observation);
    for (int t = 0; t < 20000; t++) {
        before = now;
        if (ended (&outcome))
            reset (env, 0, NULL, observation);
        outcome = step (env, follow_ball (&before, NULL), observation, &now);
        if (!now.in_play || !before.in_play)
            continue;
        cr_assert (now.ball_x >= 0 && now.ball_x <= room && now.ball_y >= 0 && now.ball_y <= room);
        double y = before.ball_y + before.ball_dy;
        cr_assert_float_eq (now.ball_y, y < 0 ? -y : y > room ? 2 * room - y : y, 1e-9);
        if (now.ball_dx * before.ball_dx < 0) {
            bool left = now.ball_dx > 0;
            double paddle = left ? now.left_y : now.right_y;
            paddles[left]++;
            cr_assert (left ? now.ball_x >= 20 : now.ball_x + BALL <= 140);
            cr_assert (now.ball_y < paddle + PADDLE && now.ball_y + BALL > paddle,
                       "turned in the air");
            continue;
        }
        cr_assert_float_eq (now.ball_x, before.ball_x + before.ball_dx, 1e-9);
        cr_assert_float_eq (now.ball_dy, y < 0 || y > room ? -before.ball_dy : before.ball_dy, 0);
        walls[0] += y < 0;
        walls[1] += y > room;
    }
    cr_assert (walls[0] > 10 && walls[1] > 10 && paddles[0] > 10 && paddles[1] > 10);
    gq_env_destroy (&env);
}

typedef struct hit {
    double off, dx, dy; /* of the ball's middle below the paddle's; the ball's speed afterwards */
} hit;

Test (pong, hit_near_the_edge_of_the_paddle_is_steeper_and_faster)
{
    enum { HITS = 200 };
    static float observation[PIXELS];
    static hit hits[HITS];
    gq_env *env = make_one ("frameskip=1");
    gq_pong_state before, now = {0};
    gq_env_outcome outcome = {0};
    int count = 0, edges = 0;

    reset (env, 0, NULL, observation);
    for (int t = 0; t < 200000 && count < HITS; t++) {
        before = now;
        if (ended (&outcome))
            reset (env, 0, NULL, observation);
        outcome = step (env, hit_with_edge (&before, NULL), observation, &now);
        if (now.in_play && before.in_play && before.ball_dx > 0 && now.ball_dx < 0)
            hits[count++] =
                (hit){now.ball_y + BALL / 2 - now.right_y - PADDLE / 2, -now.ball_dx, now.ball_dy};
    }
    cr_assert_eq (count, HITS);
    for (int i = 0; i < HITS; i++)
        for (int j = 0; j < HITS; j++) {
            cr_assert (hits[i].off <= hits[j].off || hits[i].dy > hits[j].dy);
            /* What speeds up with the rally is half of what the edge gives. */
            if (fabs (hits[i].off) > fabs (hits[j].off) + 5.1) {
                cr_assert_gt (hits[i].dx, hits[j].dx);
                edges++;
            }
        }
    cr_assert_gt (edges, 0);
    gq_env_destroy (&env);
}

Test (pong, hits_of_the_opponent_are_flatter_than_the_player_is_fast)
{
    static float observation[PIXELS];
    gq_env *env = make_one ("frameskip=1");
    gq_pong_state before, now = {0};
    gq_env_outcome outcome = {0};
    double steepest[2] = {0}; /* of the opponent, of the player */

    reset (env, 0, NULL, observation);
    for (int t = 0; t < 200000; t++) {
        before = now;
        if (ended (&outcome))
            reset (env, 0, NULL, observation);
        outcome = step (env, hit_with_edge (&before, NULL), observation, &now);
        if (now.in_play && before.in_play && now.ball_dx * before.ball_dx < 0) {
            double *most = &steepest[now.ball_dx < 0];
            *most = fmax (*most, fabs (now.ball_dy));
        }
    }
    cr_assert (steepest[0] > 1 && steepest[0] <= 1.5, "%g", steepest[0]);
    cr_assert (steepest[1] > 2 && steepest[1] <= 3, "%g", steepest[1]);
    gq_env_destroy (&env);
}

Test (pong, first_serves_go_either_way_and_others_to_who_lost_the_point)
{
    static float observation[PIXELS];
    gq_env *env = make_one ("frameskip=1");
    gq_pong_state before, now = {0};
    gq_random random;
    int first[2] = {0}, later[2] = {0};

    gq_random_seed (&random, 3);
    for (int episode = 0; episode < 20; episode++) {
        gq_env_outcome outcome = {0};
        float reward = 0;
        int waited = 0;
        reset (env, 0, NULL, observation);
        gq_pong_look (env, 0, &now);
        while (!ended (&outcome)) {
            before = now;
            outcome = step (env, play_randomly (NULL, &random), observation, &now);
            if (now.in_play && !before.in_play) {
                int right = now.ball_dx > 0;
                (reward == 0 ? first : later)[right]++;
                cr_assert_geq (waited, 8, "served after %d frames", waited);
                if (reward != 0)
                    cr_assert_eq (right, reward < 0);
            }
            waited = now.in_play ? 0 : waited + 1;
            reward = outcome.reward != 0 ? outcome.reward : reward;
        }
    }
    cr_assert (first[0] > 0 && first[1] > 0 && later[0] > 0 && later[1] > 0);
    gq_env_destroy (&env);
}

/* Asks each frame for the direction that was not taken in the last, so that a repeat shows; starts
 * again where an end of the field could hide a move.  How many of frames[1] were repeats. */
static int
count_repeats (const char *set, int *frames)
{
    static float observation[PIXELS];
    const char *sets[] = {"frameskip=1", set};
    gq_env *env = make (1, 2, sets);
    gq_pong_state state;
    int repeats = 0, count = 0;

    for (int episode = 0; episode < *frames / 10; episode++) {
        reset (env, 0, NULL, observation);
        gq_pong_look (env, 0, &state);
        uint32_t taken = STAY;
        for (int t = 0; t < 20; t++, count++) {
            uint32_t asked = taken == UP ? DOWN : UP;
            double y = state.right_y;
            step (env, asked, observation, &state);
            uint32_t took = state.right_y < y ? UP : state.right_y > y ? DOWN : STAY;
            cr_assert (took == asked || took == taken);
            repeats += took != asked;
            taken = took;
        }
    }
    gq_env_destroy (&env);
    *frames = count;
    return repeats;
}

Test (pong, sticky_actions_repeat_each_frame_with_their_probability)
{
    int frames = 20000;
    cr_assert_eq (count_repeats ("repeat_action_probability=0", &frames), 0);
    frames = 20000;
    cr_assert_eq (count_repeats ("repeat_action_probability=1", &frames), frames);
    frames = 20000;
    double p = 0.25,
           rate = count_repeats ("repeat_action_probability=0.25", &frames) / (double)frames;
    /* Five standard errors of a share. */
    cr_assert_float_eq (rate, p, 5 * sqrt (p * (1 - p) / frames), "%g of %d", rate, frames);
}
