/*
 * The job of training: weights in, a rollout, its gradient out.  Steps 0, 1 and 7 of a gradient's
 * path, the actor's loop around all of them.
 *
 * Must never call the client between taking weights and committing the gradient: the weights are
 * used in place, so one rollout sees one version, without a copy.  Must never end because the
 * optimizer is away: it waits, and says so.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gradq/gradq.h"
#include "jobs.h"
#include "log.h"
#include "rollout.h"
#include "stats.h"

#define RETURNS_KEPT        100 /* episodes behind return_mean; CartPole's own rule */
#define LOG_INTERVAL_NS     UINT64_C (5000000000) /* of progress lines: a person reads them */
#define METRICS_INTERVAL_NS UINT64_C (1000000000)

typedef struct trainer {
    gq_env *env;
    gq_net *net;
    gq_client *client;
    gq_rollout *rollout;
    uint32_t actor;
    uint32_t rollout_steps;
    uint64_t steps_max;
    int metrics_fd; /* -1: none */
    double returns[RETURNS_KEPT];
    uint64_t episode_count;
    uint64_t version;                   /* of the weights last played with */
    uint64_t staleness;                 /* versions that were made while they were played with */
    uint64_t metrics_ns, metrics_steps; /* at the last line about learning */
    uint64_t log_ns, log_steps;         /* at the last progress line */
} trainer;

static gq_status
open_client (trainer *self, const gq_options *options, gq_error *error)
{
    gq_client_config config = GQ_CLIENT_CONFIG;
    uint64_t actor = gq_options_count (options, "actor");
    float *initial = calloc (self->net->element_count, sizeof *initial);

    if (initial == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory for %" PRIu64 " parameters",
                        self->net->element_count);
    /* Of the run's seed alone: all actors propose the same, so it does not matter who is first. */
    self->net->ops->initialise (self->net, gq_options_count (options, "seed"), initial);
    config.address = gq_options_text (options, "address");
    config.actor = actor == UINT64_MAX ? GQ_ACTOR_ANY : (uint32_t)actor;
    config.window = (uint32_t)gq_options_count (options, "window");
    config.timeout_ms = (int)gq_options_count (options, "timeout-ms");
    config.lane = gq_options_text (options, "lane");
    config.encoding = gq_options_text (options, "encoding");
    config.tensors = self->net->tensors;
    config.tensor_count = self->net->tensor_count;
    config.initial = initial;
    config.interrupted = gq_stop_requested;
    gq_status status = gq_client_open (&self->client, &config, error);
    free (initial);
    if (status == GQ_OK)
        self->actor = gq_client_actor (self->client);
    return status;
}

static gq_status
make_rollout (trainer *self, const gq_options *options, gq_error *error)
{
    gq_rollout_config config;

    gq_rollout_from_options (&config, options, self->net, self->env, self->rollout_steps);
    config.seed = gq_random_stream (gq_options_count (options, "seed"), self->actor);
    return gq_rollout_create (&self->rollout, &config, error);
}

