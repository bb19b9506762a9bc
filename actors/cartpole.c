/*
 * CartPole-v1, equal to Gymnasium's step for step.  Step 0 of a gradient's path.
 *
 * Must never regroup an expression: the arithmetic follows
 * gymnasium/envs/classic_control/cartpole.py operation by operation in double (explicit Euler), and
 * only the observation is rounded to float32.  The time limit of 500 steps is that of Gymnasium's
 * TimeLimit wrapper.  tests/test_cartpole.c holds it to recorded trajectories.
 */
#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "env.h"
#include "net.h"

#define GRAVITY       9.8
#define MASS_CART     1.0
#define MASS_POLE     0.1
#define TOTAL_MASS    (MASS_POLE + MASS_CART)
#define LENGTH        0.5 /* half the pole's, in m */
#define POLE_MOMENT   (MASS_POLE * LENGTH)
#define FORCE         10.0
#define STEP_S        0.02
#define X_LIMIT       2.4
#define THETA_LIMIT   (12 * 2 * 3.141592653589793 / 360)
#define RESET_LIMIT   0.05
#define EPISODE_STEPS 500
#define FIRST_SEED    1 /* of an environment that is reset without a seed */

/* A picture: the track from -X_LIMIT to X_LIMIT, cart and pole to scale. */
#define PICTURE_WIDTH  192
#define PICTURE_HEIGHT 96
#define PIXELS_PER_M   (PICTURE_WIDTH / (2 * X_LIMIT))
#define TRACK_Y        80.0
#define CART_WIDTH     20.0
#define CART_HEIGHT    12.0
#define POLE_WIDTH     4.0

typedef struct cartpole {
    gq_random random;
    double x, x_dot, theta, theta_dot;
    unsigned steps; /* of this episode */
    bool playing;
} cartpole;

typedef struct cartpoles {
    gq_env env;
    cartpole *poles;                                 /* [count] */
    uint8_t rgb[PICTURE_HEIGHT * PICTURE_WIDTH * 3]; /* the last picture */
} cartpoles;

static void
observe (const cartpole *pole, float *observation)
{
    observation[0] = (float)pole->x;
    observation[1] = (float)pole->x_dot;
    observation[2] = (float)pole->theta;
    observation[3] = (float)pole->theta_dot;
}

static void
begin (cartpole *pole, const double state[4])
{
    pole->x = state[0];
    pole->x_dot = state[1];
    pole->theta = state[2];
    pole->theta_dot = state[3];
    pole->steps = 0;
    pole->playing = true;
}

static gq_status
reset (gq_env *env, uint32_t index, const uint64_t *seed, float *observation, gq_error *error)
{
    cartpole *pole = &((cartpoles *)env)->poles[index];
    double state[4];

    (void)error;
    if (seed != NULL)
        gq_random_seed (&pole->random, *seed);
    for (int i = 0; i < 4; i++)
        state[i] = -RESET_LIMIT + 2 * RESET_LIMIT * gq_random_uniform (&pole->random);
    begin (pole, state);
    observe (pole, observation);
    return GQ_OK;
}

static void
step_one (cartpole *pole, uint32_t action, float *observation, gq_env_outcome *outcome)
{
    assert (action < 2 && pole->playing);
    double force = action == 1 ? FORCE : -FORCE;
    double cosine = cos (pole->theta), sine = sin (pole->theta);
    double temp = (force + POLE_MOMENT * (pole->theta_dot * pole->theta_dot) * sine) / TOTAL_MASS;
    double theta_acc = (GRAVITY * sine - cosine * temp) /
                       (LENGTH * (4.0 / 3.0 - MASS_POLE * (cosine * cosine) / TOTAL_MASS));
    double x_acc = temp - POLE_MOMENT * theta_acc * cosine / TOTAL_MASS;

    pole->x = pole->x + STEP_S * pole->x_dot;
    pole->x_dot = pole->x_dot + STEP_S * x_acc;
    pole->theta = pole->theta + STEP_S * pole->theta_dot;
    pole->theta_dot = pole->theta_dot + STEP_S * theta_acc;
    pole->steps++;

    observe (pole, observation);
    outcome->reward = 1;
    outcome->terminated = pole->x < -X_LIMIT || pole->x > X_LIMIT || pole->theta < -THETA_LIMIT ||
                          pole->theta > THETA_LIMIT;
    outcome->truncated = pole->steps >= EPISODE_STEPS;
    pole->playing = !outcome->terminated && !outcome->truncated;
}

