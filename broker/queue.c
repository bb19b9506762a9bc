/*
 * A ring of ZeroMQ messages.  Moving a zmq_msg_t moves a reference, so a gradient is never copied
 * on its way through the broker.
 */
#include "queue.h"

#include <assert.h>
#include <stdlib.h>

#include "frame.h"

typedef struct entry {
    zmq_msg_t message;
    size_t bytes; /* kept apart: a sent message has forgotten its size */
} entry;

struct gq_queue {
    gq_queue_counts counts;
    size_t head; /* of the ring: index of the front */
    gq_queue_actor actors[GQ_ACTORS_MAX];
    entry ring[]; /* [capacity] */
};

gq_queue *
gq_queue_new (uint64_t capacity, uint64_t bytes_capacity)
{
    assert (capacity >= 1 && capacity <= GQ_QUEUE_CAPACITY_MAX);
    gq_queue *queue = calloc (1, sizeof *queue + capacity * sizeof queue->ring[0]);
    if (queue == NULL)
        return NULL;
    queue->counts.capacity = capacity;
    queue->counts.bytes_capacity = bytes_capacity;
    return queue;
}

void
gq_queue_free (gq_queue **queue_p)
{
    gq_queue *queue = *queue_p;
    if (queue == NULL)
        return;
    while (gq_queue_front (queue) != NULL) {
        zmq_msg_close (gq_queue_front (queue));
        gq_queue_pop (queue);
    }
    free (queue);
    *queue_p = NULL;
}

gq_status
gq_queue_push (gq_queue *queue, zmq_msg_t *message, uint64_t now_ns)
{
    gq_queue_counts *counts = &queue->counts;
    size_t size = zmq_msg_size (message);
    gq_frame frame;
    gq_status status = gq_frame_decode (zmq_msg_data (message), size, &frame);
    if (status == GQ_OK && frame.kind != GQ_KIND_GRADIENT && frame.kind != GQ_KIND_INIT)
        status = GQ_MALFORMED;
    if (status != GQ_OK) {
        counts->refused++;
        return status;
    }
    if (counts->depth == counts->capacity || counts->bytes + size > counts->bytes_capacity)
        return GQ_FULL;
    size_t tail = (queue->head + counts->depth) % counts->capacity;
    zmq_msg_init (&queue->ring[tail].message);
    zmq_msg_move (&queue->ring[tail].message, message);
    queue->ring[tail].bytes = size;
    counts->depth++;
    counts->bytes += size;
    counts->received++;
    queue->actors[frame.actor].received++;
    queue->actors[frame.actor].last_ns = now_ns;
    queue->actors[frame.actor].lane = frame.lane;
    return GQ_OK;
}

zmq_msg_t *
gq_queue_front (gq_queue *queue)
{
    return queue->counts.depth == 0 ? NULL : &queue->ring[queue->head].message;
}

void
gq_queue_pop (gq_queue *queue)
{
    gq_queue_counts *counts = &queue->counts;
    assert (counts->depth > 0 && counts->bytes >= queue->ring[queue->head].bytes);
    counts->bytes -= queue->ring[queue->head].bytes;
    counts->depth--;
    counts->delivered++;
    queue->head = (queue->head + 1) % counts->capacity;
}

void
gq_queue_refuse (gq_queue *queue)
{
    queue->counts.refused++;
}

gq_queue_counts
gq_queue_count (const gq_queue *queue)
{
    return queue->counts;
}

const gq_queue_actor *
gq_queue_actors (const gq_queue *queue)
{
    return queue->actors;
}
