/*
 * Pong for two paddles, the left one played by an opponent: pixels without Python.  Step 0 of a
 * gradient's path.
 *
 * Must never call libm or allocate after creation: + - * / and comparisons of doubles give the
 * same bits on every CPU, and a game is a flat struct with a stream of randomness of its own.
 *
 * Lengths are pixels of Atari Pong's field, rows 34 to 193 of its screen; time is frames of 1/60 s.
 * Sizes, greys, actions, the order of serves and the shape of a game follow the original; the ball
 * is twice as wide, for it would all but vanish in an observation, points are shorter, and the
 * opponent's hits are flatter than the player is fast, so that defending can be learnt first.
 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "env.h"
#include "net.h"
#include "rule_settings.h"

#define FIELD         160.0
#define BALL          4.0 /* width and height */
#define PADDLE_WIDTH  4.0
#define PADDLE_HEIGHT 16.0
#define PADDLE_Y_MAX  (FIELD - PADDLE_HEIGHT)
#define LEFT_X        16.0 /* of the paddles' left edges */
#define RIGHT_X       140.0
#define LEFT_FACE     (LEFT_X + PADDLE_WIDTH)
#define RIGHT_FACE    RIGHT_X
#define REACH         ((PADDLE_HEIGHT + BALL) / 2) /* furthest of two centres that touch */

#define PLAYER_SPEED   2.0 /* pixels a frame */
#define OPPONENT_SPEED 1.0
#define SERVE_X_SPEED  1.5
#define SERVE_Y_SPEED  1.0  /* at most */
#define SERVE_Y_MIN    40.0 /* where a served ball appears */
#define SERVE_Y_MAX    (FIELD - BALL - SERVE_Y_MIN)
#define PAUSE_FRAMES   16 /* before a serve */

/* What a paddle makes of the ball: flat from its middle, fast and steep from its edge. */
#define EDGE_Y_SPEED  3.0
#define OPPONENT_EDGE 1.5  /* its hits are flatter, never too steep for a player who follows */
#define EDGE_X_SPEED  1.0  /* on top of a serve's */
#define RALLY_X_SPEED 0.05 /* on top for each hit of the rally */
#define RALLY_HITS    10   /* that count */

/* The opponent looks up every so often, and aims to hit the ball off its middle by up to AIM. */
#define LOOK_FRAMES 6
#define AIM         6.0

#define SIDE             42 /* of an observation */
#define GREY_BACKGROUND  (87.0 / 255)
#define GREY_LEFT_PADDLE (148.0 / 255)
#define GREY_PADDLE      (147.0 / 255)
#define GREY_BALL        (236.0 / 255)

#define POINTS     21 /* that end a game */
#define FIRST_SEED 1  /* of an environment that is reset without a seed */

/* Of the Arcade Learning Environment; FIRE does nothing here. */
enum { NOOP, FIRE, RIGHT, LEFT, RIGHT_FIRE, LEFT_FIRE, ACTION_COUNT };

enum { OPPONENT, FRAMESKIP, MAX_STEPS, REPEAT, SETTING_COUNT };
static const gq_setting settings[SETTING_COUNT] = {
    [OPPONENT] = {"opponent", OPPONENT_SPEED, 0, 10, NULL, "the opponent's pixels a frame"},
    [FRAMESKIP] = {"frameskip", 4, 1, 60, NULL, "frames a step"},
    [MAX_STEPS] = {"max_steps", 27000, 1, 1e9, NULL, "steps that truncate an episode"},
    [REPEAT] = {"repeat_action_probability", 0, 0, 1, NULL,
                "probability in each frame that the last frame's action is taken again"},
};

typedef struct pong {
    gq_random random;
    gq_pong_state now;
    double opponent_y, aim; /* where its paddle goes; how far off the middle it will hit */
    uint32_t action;        /* of the last frame, what a sticky action repeats */
    int toward;             /* the next serve's direction: -1 left, 1 right */
    unsigned pause, look;   /* frames until the serve, until the opponent looks up */
    unsigned hits;          /* of this rally */
    uint32_t steps;         /* of this episode */
    bool playing;
} pong;