static gq_status
step (gq_env *env, const uint32_t *actions, float *observations, gq_env_outcome *outcomes,
      gq_error *error)
{
    (void)error;
    for (uint32_t k = 0; k < env->count; k++)
        step_one (&((cartpoles *)env)->poles[k], actions[k],
                  observations + k * env->spec.observation_count, &outcomes[k]);
    return GQ_OK;
}

/* The colour of the pixel whose middle is (x, y), for a pole at an angle of this sine and cosine.
 * The pole turns about the middle of the cart's upper edge; `along` and `beside` are the pixel's
 * place in the pole's own axes. */
static const uint8_t *
colour_at (double cart_x, double sine, double cosine, double x, double y)
{
    static const uint8_t wood[3] = {202, 152, 101}, black[3] = {0}, white[3] = {255, 255, 255};
    double dx = x - (PICTURE_WIDTH / 2.0 + PIXELS_PER_M * cart_x), dy = TRACK_Y - CART_HEIGHT - y;
    double along = dx * sine + dy * cosine, beside = dx * cosine - dy * sine;

    if (along >= 0 && along < 2 * LENGTH * PIXELS_PER_M && fabs (beside) < POLE_WIDTH / 2)
        return wood;
    if (fabs (dx) < CART_WIDTH / 2 && dy < 0 && y < TRACK_Y)
        return black;
    return y > TRACK_Y && y < TRACK_Y + 1 ? black : white;
}

static gq_status
picture (gq_env *env, uint32_t index, gq_picture *seen, gq_error *error)
{
    cartpoles *self = (cartpoles *)env;
    const cartpole *pole = &self->poles[index];
    double sine = sin (pole->theta), cosine = cos (pole->theta);
    uint8_t *next = self->rgb;

    (void)error;
    for (int row = 0; row < PICTURE_HEIGHT; row++)
        for (int column = 0; column < PICTURE_WIDTH; column++, next += 3)
            memcpy (next, colour_at (pole->x, sine, cosine, column + 0.5, row + 0.5), 3);
    *seen = (gq_picture){.width = PICTURE_WIDTH, .height = PICTURE_HEIGHT, .rgb = self->rgb};
    return GQ_OK;
}

static void
destroy (gq_env **env_p)
{
    free (((cartpoles *)*env_p)->poles);
    free (*env_p);
    *env_p = NULL;
}

static const gq_env_ops ops = {
    .destroy = destroy, .reset = reset, .step = step, .picture = picture};

gq_status
gq_cartpole_create (gq_env **env_p, const gq_env_config *config, gq_error *error)
{
    *env_p = NULL;
    if (config->set_count > 0)
        return gq_fail (error, GQ_INVALID,
                        "--env-set %s: the built-in CartPole-v1 takes no arguments; "
                        "gym:CartPole-v1 takes Gymnasium's",
                        config->sets[0]);
    cartpoles *self = calloc (1, sizeof *self);
    cartpole *poles = calloc (config->count, sizeof *poles);
    if (self == NULL || poles == NULL) {
        free (self), free (poles);
        return gq_fail (error, GQ_MEMORY, "out of memory for CartPole-v1");
    }
    self->env.ops = &ops;
    self->env.spec = (gq_env_spec){
        .observation_rank = 1, .observation_shape = {4}, .observation_count = 4, .action_count = 2};
    self->env.count = config->count;
    self->poles = poles;
    for (uint32_t k = 0; k < config->count; k++)
        gq_random_seed (&poles[k].random, gq_random_stream (FIRST_SEED, k));
    *env_p = &self->env;
    return GQ_OK;
}

void
gq_cartpole_set_state (gq_env *env, const double state[4])
{
    assert (env->ops == &ops);
    begin (((cartpoles *)env)->poles, state);
}

void
gq_cartpole_state (const gq_env *env, double state[4])
{
    const cartpole *pole = ((const cartpoles *)env)->poles;

    assert (env->ops == &ops);
    state[0] = pole->x;
    state[1] = pole->x_dot;
    state[2] = pole->theta;
    state[3] = pole->theta_dot;
}
