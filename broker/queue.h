/*
 * The broker's queue of gradients: bounded in frames and in bytes, counted by actor.  Steps 2 and
 * 3 of a gradient's path.  Owns no socket, reads no clock, allocates only when created, and drops
 * nothing: what it cannot take stays with the caller.  One thread.
 */
#ifndef GQ_QUEUE_H
#define GQ_QUEUE_H

#include <zmq.h>

#include "gradq/limits.h"
#include "gradq/status.h"

typedef struct gq_queue gq_queue;

typedef struct gq_queue_counts {
    uint64_t depth;          /* frames inside */
    uint64_t capacity;       /* frames */
    uint64_t bytes;          /* inside */
    uint64_t bytes_capacity; /* bytes */
    uint64_t received;       /* admitted so far */
    uint64_t delivered;      /* handed on so far */
    uint64_t refused;        /* not admitted because they are no gradients of this protocol */
} gq_queue_counts;

/* One actor as the queue sees it. */
typedef struct gq_queue_actor {
    uint64_t received;
    uint64_t last_ns; /* 0: never seen */
    uint16_t lane;    /* gq_lane_kind of its last gradient, or first weights */
} gq_queue_actor;

/* NULL: out of memory.  1 <= capacity <= GQ_QUEUE_CAPACITY_MAX. */
gq_queue *gq_queue_new (uint64_t capacity, uint64_t bytes_capacity);
void gq_queue_free (gq_queue **queue_p);

/*
 * Admit one message.
 *
 * GQ_OK: the queue owns it and *message is empty.  GQ_FULL: it is still yours; try again when
 * something was popped.  GQ_MALFORMED, GQ_CHECKSUM: it is still yours, counted as refused, and
 * not worth keeping: its header is not that of a gradient or of first weights.
 * now_ns: monotonic.  O(1).
 */
GQ_CHECK gq_status gq_queue_push (gq_queue *queue, zmq_msg_t *message, uint64_t now_ns);

/* The message to hand on next, NULL when empty; still the queue's. */
zmq_msg_t *gq_queue_front (gq_queue *queue);

/* The front was sent (its zmq_msg_t is empty now): forget it.  There is a front: asserted. */
void gq_queue_pop (gq_queue *queue);

/* Count a message that was not even a frame (several parts, too large). */
void gq_queue_refuse (gq_queue *queue);

gq_queue_counts gq_queue_count (const gq_queue *queue);
/* [GQ_ACTORS_MAX] */
const gq_queue_actor *gq_queue_actors (const gq_queue *queue);

#endif