typedef struct pongs {
    gq_env env;
    double opponent, repeat;
    uint32_t frameskip, max_steps;
    uint8_t rgb[(int)FIELD * (int)FIELD * 3]; /* the last picture */
    pong games[];                             /* [count] */
} pongs;

static double
between (pong *game, double low, double high)
{
    return low + (high - low) * gq_random_uniform (&game->random);
}

static double
clamp (double x, double low, double high)
{
    return x < low ? low : x > high ? high : x;
}

/* ---- what is seen ------------------------------------------------------------------------- */

/* Cover a rectangle with a grey: each pixel takes as much of it as the rectangle has of its area,
 * so that motion below a pixel shows. */
static void
draw (float *observation, double x, double y, double width, double height, double grey)
{
    double scale = SIDE / FIELD;
    double left = x * scale, right = (x + width) * scale;
    double top = y * scale, bottom = (y + height) * scale;

    for (int row = (int)top; row < SIDE && row < bottom; row++) {
        double high = (bottom < row + 1 ? bottom : row + 1) - (top > row ? top : row);
        for (int column = (int)left; column < SIDE && column < right; column++) {
            double wide =
                (right < column + 1 ? right : column + 1) - (left > column ? left : column);
            float *pixel = &observation[SIDE * row + column];
            *pixel = (float)(*pixel + (grey - *pixel) * (wide * high));
        }
    }
}

static void
observe (const pong *game, float *observation)
{
    const gq_pong_state *now = &game->now;

    for (int i = 0; i < SIDE * SIDE; i++)
        observation[i] = (float)GREY_BACKGROUND;
    draw (observation, LEFT_X, now->left_y, PADDLE_WIDTH, PADDLE_HEIGHT, GREY_LEFT_PADDLE);
    draw (observation, RIGHT_X, now->right_y, PADDLE_WIDTH, PADDLE_HEIGHT, GREY_PADDLE);
    if (now->in_play)
        draw (observation, now->ball_x, now->ball_y, BALL, BALL, GREY_BALL);
}

/* ---- one frame ---------------------------------------------------------------------------- */

static void
rest (pong *game, int toward)
{
    game->now.in_play = false;
    game->pause = PAUSE_FRAMES;
    game->toward = toward;
}

static void
serve (pong *game)
{
    gq_pong_state *now = &game->now;

    now->in_play = true;
    now->ball_x = (FIELD - BALL) / 2;
    now->ball_y = between (game, SERVE_Y_MIN, SERVE_Y_MAX);
    now->ball_dx = game->toward * SERVE_X_SPEED;
    now->ball_dy = between (game, -SERVE_Y_SPEED, SERVE_Y_SPEED);
    game->aim = between (game, -AIM, AIM);
    game->hits = 0;
}

/* How far below a paddle's middle the ball's middle is. */
static double
offset (const gq_pong_state *now, double paddle_y)
{
    return now->ball_y + BALL / 2 - (paddle_y + PADDLE_HEIGHT / 2);
}

/* Off a paddle whose middle the ball meets at `off` below it, toward -1 or 1. */
static void
bounce (pong *game, double off, int toward)
{
    double edge = off / REACH;
    double rally = RALLY_X_SPEED * (game->hits < RALLY_HITS ? game->hits : RALLY_HITS);

    game->now.ball_dx = toward * (SERVE_X_SPEED + EDGE_X_SPEED * (edge < 0 ? -edge : edge) + rally);
    game->now.ball_dy = (toward > 0 ? OPPONENT_EDGE : EDGE_Y_SPEED) * edge;
    game->hits++;
    if (toward > 0)
        game->aim = between (game, -AIM, AIM);
}

