/*
 * The job --benchmark: agent steps a second of this actor on one core, without a run.  Beside a
 * gradient's path: it pushes nothing.
 *
 * Three figures: the net alone (its steps and the gradient, on observations of noise), the games
 * alone (actions drawn evenly), and both together as training plays them.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "jobs.h"
#include "rollout.h"
#include "stats.h"

typedef struct bench {
    gq_env *env;
    gq_net *net;
    gq_rollout *rollout;
    gq_random random;
    uint64_t time_ns; /* for each figure */
    uint32_t rollout_steps;
    float *weights, *gradient; /* [element_count] */
    float *observations;       /* (K, observation_count) */
    float *logits, *values;    /* (T, K, A), (T, K) */
    gq_env_outcome outcomes[GQ_ENV_COUNT_MAX];
    uint32_t actions[GQ_ENV_COUNT_MAX];
} bench;

/* One rollout of a kind; `error` as the environment's. */
typedef gq_status (*part) (bench *b, gq_error *error);

static gq_status
net_alone (bench *b, gq_error *error)
{
    const gq_net_ops *ops = b->net->ops;
    size_t games = b->env->count, actions = b->net->config.action_count;

    (void)error;
    ops->begin (b->net);
    for (size_t t = 0; t < b->rollout_steps; t++)
        ops->step (b->net, b->weights, b->observations, b->logits + t * games * actions,
                   b->values + t * games);
    /* Any derivatives cost the same: the outputs serve. */
    ops->backward (b->net, b->weights, b->logits, b->values, b->gradient);
    return GQ_OK;
}

static gq_status
games_alone (bench *b, gq_error *error)
{
    gq_env *env = b->env;
    gq_status status = GQ_OK;

    for (size_t t = 0; status == GQ_OK && t < b->rollout_steps; t++) {
        for (uint32_t k = 0; k < env->count; k++)
            b->actions[k] = (uint32_t)(gq_random_next (&b->random) % env->spec.action_count);
        status = env->ops->step (env, b->actions, b->observations, b->outcomes, error);
        for (uint32_t k = 0; status == GQ_OK && k < env->count; k++)
            if (b->outcomes[k].terminated || b->outcomes[k].truncated)
                status = env->ops->reset (env, k, NULL,
                                          b->observations + k * env->spec.observation_count, error);
    }
    return status;
}

static gq_status
both (bench *b, gq_error *error)
{
    return gq_rollout_play (b->rollout, b->weights, b->rollout_steps, b->gradient, NULL, error);
}

/* *per_s: steps of all games a second, over b->time_ns after one rollout of warming up. */
static gq_status
measure (bench *b, part play, double *per_s, gq_error *error)
{
    gq_status status = play (b, error);
    uint64_t steps = 0, begin_ns = gq_now_ns (), now_ns = begin_ns;

    while (status == GQ_OK && now_ns - begin_ns < b->time_ns) {
        if (gq_stop_requested ())
            return gq_fail (error, GQ_CLOSED, "interrupted");
        status = play (b, error);
        steps += (uint64_t)b->rollout_steps * b->env->count;
        now_ns = gq_now_ns ();
    }
    *per_s = now_ns > begin_ns ? (double)steps * 1e9 / (double)(now_ns - begin_ns) : 0;
    return status;
}

static gq_status
prepare (bench *b, const gq_options *options, gq_error *error)
{
    gq_status status = gq_net_from_options (&b->net, options, b->env, b->rollout_steps, error);
    if (status != GQ_OK)
        return status;
    size_t rows = (size_t)b->rollout_steps * b->env->count;
    size_t floats = b->env->count * b->env->spec.observation_count;
    b->weights = calloc (b->net->element_count, sizeof *b->weights);
    b->gradient = calloc (b->net->element_count, sizeof *b->gradient);
    b->observations = calloc (floats, sizeof *b->observations);
    b->logits = calloc (rows * b->net->config.action_count, sizeof *b->logits);
    b->values = calloc (rows, sizeof *b->values);
    if (!b->weights || !b->gradient || !b->observations || !b->logits || !b->values)
        return gq_fail (error, GQ_MEMORY, "out of memory for the benchmark");
    gq_random_seed (&b->random, gq_options_count (options, "seed"));
    b->net->ops->initialise (b->net, gq_options_count (options, "seed"), b->weights);
    for (size_t i = 0; i < floats; i++)
        b->observations[i] = (float)gq_random_uniform (&b->random);
    gq_rollout_config config;
    gq_rollout_from_options (&config, options, b->net, b->env, b->rollout_steps);
    config.seed = gq_options_count (options, "seed");
    return gq_rollout_create (&b->rollout, &config, error);
}

gq_status
gq_job_benchmark (const gq_options *options, gq_error *error)
{
    bench b = {.rollout_steps = (uint32_t)gq_options_count (options, "rollout"),
               .time_ns = (uint64_t)(gq_options_number (options, "benchmark") * 1e9)};
    static const part parts[3] = {net_alone, games_alone, both};
    double per_s[3] = {0};
    gq_status status = gq_env_from_options (
        &b.env, options, (uint32_t)gq_options_count (options, "envs-per-actor"), error);

    if (status == GQ_OK)
        status = prepare (&b, options, error);
    for (int i = 0; status == GQ_OK && i < 3; i++)
        status = measure (&b, parts[i], &per_s[i], error);
    if (status == GQ_OK) {
        const char *form =
            gq_options_flag (options, "json")
                ? "{\"env\":\"%s\",\"net\":\"%s\",\"parameters\":%" PRIu64 ",\"envs\":%u,"
                  "\"rollout\":%u,\"net_per_s\":%.1f,\"env_per_s\":%.1f,\"both_per_s\":%.1f}\n"
                : "%s, %s of %" PRIu64
                  " parameters, %u games, rollouts of %u steps; agent steps/s: "
                  "net alone %.0f, games alone %.0f, both %.0f\n";
        printf (form, gq_options_text (options, "env"), b.net->ops->name, b.net->element_count,
                b.env->count, b.rollout_steps, per_s[0], per_s[1], per_s[2]);
        if (fflush (stdout) != 0)
            status = gq_fail (error, GQ_IO, "cannot write to standard output");
    }
    gq_rollout_destroy (&b.rollout);
    if (b.net != NULL)
        b.net->ops->destroy (&b.net);
    gq_env_destroy (&b.env);
    float *arrays[] = {b.weights, b.gradient, b.observations, b.logits, b.values};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++)
        free (arrays[i]);
    return status;
}
