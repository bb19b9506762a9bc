/*
 * Hop: its file and its words.
 */
#include "hop.h"

#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "board.h"
#include "frame.h"
#include "shm.h"

#define MAGIC  0x31485147u /* "GQH1" */
#define LAYOUT 1

#define LOCK_TRIES 10

typedef struct words {
    uint32_t magic, layout;
    gq_hop_identity identity;
    uint64_t slot_bytes; /* from one slot to the next */

    /* written by the optimizer */
    _Alignas(64) atomic_ullong takes[GQ_HOP_SLOTS]; /* the number it is at work on; 0: none */
    atomic_ullong done[GQ_HOP_SLOTS];               /* the last that it was done with */

    /* written by the broker */
    _Alignas(64) atomic_uint attached; /* 1: locked, or was */
    atomic_uint lease;                 /* on a block of the board (board.h) */
    atomic_ullong last;                /* number given */
    atomic_ullong holds[GQ_HOP_SLOTS]; /* the number of what lies in each slot; 0: nothing whole */
} words;

_Static_assert(sizeof (words) <= GQ_SHM_PAGE, "the words have a page");
/* docs/PROTOCOL.md has these. */
_Static_assert(offsetof (words, slot_bytes) == 48 && offsetof (words, takes) == 64 &&
                   offsetof (words, done) == 88 && offsetof (words, attached) == 128 &&
                   offsetof (words, last) == 136 && offsetof (words, holds) == 144,
               "the layout is part of the protocol");

struct gq_hop {
    gq_shm shm;
    gq_board *board; /* the broker's, to read */
    gq_hop_identity identity;
};

static words *
words_of (const gq_hop *self)
{
    return (words *)(void *)self->shm.bytes;
}

/* The payload begins on a page of its own; its header ends the page before. */
static uint64_t
slot_bytes (const gq_hop_identity *identity)
{
    const uint64_t pages = (identity->count * sizeof (float) + GQ_SHM_PAGE - 1) / GQ_SHM_PAGE;
    return (1 + pages) * GQ_SHM_PAGE;
}

static size_t
file_bytes (const gq_hop_identity *identity)
{
    return (size_t)(GQ_SHM_PAGE + GQ_HOP_SLOTS * slot_bytes (identity));
}

static uint8_t *
frame_in (const gq_hop *self, uint32_t slot)
{
    return self->shm.bytes + 2 * GQ_SHM_PAGE - GQ_FRAME_HEADER_BYTES +
           slot * slot_bytes (&self->identity);
}

void
gq_hop_write (const gq_hop_ticket *ticket, uint8_t message[GQ_HOP_MESSAGE_BYTES])
{
    uint8_t *at = message + GQ_FRAME_HEADER_BYTES;
    memset (at, 0, GQ_HOP_TICKET_BYTES);
    memcpy (at, &ticket->number, sizeof ticket->number);
    memcpy (at + sizeof ticket->number, &ticket->slot, sizeof ticket->slot);
}

bool
gq_hop_read (const void *bytes, size_t size, gq_frame *frame, gq_hop_ticket *ticket)
{
    const uint8_t *at = (const uint8_t *)bytes + GQ_FRAME_HEADER_BYTES;
    gq_frame read;
    if (size != GQ_HOP_MESSAGE_BYTES || gq_frame_decode_header (bytes, &read) != GQ_OK ||
        read.lane != GQ_LANE_INLINE || read.payload_bytes < GQ_HOP_PAYLOAD_MIN)
        return false;
    *frame = read;
    memcpy (&ticket->number, at, sizeof ticket->number);
    memcpy (&ticket->slot, at + sizeof ticket->number, sizeof ticket->slot);
    return true;
}