/* A paddle is met where its face is passed, and only there: what has passed is lost. */
static void
meet_paddles (pong *game, double x_before)
{
    gq_pong_state *now = &game->now;
    double left = offset (now, now->left_y), right = offset (now, now->right_y);

    if (x_before >= LEFT_FACE && now->ball_x < LEFT_FACE && left > -REACH && left < REACH) {
        now->ball_x = 2 * LEFT_FACE - now->ball_x;
        bounce (game, left, 1);
    } else if (x_before + BALL <= RIGHT_FACE && now->ball_x + BALL > RIGHT_FACE && right > -REACH &&
               right < REACH) {
        now->ball_x = 2 * (RIGHT_FACE - BALL) - now->ball_x;
        bounce (game, right, -1);
    }
}

/* The reward. */
static int
move_ball (pong *game)
{
    gq_pong_state *now = &game->now;
    double x_before = now->ball_x;

    now->ball_x += now->ball_dx;
    now->ball_y += now->ball_dy;
    if (now->ball_y < 0) {
        now->ball_y = -now->ball_y;
        now->ball_dy = -now->ball_dy;
    } else if (now->ball_y > FIELD - BALL) {
        now->ball_y = 2 * (FIELD - BALL) - now->ball_y;
        now->ball_dy = -now->ball_dy;
    }
    meet_paddles (game, x_before);
    if (now->ball_x < 0) {
        now->right_score++;
        rest (game, -1); /* who lost a point is served to, as in the original */
        return 1;
    }
    if (now->ball_x > FIELD - BALL) {
        now->left_score++;
        rest (game, 1);
        return -1;
    }
    return 0;
}

/* It follows the ball where it saw it last, no faster than its speed: a steep shot outruns it. */
static void
move_opponent (pong *game, double speed)
{
    gq_pong_state *now = &game->now;

    if (game->look == 0) {
        double ball = now->in_play ? now->ball_y + BALL / 2 - game->aim : FIELD / 2;
        game->opponent_y = clamp (ball - PADDLE_HEIGHT / 2, 0, PADDLE_Y_MAX);
        game->look = LOOK_FRAMES;
    }
    game->look--;
    now->left_y = clamp (game->opponent_y, now->left_y - speed, now->left_y + speed);
}

static void
move_player (pong *game)
{
    gq_pong_state *now = &game->now;

    if (game->action == RIGHT || game->action == RIGHT_FIRE)
        now->right_y = clamp (now->right_y - PLAYER_SPEED, 0, PADDLE_Y_MAX);
    else if (game->action == LEFT || game->action == LEFT_FIRE)
        now->right_y = clamp (now->right_y + PLAYER_SPEED, 0, PADDLE_Y_MAX);
}

/* The reward of one frame. */
static int
play_frame (const pongs *self, pong *game, uint32_t action)
{
    if (self->repeat == 0 || gq_random_uniform (&game->random) >= self->repeat)
        game->action = action;
    move_player (game);
    move_opponent (game, self->opponent);
    if (game->now.in_play)
        return move_ball (game);
    if (--game->pause == 0)
        serve (game);
    return 0;
}

/* ---- an environment ----------------------------------------------------------------------- */

static gq_status
reset (gq_env *env, uint32_t index, const uint64_t *seed, float *observation, gq_error *error)
{
    pong *game = &((pongs *)env)->games[index];
    gq_random random = game->random;

    (void)error;
    if (seed != NULL)
        gq_random_seed (&random, *seed);
    *game = (pong){.random = random, .playing = true};
    game->now.left_y = game->now.right_y = PADDLE_Y_MAX / 2;
    rest (game, between (game, -1, 1) < 0 ? -1 : 1);
    observe (game, observation);
    return GQ_OK;
}

static void
step_one (const pongs *self, pong *game, uint32_t action, float *observation,
          gq_env_outcome *outcome)
{
    const gq_pong_state *now = &game->now;
    int reward = 0;

    assert (action < ACTION_COUNT && game->playing);
    *outcome = (gq_env_outcome){0};
    for (uint32_t frame = 0; frame < self->frameskip && !outcome->terminated; frame++) {
        reward += play_frame (self, game, action);
        outcome->terminated = now->left_score == POINTS || now->right_score == POINTS;
    }
    game->steps++;
    outcome->reward = (float)reward;
    outcome->truncated = !outcome->terminated && game->steps >= self->max_steps;
    game->playing = !outcome->terminated && !outcome->truncated;
    observe (game, observation);
}