static gq_status
open_metrics (trainer *self, const gq_options *options, gq_error *error)
{
    const char *path = gq_options_text (options, "metrics");

    if (path == NULL)
        return GQ_OK;
    self->metrics_fd = open (path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (self->metrics_fd < 0)
        return gq_fail (error, GQ_IO, "--metrics %s: %s", path, strerror (errno));
    return GQ_OK;
}

/* One line by one write: several actors may append to one file. */
static void
write_line (trainer *self, const char *line, int length)
{
    if (write (self->metrics_fd, line, (size_t)length) != length) {
        /* Learning is worth more than its record. */
        gq_log (GQ_LOG_ERROR, "metrics cannot be written; no more will be", "reason", "s",
                strerror (errno), NULL);
        close (self->metrics_fd);
        self->metrics_fd = -1;
    }
}

static void
write_episode (trainer *self, const gq_episode *episode)
{
    char line[512];

    if (self->metrics_fd < 0)
        return;
    int length =
        snprintf (line, sizeof line,
                  "{\"time\":%.3f,\"actor\":%" PRIu32 ",\"steps\":%" PRIu64 ",\"episode\":%" PRIu64
                  ",\"return\":%.9g,\"length\":%" PRIu64 ",\"version\":%" PRIu64 "}\n",
                  (double)gq_wall_ns () * 1e-9, self->actor, episode->end_step, self->episode_count,
                  episode->reward_sum, episode->length, self->version);
    write_line (self, line, length);
}

/* The Euclidean length of a gradient. */
static double
norm (const float *gradient, uint64_t count)
{
    double squares = 0;

    for (uint64_t i = 0; i < count; i++)
        squares += (double)gradient[i] * (double)gradient[i];
    return sqrt (squares);
}

/* About the rollout just played, not more often than each METRICS_INTERVAL_NS.  JSON has no
 * infinities: what is not finite is null. */
static void
write_training (trainer *self, const gq_a3c_loss *loss, const float *gradient)
{
    uint64_t now_ns = gq_now_ns (), steps = gq_rollout_steps (self->rollout);
    char line[512];

    if (self->metrics_fd < 0 || now_ns - self->metrics_ns < METRICS_INTERVAL_NS)
        return;
    const double per_s =
        (double)(steps - self->metrics_steps) * 1e9 / (double)(now_ns - self->metrics_ns);
    const struct {
        const char *name;
        double value;
    } figures[] = {{"policy_loss", loss->policy},
                   {"value_loss", loss->value},
                   {"entropy", loss->entropy},
                   {"gradient_norm", norm (gradient, self->net->element_count)},
                   {"steps_per_s", per_s}};
    int used = snprintf (line, sizeof line,
                         "{\"time\":%.3f,\"actor\":%" PRIu32 ",\"steps\":%" PRIu64
                         ",\"version\":%" PRIu64 ",\"staleness\":%" PRIu64 ",\"episodes\":%" PRIu64,
                         (double)gq_wall_ns () * 1e-9, self->actor, steps, self->version,
                         self->staleness, self->episode_count);
    for (size_t i = 0; i < sizeof figures / sizeof figures[0]; i++)
        used += snprintf (line + used, sizeof line - (size_t)used,
                          isfinite (figures[i].value) ? ",\"%s\":%.9g" : ",\"%s\":null",
                          figures[i].name, figures[i].value);
    used += snprintf (line + used, sizeof line - (size_t)used, "}\n");
    write_line (self, line, used);
    self->metrics_ns = now_ns;
    self->metrics_steps = steps;
}

static double
return_mean (const trainer *self)
{
    size_t count = self->episode_count < RETURNS_KEPT ? (size_t)self->episode_count : RETURNS_KEPT;
    double sum = 0;

    for (size_t i = 0; i < count; i++)
        sum += self->returns[i];
    return count > 0 ? sum / (double)count : 0;
}

/* Tell file and monitor about the rollout just played. */
static void
report (trainer *self)
{
    size_t count;
    const gq_episode *episodes = gq_rollout_episodes (self->rollout, &count);

    for (size_t i = 0; i < count; i++) {
        self->returns[self->episode_count++ % RETURNS_KEPT] = episodes[i].reward_sum;
        write_episode (self, &episodes[i]);
    }
    if (count > 0) {
        gq_client_metric (self->client, "return_mean", return_mean (self));
        gq_client_metric (self->client, "episodes", (double)self->episode_count);
    }
    gq_client_metric (self->client, "steps", (double)gq_rollout_steps (self->rollout));
}

static void
log_progress (trainer *self)
{
    uint64_t now_ns = gq_now_ns (), steps = gq_rollout_steps (self->rollout);

    if (now_ns - self->log_ns < LOG_INTERVAL_NS)
        return;
    gq_client_counts counts = gq_client_count (self->client);
    gq_log (GQ_LOG_INFO, "progress", "actor", "u", (uint64_t)self->actor, "steps", "u", steps,
            "steps_per_s", "f",
            (double)(steps - self->log_steps) * 1e9 / (double)(now_ns - self->log_ns), "episodes",
            "u", self->episode_count, "return_mean", "f", return_mean (self), "version", "u",
            self->version, "pushed", "u", counts.pushed, "refused", "u", counts.refused, "resent",
            "u", counts.resent, "dropped", "u", counts.dropped, NULL);
    self->log_ns = now_ns;
    self->log_steps = steps;
}

/* Send the reserved gradient, and wait for its step where the run is synchronous.  Time-outs are
 * tried again for ever: the supervisor brings the optimizer back. */
static gq_status
send_gradient (trainer *self, uint32_t samples, gq_error *error)
{
    uint64_t sequence = 0;
    gq_status status;

    while ((status = gq_client_commit (self->client, samples, &sequence)) == GQ_TIMEOUT)
        gq_log (GQ_LOG_WARNING, "no room for a gradient; trying again", "actor", "u",
                (uint64_t)self->actor, "hint", "s", gq_status_text (status), NULL);
    if (status == GQ_OK && gq_client_max_staleness (self->client) == 0)
        while ((status = gq_client_wait (self->client, sequence)) == GQ_TIMEOUT)
            gq_log (GQ_LOG_WARNING, "no step yet; waiting on", "actor", "u", (uint64_t)self->actor,
                    "hint", "s", gq_status_text (status), NULL);
    if (status != GQ_OK)
        gq_fail (error, status, "cannot send a gradient: %s", gq_status_text (status));
    return status;
}

static gq_status
train (trainer *self, gq_error *error)
{
    gq_status status = GQ_OK;

    while (status == GQ_OK) {
        uint32_t games = self->env->count, steps = self->rollout_steps;
        uint64_t done = gq_rollout_steps (self->rollout);
        if (done >= self->steps_max)
            break;
        uint64_t left = self->steps_max - done;
        left = left / games + (left % games > 0); /* of each game */
        if (left < steps)
            steps = (uint32_t)left;
        gq_weights weights;
        gq_a3c_loss loss;
        float *gradient = gq_client_reserve (self->client);
        if (gradient == NULL)
            return gq_fail (error, GQ_MEMORY, "out of memory for a gradient");
        status = gq_client_weights (self->client, &weights);
        if (status != GQ_OK)
            return gq_fail (error, status, "cannot take weights: %s", gq_status_text (status));
        /* What was made since the last ones: with a window of 1, the last gradient's staleness and
         * its own step. */
        self->staleness = self->version > 0 && weights.version > self->version
                              ? weights.version - self->version - 1
                              : 0;
        self->version = weights.version;
        status = gq_rollout_play (self->rollout, weights.data, steps, gradient, &loss, error);
        if (status != GQ_OK)
            return status;
        /* Before the gradient is sent, for then it is the client's; in the order of their steps, by
         * which readers tell one life of an actor from the next. */
        report (self);
        write_training (self, &loss, gradient);
        status = send_gradient (self, steps * games, error);
        if (status == GQ_OK)
            log_progress (self);
    }
    return status;
}

static gq_status
run (trainer *self, const gq_options *options, gq_error *error)
{
    /* The environment first: it may fork, which ZeroMQ forbids after its first call. */
    uint32_t games = (uint32_t)gq_options_count (options, "envs-per-actor");
    gq_status status = gq_env_from_options (&self->env, options, games, error);

    if (status == GQ_OK)
        status = gq_net_from_options (&self->net, options, self->env, self->rollout_steps, error);
    if (status == GQ_OK)
        status = open_metrics (self, options, error);
    if (status == GQ_OK)
        status = open_client (self, options, error);
    if (status == GQ_OK)
        status = make_rollout (self, options, error);
    if (status != GQ_OK)
        return status;
    const char *reason;
    const char *lane = gq_client_lane (self->client, &reason);
    gq_log (GQ_LOG_INFO, "training", "actor", "u", (uint64_t)self->actor, "env", "s",
            gq_options_text (options, "env"), "net", "s", self->net->ops->name, "parameters", "u",
            self->net->element_count, "seed", "u", gq_options_count (options, "seed"), "lane", "s",
            lane, NULL);
    if (reason[0] != '\0' && strcmp (gq_options_text (options, "lane"), "auto") == 0)
        gq_log (GQ_LOG_INFO, "lane inline", "actor", "u", (uint64_t)self->actor, "message", "s",
                reason, NULL);
    self->log_ns = self->metrics_ns = gq_now_ns ();
    return train (self, error);
}

gq_status
gq_job_train (const gq_options *options, gq_error *error)
{
    uint64_t actor = gq_options_count (options, "actor");
    trainer self = {.metrics_fd = -1,
                    .rollout_steps = (uint32_t)gq_options_count (options, "rollout"),
                    .steps_max = gq_options_count (options, "max-steps")};

    if (actor != UINT64_MAX && actor >= GQ_ACTORS_MAX)
        return gq_fail (error, GQ_INVALID, "--actor %" PRIu64 ": identities go from 0 to %d", actor,
                        GQ_ACTORS_MAX - 1);
    gq_status status = run (&self, options, error);
    if (status == GQ_CLOSED) /* asked to stop is a good end */
        status = GQ_OK;
    if (self.client != NULL) {
        gq_client_close (&self.client);
        gq_log (GQ_LOG_INFO, "stopped", "actor", "u", (uint64_t)self.actor, "steps", "u",
                self.rollout != NULL ? gq_rollout_steps (self.rollout) : 0, "episodes", "u",
                self.episode_count, NULL);
    }
    gq_rollout_destroy (&self.rollout);
    if (self.net != NULL)
        self.net->ops->destroy (&self.net);
    gq_env_destroy (&self.env);
    if (self.metrics_fd >= 0)
        close (self.metrics_fd);
    return status;
}
