/*
 * The job --evaluate: play episodes with the weights of a checkpoint.  Beside a gradient's path: it
 * pushes nothing.
 *
 * Must never learn, and never carry recurrent state from one episode into the next.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "gif.h"
#include "gradq/limits.h"
#include "jobs.h"
#include "normalise.h"

/* Past the streams of all actors: evaluation sees other episodes than training did. */
#define STREAM GQ_ACTORS_MAX

typedef struct player {
    gq_env *env;
    gq_net *net;
    float *weights;     /* [element_count] */
    float *observation; /* [observation_count] */
    float *logits;      /* [A] */
    gq_random random;
    bool greedy, normalise;
    gq_normaliser normaliser;
    gq_gif *gif; /* that records this episode; NULL: nothing does */
} player;

typedef struct episode_result {
    double reward_sum;
    uint64_t length;
} episode_result;

static void
normalise (player *p)
{
    if (p->normalise)
        gq_normalise (&p->normaliser, p->observation, p->env->spec.observation_count);
}

/* Nothing to do unless this episode is recorded. */
static gq_status
record (player *p, gq_error *error)
{
    gq_picture picture;

    if (p->gif == NULL)
        return GQ_OK;
    gq_status status = p->env->ops->picture (p->env, 0, &picture, error);
    if (status == GQ_OK)
        status = gq_gif_add (p->gif, &picture, error);
    return status;
}

static gq_status
play_episode (player *p, const uint64_t *seed, episode_result *result, gq_error *error)
{
    uint32_t action_count = p->env->spec.action_count;
    gq_env_outcome outcome = {0};
    float value;

    result->reward_sum = 0;
    result->length = 0;
    gq_status status = p->env->ops->reset (p->env, 0, seed, p->observation, error);
    normalise (p);
    p->net->ops->reset (p->net, 0);
    while (status == GQ_OK && !outcome.terminated && !outcome.truncated) {
        if (gq_stop_requested ())
            return gq_fail (error, GQ_CLOSED, "interrupted");
        p->net->ops->begin (p->net); /* nothing to keep: no gradient follows */
        p->net->ops->step (p->net, p->weights, p->observation, p->logits, &value);
        uint32_t action = p->greedy ? gq_a3c_greedy (p->logits, action_count)
                                    : gq_a3c_sample (p->logits, action_count, &p->random);
        status = p->env->ops->step (p->env, &action, p->observation, &outcome, error);
        if (status == GQ_OK)
            status = record (p, error);
        normalise (p);
        result->reward_sum += (double)outcome.reward;
        result->length++;
    }
    return status;
}

static void
print_results (const episode_result *results, size_t count, const char *env, bool json)
{
    double mean = 0, square = 0;

    for (size_t i = 0; i < count; i++)
        mean += results[i].reward_sum / (double)count;
    for (size_t i = 0; i < count; i++)
        square += pow (results[i].reward_sum - mean, 2) / (double)count;
    if (!json) {
        for (size_t i = 0; i < count; i++)
            printf ("episode %zu  return %g  length %llu\n", i + 1, results[i].reward_sum,
                    (unsigned long long)results[i].length);
        printf ("mean %g  deviation %g  of %zu episodes of %s\n", mean, sqrt (square), count, env);
        return;
    }
    printf ("{\"episodes\":%zu,\"mean\":%.9g,\"deviation\":%.9g,\"returns\":[", count, mean,
            sqrt (square));
    for (size_t i = 0; i < count; i++)
        printf ("%s%.9g", i > 0 ? "," : "", results[i].reward_sum);
    printf ("],\"lengths\":[");
    for (size_t i = 0; i < count; i++)
        printf ("%s%llu", i > 0 ? "," : "", (unsigned long long)results[i].length);
    printf ("]}\n");
}

static void
clear (player *p)
{
    if (p->net != NULL)
        p->net->ops->destroy (&p->net);
    gq_env_destroy (&p->env);
    gq_gif_drop (&p->gif);
    free (p->weights);
    free (p->observation);
    free (p->logits);
}

/* Net and weights out of the file, for the environment's observations. */
static gq_status
load (player *p, const gq_net_ops *ops, const gq_safetensors *file, gq_error *error)
{
    const gq_env_spec *spec = &p->env->spec;
    gq_net_config config = {.observation_rank = spec->observation_rank, .rollout_max = 1};

    for (uint32_t i = 0; i < spec->observation_rank; i++)
        config.observation_shape[i] = spec->observation_shape[i];
    gq_status status = gq_net_sizes (&config, ops, file, error);
    if (status != GQ_OK)
        return status;
    if (config.action_count != spec->action_count)
        return gq_fail (error, GQ_INVALID,
                        "these weights choose among %u actions, the environment has %u",
                        config.action_count, spec->action_count);
    status = ops->create (&p->net, &config, error);
    if (status != GQ_OK)
        return status;
    p->weights = calloc (p->net->element_count, sizeof *p->weights);
    p->observation = calloc (spec->observation_count, sizeof *p->observation);
    p->logits = calloc (spec->action_count, sizeof *p->logits);
    if (p->weights == NULL || p->observation == NULL || p->logits == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory for the net");
    return gq_net_read (p->net, file, p->weights, error);
}

static gq_status
play (player *p, const gq_options *options, gq_error *error)
{
    size_t count = gq_options_count (options, "episodes");
    uint64_t seed = gq_random_stream (gq_options_count (options, "seed"), STREAM);
    episode_result *results = calloc (count, sizeof *results);
    gq_status status = GQ_OK;

    if (results == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory for %zu episodes", count);
    gq_random_seed (&p->random, seed);
    p->greedy = gq_options_flag (options, "greedy");
    p->normalise = gq_normalise_from_options (options);
    for (size_t i = 0; status == GQ_OK && i < count; i++) {
        status = play_episode (p, i == 0 ? &seed : NULL, &results[i], error);
        if (status == GQ_OK && p->gif != NULL)
            status = gq_gif_finish (&p->gif, error);
    }
    if (status == GQ_OK)
        print_results (results, count, gq_options_text (options, "env"),
                       gq_options_flag (options, "json"));
    if (status == GQ_OK && fflush (stdout) != 0)
        status = gq_fail (error, GQ_IO, "cannot write to standard output");
    free (results);
    return status;
}

gq_status
gq_job_evaluate (const gq_options *options, gq_error *error)
{
    const char *path = gq_options_text (options, "evaluate");
    gq_safetensors *file = NULL;
    gq_error reason = {""};
    player p = {0};
    gq_status status = gq_safetensors_read (&file, path, error);

    if (status != GQ_OK)
        return status; /* names the path itself */
    status = gq_env_from_options (&p.env, options, 1, error);
    if (status == GQ_OK) {
        status = load (&p, gq_net_named (gq_options_text (options, "net")), file, &reason);
        if (status != GQ_OK)
            gq_fail (error, status, "%.200s: %.700s", path, reason.text);
    }
    gq_safetensors_free (&file);
    if (status == GQ_OK && gq_options_given (options, "record"))
        status = gq_gif_create (&p.gif, gq_options_text (options, "record"), error);
    if (status == GQ_OK)
        status = play (&p, options, error);
    clear (&p);
    return status;
}