static gq_status
step (gq_env *env, const uint32_t *actions, float *observations, gq_env_outcome *outcomes,
      gq_error *error)
{
    pongs *self = (pongs *)env;

    (void)error;
    for (uint32_t k = 0; k < env->count; k++)
        step_one (self, &self->games[k], actions[k], observations + k * env->spec.observation_count,
                  &outcomes[k]);
    return GQ_OK;
}

static gq_status
picture (gq_env *env, uint32_t index, gq_picture *seen, gq_error *error)
{
    pongs *self = (pongs *)env;

    (void)error;
    gq_pong_picture (env, index, self->rgb);
    *seen = (gq_picture){.width = (uint32_t)FIELD, .height = (uint32_t)FIELD, .rgb = self->rgb};
    return GQ_OK;
}

static void
destroy (gq_env **env_p)
{
    free (*env_p);
    *env_p = NULL;
}

static const gq_env_ops ops = {
    .destroy = destroy, .reset = reset, .step = step, .picture = picture};

gq_status
gq_pong_create (gq_env **env_p, const gq_env_config *config, gq_error *error)
{
    double values[SETTING_COUNT];

    *env_p = NULL;
    gq_status status = gq_settings_parse (values, settings, SETTING_COUNT, config->sets,
                                          config->set_count, "--env Pong", error);
    if (status != GQ_OK)
        return status;
    if (values[FRAMESKIP] != (uint32_t)values[FRAMESKIP] ||
        values[MAX_STEPS] != (uint32_t)values[MAX_STEPS])
        return gq_fail (error, GQ_INVALID,
                        "--env Pong: settings frameskip and max_steps are whole numbers");
    pongs *self = calloc (1, sizeof *self + config->count * sizeof self->games[0]);
    if (self == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory for %u games of Pong", config->count);
    self->env.ops = &ops;
    self->env.spec = (gq_env_spec){.observation_rank = 3,
                                   .observation_shape = {1, SIDE, SIDE},
                                   .observation_count = SIDE * SIDE,
                                   .action_count = ACTION_COUNT};
    self->env.count = config->count;
    self->opponent = values[OPPONENT];
    self->repeat = values[REPEAT];
    self->frameskip = (uint32_t)values[FRAMESKIP];
    self->max_steps = (uint32_t)values[MAX_STEPS];
    for (uint32_t k = 0; k < config->count; k++)
        gq_random_seed (&self->games[k].random, gq_random_stream (FIRST_SEED, k));
    *env_p = &self->env;
    return GQ_OK;
}

/* ---- looking at a game -------------------------------------------------------------------- */

void
gq_pong_look (const gq_env *env, uint32_t index, gq_pong_state *state)
{
    assert (env->ops == &ops && index < env->count);
    *state = ((const pongs *)env)->games[index].now;
}

static void
paint (uint8_t *rgb, double x, double y, double width, double height, const uint8_t colour[3])
{
    for (int row = 0; row < (int)height; row++)
        for (int column = 0; column < (int)width; column++)
            memcpy (rgb + 3 * ((int)FIELD * ((int)y + row) + (int)x + column), colour, 3);
}

void
gq_pong_picture (const gq_env *env, uint32_t index, uint8_t *rgb)
{
    static const uint8_t background[3] = {144, 72, 17}, left[3] = {213, 130, 74},
                         right[3] = {92, 186, 92}, ball[3] = {236, 236, 236};
    gq_pong_state now;

    gq_pong_look (env, index, &now);
    paint (rgb, 0, 0, FIELD, FIELD, background);
    paint (rgb, LEFT_X, now.left_y, PADDLE_WIDTH, PADDLE_HEIGHT, left);
    paint (rgb, RIGHT_X, now.right_y, PADDLE_WIDTH, PADDLE_HEIGHT, right);
    if (now.in_play)
        paint (rgb, now.ball_x, now.ball_y, BALL, BALL, ball);
}
