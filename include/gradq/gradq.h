/*
 * gradq for actors: push gradients, take whole versions of the weights.
 *
 * Steps 1 and 7 of a gradient's path (docs/ARCHITECTURE.md).  A client belongs to the thread that
 * opened it.  It owns its sockets, and never blocks longer than its time-out.  All its work happens
 * inside the calls below, but for one thread that keeps the newest weights while the caller
 * computes; so a process must not fork and go on with a client that is open.
 *
 *     gq_client *client = NULL;
 *     gq_client_config config = GQ_CLIENT_CONFIG;
 *     config.address = "ipc:///tmp/run/control";
 *     config.tensors = tensors, config.tensor_count = 4, config.initial = first_weights;
 *     if (gq_client_open (&client, &config, &error) != GQ_OK) ...
 *     while (training) {
 *         gq_weights weights;
 *         status = gq_client_weights (client, &weights);       // newest whole version
 *         ... compute gradient[weights.count] ...
 *         status = gq_client_push (client, gradient, samples); // waits only for the window
 *     }
 *     gq_client_close (&client);                               // waits for acknowledgements
 */
#ifndef GRADQ_GRADQ_H
#define GRADQ_GRADQ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gradq/limits.h"
#include "gradq/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The only home of the version.  The first number is that of libgradq.so, and rises when a struct
 * or a call below changes. */
#define GQ_VERSION_STRING "0.1.0"

/* What follows is what the shared library exports. */
#pragma GCC visibility push(default)

/* One named float32 tensor; a layout is an ordered list of them in one flat vector. */
typedef struct gq_tensor_shape {
    char name[GQ_NAME_MAX];
    uint32_t rank;
    uint64_t shape[GQ_RANK_MAX];
} gq_tensor_shape;

#define GQ_ACTOR_ANY UINT32_MAX

typedef struct gq_client_config {
    const char *address; /* the broker's control endpoint, tcp://host:port or ipc://path */
    uint32_t actor;      /* identity in the run, < GQ_ACTORS_MAX; GQ_ACTOR_ANY: be given one */
    uint32_t window;     /* gradients on the way at most, 1 .. GQ_WINDOW_MAX */
    int timeout_ms;      /* longest that any call below waits; -1: for ever */
    int resend_ms; /* a gradient unanswered this long is sent again; then after twice that, ... */
    /* How gradients and weights travel.  "inline": through sockets.  "shm": through memory shared
     * with an optimizer on this host, or not at all.  "auto": shm where it can be had. */
    const char *lane;
    /* How a gradient travels on lane inline: "f32", or "bf16", rounded at commit to the nearest
     * bfloat16 in half the bytes.  Memory that is shared holds f32 always.  NULL: f32. */
    const char *encoding;
    /* The model.  NULL: take the layout that the run has.  Given: must equal the run's, or becomes
     * the run's, with `initial` (f32[sum of sizes], finite, borrowed during open) as version 0. */
    const gq_tensor_shape *tensors;
    size_t tensor_count;
    const float *initial;
    /* Asked every 100 ms of waiting; true ends the call with GQ_CLOSED.  May be NULL. */
    bool (*interrupted) (void);
} gq_client_config;

#define GQ_CLIENT_CONFIG                                                         \
    {                                                                            \
        .actor = GQ_ACTOR_ANY, .window = GQ_WINDOW_DEFAULT, .timeout_ms = 30000, \
        .resend_ms = 1000, .lane = "auto", .encoding = "f32"                     \
    }

typedef struct gq_weights {
    const float *data; /* f32[count]; valid until the next call on this client */
    uint64_t count;
    uint64_t version; /* steps of the optimizer behind these weights */
    uint32_t term;    /* life of the optimizer; (term, version) never falls */
} gq_weights;

typedef struct gq_client_counts {
    uint64_t pushed;          /* gradients sent */
    uint64_t acknowledged;    /* settled: applied or refused */
    uint64_t refused;         /* of those, refused by the optimizer */
    uint64_t resent;          /* sendings that repeated an earlier one */
    gq_status refused_reason; /* of the last refused one, GQ_OK for none */
    uint64_t rolled_back;     /* times that the optimizer had lost what it knew of this actor */
    uint64_t dropped;         /* gradients that were on the way then: never settled */
} gq_client_counts;

