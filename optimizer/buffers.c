/*
 * Weights buffers: header and vector in one block, so that a version is a frame as it stands.
 */
#include "buffers.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "frame.h"

/* Current, next, and up to two versions on their way to the broker: one that ZeroMQ writes to the
 * socket, one that follows it.  More would be older ones when they arrive. */
#define BUFFER_COUNT 4
_Static_assert(GQ_FRAME_HEADER_BYTES % 64 == 0, "vectors follow headers, aligned");

typedef struct buffer {
    uint8_t *bytes;   /* header, then f32[count] */
    atomic_bool lent; /* a message refers to it */
} buffer;

struct gq_buffers {
    uint64_t count;
    size_t current;
    size_t next; /* handed out by gq_buffers_next, BUFFER_COUNT for none */
    buffer buffers[BUFFER_COUNT];
};

static size_t
frame_bytes (const gq_buffers *self)
{
    return GQ_FRAME_HEADER_BYTES + (size_t)self->count * sizeof (float);
}

gq_buffers *
gq_buffers_new (uint64_t count)
{
    gq_buffers *self = calloc (1, sizeof *self);
    if (self == NULL)
        return NULL;
    self->count = count;
    self->next = BUFFER_COUNT;
    size_t size = (frame_bytes (self) + 63) / 64 * 64;
    for (size_t i = 0; i < BUFFER_COUNT; i++) {
        self->buffers[i].bytes = aligned_alloc (64, size);
        if (self->buffers[i].bytes == NULL) {
            gq_buffers_free (&self);
            return NULL;
        }
        memset (self->buffers[i].bytes, 0, size);
        atomic_init (&self->buffers[i].lent, false);
    }
    return self;
}

void
gq_buffers_free (gq_buffers **buffers_p)
{
    gq_buffers *self = *buffers_p;
    if (self == NULL)
        return;
    for (size_t i = 0; i < BUFFER_COUNT; i++) {
        assert (!atomic_load (&self->buffers[i].lent));
        free (self->buffers[i].bytes);
    }
    free (self);
    *buffers_p = NULL;
}

static float *
vector_of (const buffer *which)
{
    return (float *)(void *)(which->bytes + GQ_FRAME_HEADER_BYTES);
}

const float *
gq_buffers_current (const gq_buffers *self)
{
    return vector_of (&self->buffers[self->current]);
}

/* Free: neither current nor lent.  The acquire pairs with the release in give_back: the reader's
 * last read happens before our next write. */
static bool
is_free (const gq_buffers *self, size_t index)
{
    return index != self->current &&
           !atomic_load_explicit (&self->buffers[index].lent, memory_order_acquire);
}

static size_t
next_free (const gq_buffers *self)
{
    for (size_t i = 1; i < BUFFER_COUNT; i++)
        if (is_free (self, (self->current + i) % BUFFER_COUNT))
            return (self->current + i) % BUFFER_COUNT;
    return BUFFER_COUNT;
}

float *
gq_buffers_next (gq_buffers *self)
{
    /* Buffers come back at any time: what was handed out is remembered, not searched again. */
    if (self->next == BUFFER_COUNT)
        self->next = next_free (self);
    assert (self->next < BUFFER_COUNT); /* gq_buffers_lend keeps one back */
    return vector_of (&self->buffers[self->next]);
}

void
gq_buffers_turn (gq_buffers *self)
{
    assert (self->next < BUFFER_COUNT);
    self->current = self->next;
    self->next = BUFFER_COUNT;
}

static void
give_back (void *data, void *hint)
{
    (void)data;
    buffer *which = hint;
    atomic_store_explicit (&which->lent, false, memory_order_release);
}

gq_status
gq_buffers_lend (gq_buffers *self, const gq_frame *frame, zmq_msg_t *message)
{
    size_t free_count = 0;
    for (size_t i = 0; i < BUFFER_COUNT; i++)
        free_count += is_free (self, i) ? 1 : 0;
    buffer *which = &self->buffers[self->current];
    /* One for the next step and, as this one stays lent, one for the step after that. */
    if (free_count < 2 || atomic_load_explicit (&which->lent, memory_order_acquire))
        return GQ_AGAIN;
    gq_frame_encode (frame, which->bytes + GQ_FRAME_HEADER_BYTES, which->bytes);
    atomic_store_explicit (&which->lent, true, memory_order_relaxed);
    if (zmq_msg_init_data (message, which->bytes, frame_bytes (self), give_back, which) != 0) {
        atomic_store_explicit (&which->lent, false, memory_order_relaxed);
        return GQ_AGAIN;
    }
    return GQ_OK;
}
