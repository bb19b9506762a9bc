/*
 * The broker's gradient thread: sockets in, the queue, sockets out.  Steps 2 and 3.
 */
#ifndef GQ_GRADIENTS_H
#define GQ_GRADIENTS_H

#include <czmq.h>

#include "near.h"
#include "queue.h"

typedef struct gq_gradients_config {
    const char *in, *out;    /* endpoints to bind */
    uint64_t capacity;       /* gradients */
    uint64_t bytes_capacity; /* also the largest frame */
    gq_near *near;           /* borrowed */
    gq_error error;          /* out, when starting fails */
} gq_gradients_config;

/* What the thread answers to "STATS": one frame that holds this. */
typedef struct gq_gradients_stats {
    gq_queue_counts queue; /* depth: with those on their way; delivered: taken, or lost */
    uint64_t on_the_way;   /* handed on, and not known to be taken */
    gq_queue_actor actors[GQ_ACTORS_MAX];
} gq_gradients_stats;

/*
 * Start the thread (a zactor).  NULL: config->error says why (address in use, no memory).
 * Its pipe knows "STATS", "MARK" (send a mark now, for a newer count), "TAKEN" with a report of the
 * optimizer in a second part (handed.h), and czmq's own "$TERM".
 */
zactor_t *gq_gradients_start (gq_gradients_config *config);

#endif
