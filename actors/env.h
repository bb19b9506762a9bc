/*
 * Environments: what an actor plays.  Step 0 of a gradient's path.
 *
 * An environment is one flat struct behind a table of functions, and belongs to one thread.  Create
 * it before the first ZeroMQ call of the process: the Gymnasium bridge forks.
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

typedef struct gq_env gq_env;

typedef struct gq_env_config {
    const char *name;        /* "CartPole-v1" or "gym:ID" */
    const char *const *sets; /* [set_count] "key=value" for the environment's constructor */
    size_t set_count;
    const char *python;   /* interpreter for gym:ID; NULL: build/venv beside the program, python3 */
    int start_timeout_ms; /* longest wait for the interpreter to have made the environment */
    int step_timeout_ms;  /* longest wait for one step or reset */
    bool (*interrupted) (void); /* asked every 100 ms of waiting; may be NULL */
} gq_env_config;

/* Importing Gymnasium and an emulator from a cold disk can take half a minute; one step that takes
 * a whole one is stuck. */
#define GQ_ENV_CONFIG                                                               \
    {                                                                               \
        .name = "CartPole-v1", .start_timeout_ms = 120000, .step_timeout_ms = 60000 \
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

typedef struct gq_env_ops {
    void (*destroy) (gq_env **env_p);
    /* Start an episode: observation[observation_count].  *seed starts the stream of randomness
     * anew; NULL: it goes on.  GQ_OK, or as step. */
    gq_status (*reset) (gq_env *env, const uint64_t *seed, float *observation, gq_error *error);
    /* One step by action < action_count of an episode that has not ended.
     * GQ_OK; GQ_CLOSED: interrupted; GQ_TIMEOUT, GQ_IO: the child process, with *error. */
    gq_status (*step) (gq_env *env, uint32_t action, float *observation, gq_env_outcome *outcome,
                       gq_error *error);
} gq_env_ops;

/* First member of every environment. */
struct gq_env {
    const gq_env_ops *ops;
    gq_env_spec spec;
};

/*
 * GQ_OK: *env_p is yours, to destroy by its ops.  GQ_INVALID: unknown name, key, value or space, or
 * no such interpreter or package; GQ_IO, GQ_TIMEOUT, GQ_CLOSED, GQ_MEMORY: all with *error.
 */
GQ_CHECK gq_status gq_env_create (gq_env **env_p, const gq_env_config *config, gq_error *error);
/* *env_p may be NULL, and is NULL afterwards. */
void gq_env_destroy (gq_env **env_p);

/* The two behind it; `id` is the name without "gym:". */
GQ_CHECK gq_status gq_cartpole_create (gq_env **env_p, const gq_env_config *config,
                                       gq_error *error);
GQ_CHECK gq_status gq_gym_create (gq_env **env_p, const char *id, const gq_env_config *config,
                                  gq_error *error);

/* CartPole's x, x', theta, theta' (m, m/s, rad, rad/s), for tests on recorded trajectories.
 * Setting them starts an episode of full length. */
void gq_cartpole_set_state (gq_env *env, const double state[4]);
void gq_cartpole_state (const gq_env *env, double state[4]);

#endif