gq_status
gq_hop_create (gq_hop **hop_p, const char *path, const gq_hop_identity *identity, gq_error *error)
{
    *hop_p = NULL;
    gq_hop *self = calloc (1, sizeof *self);
    if (self == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory");
    self->identity = *identity;
    gq_status status = gq_shm_create (&self->shm, path, file_bytes (identity), error);
    if (status == GQ_OK) {
        words *const all = words_of (self);
        all->magic = MAGIC;
        all->layout = LAYOUT;
        all->identity = *identity;
        all->slot_bytes = slot_bytes (identity);
        status = gq_shm_show (&self->shm, error);
    }
    *hop_p = self;
    if (status != GQ_OK)
        gq_hop_close (hop_p);
    return status;
}

bool
gq_hop_attached (const gq_hop *self)
{
    return atomic_load (&words_of (self)->attached) != 0 && gq_shm_locked (&self->shm);
}

unsigned
gq_hop_leased (const gq_hop *self)
{
    return atomic_load (&words_of (self)->lease);
}

/* Both sides write a word of their own, then read the other's: the optimizer that it takes a
 * number, and whether the slot still holds it; the broker that a slot holds nothing, and whether it
 * is taken.  All four are sequentially consistent, so one of the two sees the other (Dekker). */
const uint8_t *
gq_hop_take (gq_hop *self, const gq_hop_ticket *ticket)
{
    words *const all = words_of (self);
    if (ticket->number == 0 || ticket->slot >= GQ_HOP_SLOTS)
        return NULL;
    atomic_store (&all->takes[ticket->slot], ticket->number);
    if (atomic_load (&all->holds[ticket->slot]) == ticket->number)
        return frame_in (self, ticket->slot);
    atomic_store (&all->takes[ticket->slot], 0);
    return NULL;
}

void
gq_hop_done (gq_hop *self, const gq_hop_ticket *ticket)
{
    words *const all = words_of (self);
    if (ticket->number == 0 || ticket->slot >= GQ_HOP_SLOTS ||
        atomic_load (&all->takes[ticket->slot]) != ticket->number)
        return;
    atomic_store (&all->done[ticket->slot], ticket->number);
    atomic_store (&all->takes[ticket->slot], 0);
}

const uint8_t *
gq_hop_taken (const gq_hop *self, uint32_t slot)
{
    return atomic_load (&words_of (self)->takes[slot]) == 0 ? NULL : frame_in (self, slot);
}

void
gq_hop_remove (const gq_hop *self)
{
    gq_shm_remove (&self->shm);
}

/* `wanted` may have term 0, for any. */
static bool
same (const gq_hop_identity *found, const gq_hop_identity *wanted)
{
    return memcmp (found->run, wanted->run, GQ_RUN_ID_BYTES) == 0 &&
           (wanted->term == 0 || found->term == wanted->term) && found->digest == wanted->digest &&
           found->count == wanted->count;
}

bool
gq_hop_is (const gq_hop *self, const gq_hop_identity *identity)
{
    return same (&self->identity, identity);
}

/* Map an existing file of *identity. */
static gq_status
map (gq_hop **hop_p, const char *path, const gq_hop_identity *identity, gq_error *error)
{
    *hop_p = NULL;
    gq_hop *self = calloc (1, sizeof *self);
    if (self == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory");
    self->identity = *identity;
    gq_status status = gq_shm_open (&self->shm, path, file_bytes (identity), error);
    const words *found = words_of (self);
    if (status == GQ_OK &&
        (found->magic != MAGIC || found->layout != LAYOUT || !same (&found->identity, identity) ||
         found->slot_bytes != slot_bytes (identity)))
        status = gq_fail (error, GQ_MALFORMED, "%.900s is not this run's of term %u", path,
                          identity->term);
    *hop_p = self;
    if (status != GQ_OK)
        gq_hop_close (hop_p);
    return status;
}

gq_status
gq_hop_look (gq_hop **hop_p, const char *path, const gq_hop_identity *identity, gq_error *error)
{
    gq_hop_identity any_term = *identity;
    any_term.term = 0;
    return map (hop_p, path, &any_term, error);
}

/* Nothing that a broker before us had on the way is anybody's any more. */
static void
attach (gq_hop *self)
{
    words *const all = words_of (self);
    atomic_store (&all->lease, GQ_LEASE_NONE);
    for (size_t i = 0; i < GQ_HOP_SLOTS; i++)
        atomic_store (&all->holds[i], 0);
    atomic_store (&all->attached, 1);
}

/* The optimizer looks whether it is locked, which locks it for a moment. */
static bool
lock (const gq_shm *shm)
{
    for (int i = 0; i < LOCK_TRIES; i++) {
        if (gq_shm_lock (shm))
            return true;
        sched_yield ();
    }
    return false;
}

gq_status
gq_hop_open (gq_hop **hop_p, const char *path, const char *board_path,
             const gq_hop_identity *identity, gq_error *error)
{
    gq_board_config board = {
        .term = identity->term, .digest = identity->digest, .count = identity->count};
    memcpy (board.run, identity->run, GQ_RUN_ID_BYTES);
    gq_status status = map (hop_p, path, identity, error);
    if (status != GQ_OK)
        return status;
    gq_hop *self = *hop_p;
    status = gq_board_open (&self->board, board_path, &board, error);
    if (status == GQ_OK && !lock (&self->shm))
        status = gq_fail (error, GQ_AGAIN, "another process has %.900s", path);
    if (status == GQ_OK)
        attach (self);
    else
        gq_hop_close (hop_p);
    return status;
}

/* Is the slot free?  Then it holds nothing from here on. */
static bool
clear (words *all, uint32_t slot)
{
    const uint64_t holds = atomic_load (&all->holds[slot]);
    if (holds != 0 && atomic_load (&all->done[slot]) != holds)
        return false;
    atomic_store (&all->holds[slot], 0);
    return atomic_load (&all->takes[slot]) == 0;
}

bool
gq_hop_put (gq_hop *self, const void *frame, size_t bytes, gq_hop_ticket *ticket)
{
    words *const all = words_of (self);
    uint32_t slot = 0;
    if (bytes > slot_bytes (&self->identity) - GQ_SHM_PAGE + GQ_FRAME_HEADER_BYTES)
        return false;
    while (slot < GQ_HOP_SLOTS && !clear (all, slot))
        slot++;
    if (slot == GQ_HOP_SLOTS)
        return false;
    memcpy (frame_in (self, slot), frame, bytes);
    *ticket = (gq_hop_ticket){.number = atomic_fetch_add (&all->last, 1) + 1, .slot = slot};
    atomic_store (&all->holds[slot], ticket->number);
    return true;
}

void
gq_hop_withdraw (gq_hop *self, const gq_hop_ticket *ticket)
{
    atomic_store (&words_of (self)->holds[ticket->slot], 0);
}

size_t
gq_hop_weights_bytes (const gq_hop *self)
{
    return GQ_FRAME_HEADER_BYTES + (size_t)self->identity.count * sizeof (float);
}

gq_status
gq_hop_weights (gq_hop *self, uint8_t *frame)
{
    const size_t bytes = (size_t)self->identity.count * sizeof (float);
    atomic_uint *lease = &words_of (self)->lease;
    uint64_t version;
    gq_frame shown;
    const float *vector = gq_board_lease (self->board, lease, &version);
    uint32_t crc = 0;
    if (vector != NULL) {
        memcpy (frame, (const uint8_t *)vector - GQ_FRAME_HEADER_BYTES, GQ_FRAME_HEADER_BYTES);
        crc = gq_crc32c_copy (frame + GQ_FRAME_HEADER_BYTES, vector, bytes);
    }
    atomic_store (lease, GQ_LEASE_NONE);
    if (vector == NULL)
        return GQ_NOTFOUND;
    if (gq_frame_decode_header (frame, &shown) != GQ_OK || shown.kind != GQ_KIND_WEIGHTS ||
        shown.payload_bytes != bytes || shown.version != version)
        return GQ_MALFORMED;
    gq_frame_encode_summed (&shown, crc, frame);
    return GQ_OK;
}

void
gq_hop_close (gq_hop **hop_p)
{
    gq_hop *self = *hop_p;
    if (self == NULL)
        return;
    gq_board_close (&self->board);
    gq_shm_close (&self->shm);
    free (self);
    *hop_p = NULL;
}
