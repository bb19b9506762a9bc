/*
 * Environments: what an actor plays.  Step 0 of a gradient's path.
 *
 * One object plays `count` games of a kind side by side, so that a net can act on all of them at
 * once.  It is one flat struct behind a table of functions, and belongs to one thread.  Create it
 * before the first ZeroMQ call of the process: the Gymnasium bridge forks.
 */
#ifndef GQ_ENV_H
#define GQ_ENV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gradq/limits.h"
#include "gradq/status.h"

/* Most actions of a discrete action space: language-sized spaces need another policy head. */
#define GQ_ENV_ACTIONS_MAX 65536
/* Most floats of one observation: a 2048 x 2048 RGBA frame. */
#define GQ_ENV_OBSERVATION_MAX ((uint64_t)1 << 24)

/* Most pixels of a side of a picture. */
#define GQ_PICTURE_SIDE_MAX 4096

/* Most games of one object. */
#define GQ_ENV_COUNT_MAX 256

typedef struct gq_env gq_env;

typedef struct gq_env_config {
    const char *name;        /* "CartPole-v1", "Pong" or "gym:ID" */
    uint32_t count;          /* games, 1 to GQ_ENV_COUNT_MAX */
    const char *const *sets; /* [set_count] "key=value" for the environment's constructor */
    size_t set_count;
    bool pictures;        /* some will be asked for: gym:ID must be told before it begins */
    const char *python;   /* interpreter for gym:ID; NULL: build/venv beside the program, python3 */
    int start_timeout_ms; /* longest wait for the interpreter to have made the environment */
    int step_timeout_ms;  /* longest wait for one step or reset */
    bool (*interrupted) (void); /* asked every 100 ms of waiting; may be NULL */
} gq_env_config;

/* Importing Gymnasium and an emulator from a cold disk can take half a minute; one step that takes
 * a whole one is stuck. */
#define GQ_ENV_CONFIG                                                                           \
    {                                                                                           \
        .name = "CartPole-v1", .count = 1, .start_timeout_ms = 120000, .step_timeout_ms = 60000 \
    }

typedef struct gq_env_spec {
    uint32_t observation_rank; /* 1, or 3 for images: channels, height, width */
    uint64_t observation_shape[GQ_RANK_MAX];
    uint64_t observation_count; /* product of the shape */
    uint32_t action_count;
} gq_env_spec;

typedef struct gq_env_outcome {
    float reward;
    bool terminated; /* the task ended: nothing of value lies beyond */
    bool truncated;  /* cut by a time limit: the value beyond is that of the last observation */
} gq_env_outcome;

/* What a person sees of a game. */
typedef struct gq_picture {
    uint32_t width, height; /* pixels, 1 to GQ_PICTURE_SIDE_MAX */
    const uint8_t *rgb;     /* [height, width, 3], valid until the environment's next call */
} gq_picture;

typedef struct gq_env_ops {
    void (*destroy) (gq_env **env_p);
    /* Start an episode of game `index`: observation[observation_count].  *seed starts its stream of
     * randomness anew; NULL: it goes on.  GQ_OK, or as step. */
    gq_status (*reset) (gq_env *env, uint32_t index, const uint64_t *seed, float *observation,
                        gq_error *error);
    /* One step of each game, none of whose episodes has ended: actions[count] < action_count,
     * observations[count, observation_count], outcomes[count].
     * GQ_OK; GQ_CLOSED: interrupted; GQ_TIMEOUT, GQ_IO: the child process, with *error. */
    gq_status (*step) (gq_env *env, const uint32_t *actions, float *observations,
                       gq_env_outcome *outcomes, gq_error *error);
    /* Game `index` as it is now, once it has been reset; config->pictures was set.
     * GQ_OK, or as step. */
    gq_status (*picture) (gq_env *env, uint32_t index, gq_picture *picture, gq_error *error);
} gq_env_ops;

/* First member of every environment. */
struct gq_env {
    const gq_env_ops *ops;
    gq_env_spec spec;
    uint32_t count; /* games */
};

/*
 * GQ_OK: *env_p is yours, to destroy by its ops.  GQ_INVALID: unknown name, key, value or space, or
 * no such interpreter or package; GQ_IO, GQ_TIMEOUT, GQ_CLOSED, GQ_MEMORY: all with *error.
 */
GQ_CHECK gq_status gq_env_create (gq_env **env_p, const gq_env_config *config, gq_error *error);
/* *env_p may be NULL, and is NULL afterwards. */
void gq_env_destroy (gq_env **env_p);

/* The three behind it; `id` is the name without "gym:". */
GQ_CHECK gq_status gq_cartpole_create (gq_env **env_p, const gq_env_config *config,
                                       gq_error *error);
GQ_CHECK gq_status gq_pong_create (gq_env **env_p, const gq_env_config *config, gq_error *error);
GQ_CHECK gq_status gq_gym_create (gq_env **env_p, const char *id, const gq_env_config *config,
                                  gq_error *error);

/* x, x', theta, theta' (m, m/s, rad, rad/s) of a CartPole's first game, for tests on recorded
 * trajectories.  Setting them starts an episode of full length. */
void gq_cartpole_set_state (gq_env *env, const double state[4]);
void gq_cartpole_state (const gq_env *env, double state[4]);

/* A game of Pong: pixels from the top left corner of a field of 160 x 160, and pixels a frame. */
typedef struct gq_pong_state {
    bool in_play;          /* false between a point and the next serve */
    double ball_x, ball_y; /* top left corner */
    double ball_dx, ball_dy;
    double left_y, right_y; /* the paddles' top edges; the opponent is on the left */
    unsigned left_score, right_score;
} gq_pong_state;

void gq_pong_look (const gq_env *env, uint32_t index, gq_pong_state *state);
/* The field in colour, rgb[160, 160, 3]. */
void gq_pong_picture (const gq_env *env, uint32_t index, uint8_t *rgb);

#endif