typedef struct gq_client gq_client;

/*
 * Say hello at `config->address`, agree on layout and lane, and wait for the first whole weights.
 *
 * GQ_OK: *client_p is open, and yours to close.  Otherwise *client_p is NULL and *error (may be
 * NULL) says what to do: GQ_UNREACHABLE (no broker answered in time), GQ_TIMEOUT (broker, but no
 * optimizer or no weights in time), GQ_LAYOUT, GQ_NONFINITE (`initial`), GQ_REFUSED, GQ_INVALID,
 * GQ_MEMORY, GQ_CLOSED.
 */
GQ_CHECK gq_status gq_client_open (gq_client **client_p, const gq_client_config *config,
                                   gq_error *error);

/* Tensors of the run's layout, in order; the array is the client's.  *element_count: their sum. */
const gq_tensor_shape *gq_client_layout (const gq_client *client, size_t *tensor_count,
                                         uint64_t *element_count);

uint32_t gq_client_actor (const gq_client *client);

/* The lane in use, "inline" or "shm"; a later optimizer may end the latter.  *reason (may be NULL):
 * why it is inline, "" when it is not. */
const char *gq_client_lane (const gq_client *client, const char **reason);

/* The run's --max-staleness, UINT64_MAX for none: 0 asks actors to wait for each step. */
uint64_t gq_client_max_staleness (const gq_client *client);

/*
 * The newest whole version that has arrived; never waits, never goes back.  GQ_OK.
 */
GQ_CHECK gq_status gq_client_weights (gq_client *client, gq_weights *weights);

/*
 * A buffer f32[element_count] to build the next gradient in, without a copy.  It stays the
 * client's; the same one until gq_client_commit.  NULL: out of memory.
 */
float *gq_client_reserve (gq_client *client);

/*
 * Send what gq_client_reserve gave, computed from the version that gq_client_weights gave last,
 * from `samples` >= 1 environment steps or examples.  Waits while the window or the queue is full.
 * With encoding bf16 it is rounded here, on its way: the buffer keeps what was written.
 *
 * GQ_OK: sent, with *sequence (may be NULL) to wait for.  GQ_TIMEOUT, GQ_CLOSED: not sent, the
 * buffer is still reserved.  GQ_RUN: another run has taken this address over; open a new client.
 * GQ_FENCED: another process has said hello with this actor's id; this one must end.
 * GQ_INVALID: nothing reserved, or samples is 0.  GQ_MEMORY: not sent, still reserved.
 */
GQ_CHECK gq_status gq_client_commit (gq_client *client, uint32_t samples, uint64_t *sequence);

/* reserve + copy of gradient[element_count] + commit; GQ_MEMORY or as gq_client_commit. */
GQ_CHECK gq_status gq_client_push (gq_client *client, const float *gradient, uint32_t samples);

/*
 * Wait until everything up to `sequence` is settled, or dropped (see gq_client_counts), and the
 * weights that it led to are here.
 * GQ_OK, GQ_TIMEOUT, GQ_CLOSED, GQ_RUN, GQ_FENCED.
 */
GQ_CHECK gq_status gq_client_wait (gq_client *client, uint64_t sequence);

gq_client_counts gq_client_count (const gq_client *client);

/* A number to show beside this actor in gradq-top ("return_mean"); sent once a second. */
void gq_client_metric (gq_client *client, const char *name, double value);

/*
 * Wait until all is settled, as long as the optimizer is heard and up to the time-out (30 s when
 * that is "for ever": a step of --aggregate may never be complete); say bye, free.  *client_p
 * becomes NULL.
 *
 * GQ_OK: all was settled.  GQ_TIMEOUT: some was not; it may be applied or not.  GQ_RUN, GQ_FENCED.
 */
gq_status gq_client_close (gq_client **client_p);

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
#endif
