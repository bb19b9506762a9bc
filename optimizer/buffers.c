/*
 * Weights buffers: header and vector in one block, so that a version is a frame as it stands.
 */
#include "buffers.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "frame.h"

/* Versions on their way to the broker: one that ZeroMQ writes to the socket, one that follows it.
 * More would be older ones when they arrive. */
#define LENT_MAX 2
/* They, the current one and the next. */
#define OWN_COUNT (LENT_MAX + 2)
_Static_assert(OWN_COUNT == GQ_BOARD_SPARES, "steps go on whatever readers of the board hold");
#define NONE SIZE_MAX

typedef struct buffer {
    uint8_t *bytes;   /* header, then f32[count] */
    atomic_bool lent; /* a message refers to it */
} buffer;

struct gq_buffers {
    uint64_t count;
    gq_lanes *lanes; /* NULL: memory of our own */
    size_t size;     /* buffers in use */
    size_t current;
    size_t next;                  /* handed out by gq_buffers_next, NONE for none */
    buffer buffers[GQ_BOARD_ALL]; /* those that may be shown come first */
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
    self->size = lanes != NULL ? GQ_BOARD_ALL : OWN_COUNT;
    self->next = NONE;
    size_t size = (frame_bytes (self) + 63) / 64 * 64;
    for (size_t i = 0; i < self->size; i++) {
        atomic_init (&self->buffers[i].lent, false);
        if (lanes != NULL) {
            self->buffers[i].bytes = gq_board_block (gq_lanes_board (lanes), (uint32_t)i);
            continue;
        }
        self->buffers[i].bytes = aligned_alloc (64, size);
        if (self->buffers[i].bytes == NULL) {
            gq_buffers_free (&self);
            return NULL;
        }
        memset (self->buffers[i].bytes, 0, size);
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

/* Bit i: buffer i may be read by an actor of this host. */
static uint32_t
read_by_actors (const gq_buffers *self)
{
    if (self->lanes == NULL)
        return 0;
    const uint32_t shown = gq_board_shown (gq_lanes_board (self->lanes));
    return gq_lanes_leased (self->lanes) | (shown < GQ_BOARD_BLOCKS ? 1u << shown : 0);
}

/* Bit i: buffer i is free.  The acquire pairs with the release in give_back: the reader's last read
 * happens before our next write. */
static uint32_t
free_ones (const gq_buffers *self)
{
    uint32_t bits = 0;
    for (size_t i = 0; i < self->size; i++)
        if (i != self->current && i != self->next &&
            !atomic_load_explicit (&self->buffers[i].lent, memory_order_acquire))
            bits |= 1u << i;
    return bits & ~read_by_actors (self);
}

float *
gq_buffers_next (gq_buffers *self)
{
    /* Buffers come back at any time: what was handed out is remembered, not searched again.  The
     * first free one: few of them are used, then, and stay in the caches. */
    if (self->next == NONE) {
        uint32_t bits = free_ones (self);
        assert (bits != 0); /* there are more than are lent, and readers hold no spare */
        self->next = (size_t)__builtin_ctz (bits);
    }
    return vector_of (&self->buffers[self->next]);
}

uint32_t
gq_buffers_current_block (const gq_buffers *self)
{
    return (uint32_t)self->current;
}

uint32_t
gq_buffers_next_block (const gq_buffers *self)
{
    assert (self->next != NONE);
    return (uint32_t)self->next;
}

void
gq_buffers_turn (gq_buffers *self)
{
    assert (self->next != NONE);
    self->current = self->next;
    self->next = NONE;
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
    int lent = 0;
    for (size_t i = 0; i < self->size; i++)
        lent += atomic_load_explicit (&self->buffers[i].lent, memory_order_acquire) ? 1 : 0;
    if (lent >= LENT_MAX || atomic_load_explicit (&which->lent, memory_order_acquire))
        return GQ_AGAIN;
    gq_frame_encode (frame, which->bytes + GQ_FRAME_HEADER_BYTES, which->bytes);
    atomic_store_explicit (&which->lent, true, memory_order_relaxed);
    if (zmq_msg_init_data (message, which->bytes, frame_bytes (self), give_back, which) != 0) {
        atomic_store_explicit (&which->lent, false, memory_order_relaxed);
        return GQ_AGAIN;
    }
    return GQ_OK;
}

bool
gq_buffers_show (gq_buffers *self, const gq_frame *frame)
{
    gq_board *board = gq_lanes_board (self->lanes);
    size_t index = self->current;
    if (index >= GQ_BOARD_BLOCKS) {
        const uint32_t bits = free_ones (self) & ((1u << GQ_BOARD_BLOCKS) - 1);
        if (bits == 0)
            return false;
        index = (size_t)__builtin_ctz (bits);
        memcpy (vector_of (&self->buffers[index]), gq_buffers_current (self),
                (size_t)self->count * sizeof (float));
    }
    /* In one that is lent it is there already, and being read. */
    if (!atomic_load_explicit (&self->buffers[index].lent, memory_order_acquire))
        gq_frame_encode_summed (frame, 0, self->buffers[index].bytes);
    gq_board_show (board, (uint32_t)index, frame->version);
    return true;
}
