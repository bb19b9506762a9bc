/*
 * Weights buffers: header and vector in one block, so that a version is a frame as it stands.
 */
#include "buffers.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "frame.h"

/* Current, next, and those on their way to the broker. */
#define OWN_COUNT (2 + LENT_MAX)
/* One that ZeroMQ writes to the socket, one that follows it.  More would be older ones when they
 * arrive. */
#define LENT_MAX 2
/* On a board, which has room for readers there as well. */
#define BUFFER_COUNT GQ_BOARD_BLOCKS
_Static_assert(GQ_FRAME_HEADER_BYTES % 64 == 0, "vectors follow headers, aligned");

typedef struct buffer {
    uint8_t *bytes;   /* header, then f32[count] */
    atomic_bool lent; /* a message refers to it */
} buffer;

struct gq_buffers {
    uint64_t count;
    gq_lanes *lanes; /* whose board the buffers are blocks of; NULL: they are our own */
    size_t size;     /* buffers in use */
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
gq_buffers_new (uint64_t count, gq_lanes *lanes)
{
    gq_buffers *self = calloc (1, sizeof *self);
    if (self == NULL)
        return NULL;
    self->count = count;
    self->lanes = lanes;
    self->size = lanes != NULL ? BUFFER_COUNT : OWN_COUNT;
    self->next = BUFFER_COUNT;
    size_t bytes = (frame_bytes (self) + 63) / 64 * 64;
    for (size_t i = 0; i < self->size; i++) {
        self->buffers[i].bytes = lanes != NULL
                                     ? gq_board_block (gq_lanes_board (lanes), (uint32_t)i)
                                     : aligned_alloc (64, bytes);
        if (self->buffers[i].bytes == NULL) {
            gq_buffers_free (&self);
            return NULL;
        }
        memset (self->buffers[i].bytes, 0, bytes); /* no page is touched for the first time later */
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
    for (size_t i = 0; i < self->size; i++) {
        assert (!atomic_load (&self->buffers[i].lent));
        if (self->lanes == NULL)
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

/* Bit i: buffer i can be seen on the board, now or by who leased it. */
static uint32_t
seen (const gq_buffers *self)
{
    if (self->lanes == NULL)
        return 0;
    uint32_t shown = gq_board_shown (gq_lanes_board (self->lanes));
    return gq_lanes_leased (self->lanes) | (shown != GQ_BOARD_NONE ? 1u << shown : 0);
}

/* Bit i: a message refers to buffer i.  The acquire pairs with the release in give_back: the
 * reader's last read happens before our next write. */
static uint32_t
lent_ones (const gq_buffers *self)
{
    uint32_t lent = 0;
    for (size_t i = 0; i < self->size; i++)
        if (atomic_load_explicit (&self->buffers[i].lent, memory_order_acquire))
            lent |= 1u << i;
    return lent;
}

/* Bit i: buffer i is free: neither current nor lent nor seen. */
static uint32_t
free_ones (const gq_buffers *self)
{
    uint32_t taken = seen (self) | lent_ones (self) | 1u << self->current;
    return ~taken & ((1u << self->size) - 1);
}

static size_t
next_free (const gq_buffers *self)
{
    const uint32_t free_now = free_ones (self);
    for (size_t i = 1; i < self->size; i++)
        if (free_now >> (self->current + i) % self->size & 1)
            return (self->current + i) % self->size;
    return BUFFER_COUNT;
}

/* One for the next step and, as the current one stays in use, one for the step after that. */
static bool
may_part (const gq_buffers *self)
{
    return __builtin_popcount (free_ones (self)) >= 2;
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
    buffer *which = &self->buffers[self->current];
    const uint32_t lent = lent_ones (self);
    if (!may_part (self) || (lent >> self->current & 1) != 0 ||
        __builtin_popcount (lent) >= LENT_MAX)
        return GQ_AGAIN;
    gq_frame_encode (frame, which->bytes + GQ_FRAME_HEADER_BYTES, which->bytes);
    atomic_store_explicit (&which->lent, true, memory_order_relaxed);
    if (zmq_msg_init_data (message, which->bytes, frame_bytes (self), give_back, which) != 0) {
        atomic_store_explicit (&which->lent, false, memory_order_relaxed);
        return GQ_AGAIN;
    }
    return GQ_OK;
}

gq_status
gq_buffers_show (gq_buffers *self, uint64_t version)
{
    if (!may_part (self))
        return GQ_AGAIN;
    gq_board_show (gq_lanes_board (self->lanes), (uint32_t)self->current, version);
    return GQ_OK;
}
