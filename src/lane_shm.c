/*
 * Lane shm: a gradient is built in a slot of the actor's lane file, where the optimizer reads it,
 * and the message is its header alone, which names the slot.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <zmq.h>

#include "frame.h"
#include "lane.h"
#include "lane_file.h"
#include "reduce.h"

#define NO_SLOT UINT32_MAX

typedef struct shm_lane {
    gq_lane base;
    gq_shm file;
    uint32_t slot_count;
    uint32_t reserved;            /* NO_SLOT: none */
    bool used[GQ_WINDOW_MAX + 1]; /* on the way, or reserved */
} shm_lane;

static float *
shm_reserve (gq_lane *base)
{
    shm_lane *lane = (shm_lane *)base;
    for (uint32_t i = 0; i < lane->slot_count && lane->reserved == NO_SLOT; i++)
        if (!lane->used[i])
            lane->reserved = i;
    if (lane->reserved == NO_SLOT)
        return NULL;
    lane->used[lane->reserved] = true;
    atomic_store (&gq_lane_file_words (&lane->file)->ready[lane->reserved], 0);
    atomic_store (&gq_lane_file_words (&lane->file)->holds[lane->reserved], 0);
    return gq_lane_file_slot (&lane->file, base->count, lane->reserved);
}

static gq_status
shm_send (gq_lane *base, void *socket, gq_frame *frame, zmq_msg_t *sent)
{
    shm_lane *lane = (shm_lane *)base;
    zmq_msg_t message;
    zmq_msg_t copy;
    if (lane->reserved == NO_SLOT)
        return GQ_INVALID;
    if (zmq_msg_init_size (&message, GQ_FRAME_HEADER_BYTES) != 0)
        return GQ_AGAIN;
    frame->encoding = GQ_ENCODING_F32;
    frame->lane = GQ_LANE_SHM;
    frame->slot = lane->reserved;
    frame->payload_bytes = base->count * sizeof (float);
    /* While it is in this core's caches.  One that is not is refused, as from anybody. */
    frame->finite =
        gq_all_finite (gq_lane_file_slot (&lane->file, base->count, lane->reserved), base->count);
    gq_frame_encode (frame, NULL, zmq_msg_data (&message));
    zmq_msg_init (&copy);
    gq_lane_words *words = gq_lane_file_words (&lane->file);
    memcpy (words->headers[lane->reserved], zmq_msg_data (&message), GQ_FRAME_HEADER_BYTES);
    atomic_store (&words->holds[lane->reserved], frame->sequence);
    if (zmq_msg_copy (&copy, &message) != 0 || zmq_msg_send (&message, socket, ZMQ_DONTWAIT) < 0) {
        zmq_msg_close (&copy);
        zmq_msg_close (&message);
        return GQ_AGAIN;
    }
    atomic_store (&words->ready[lane->reserved], frame->sequence);
    lane->reserved = NO_SLOT;
    zmq_msg_init (sent);
    zmq_msg_move (sent, &copy);
    zmq_msg_close (&copy);
    return GQ_OK;
}

/* The slot that a descriptor of ours names. */
static uint32_t
slot_of (zmq_msg_t *sent, gq_frame *frame)
{
    if (gq_frame_decode (zmq_msg_data (sent), zmq_msg_size (sent), frame) != GQ_OK ||
        frame->lane != GQ_LANE_SHM)
        return NO_SLOT;
    return frame->slot;
}

static void
shm_settled (gq_lane *base, zmq_msg_t *sent)
{
    shm_lane *lane = (shm_lane *)base;
    gq_frame frame;
    uint32_t slot = slot_of (sent, &frame);
    if (slot >= lane->slot_count)
        return;
    /* An optimizer that has forgotten it (--journal off) would take it anew while we build here. */
    atomic_store (&gq_lane_file_words (&lane->file)->ready[slot], 0);
    lane->used[slot] = false;
}

static gq_status
shm_inline (gq_lane *base, zmq_msg_t *sent)
{
    shm_lane *lane = (shm_lane *)base;
    gq_frame frame;
    zmq_msg_t whole;
    uint32_t slot = slot_of (sent, &frame);
    if (slot >= lane->slot_count)
        return GQ_OK; /* it is inline already */
    if (zmq_msg_init_size (&whole, GQ_FRAME_HEADER_BYTES + (size_t)frame.payload_bytes) != 0)
        return GQ_MEMORY;
    uint8_t *header = zmq_msg_data (&whole);
    memcpy (header + GQ_FRAME_HEADER_BYTES, gq_lane_file_slot (&lane->file, base->count, slot),
            (size_t)frame.payload_bytes);
    frame.lane = GQ_LANE_INLINE;
    frame.slot = 0;
    frame.finite = false;
    gq_frame_encode (&frame, header + GQ_FRAME_HEADER_BYTES, header);
    zmq_msg_move (sent, &whole);
    zmq_msg_close (&whole);
    return GQ_OK;
}

static void
shm_close (gq_lane **lane_p)
{
    shm_lane *lane = (shm_lane *)*lane_p;
    if (lane == NULL)
        return;
    gq_lane_words *words = gq_lane_file_words (&lane->file);
    atomic_store (&words->lease, 0);
    gq_shm_close (&lane->file); /* the lock goes with it: the optimizer removes the file */
    free (lane);
    *lane_p = NULL;
}

static const gq_lane_ops shm_ops = {.name = "shm",
                                    .reserve = shm_reserve,
                                    .send = shm_send,
                                    .settled = shm_settled,
                                    .to_inline = shm_inline,
                                    .close = shm_close};

static bool
removed (const gq_shm *file)
{
    struct stat info;
    return fstat (file->fd, &info) == 0 && info.st_nlink == 0;
}

gq_status
gq_lane_shm_open (gq_lane **lane_p, gq_lane_words **words, const char *path,
                  gq_lane_identity *identity, gq_error *error)
{
    shm_lane *lane = calloc (1, sizeof *lane);
    *lane_p = NULL;
    if (lane == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory");
    gq_status status = gq_lane_file_open (&lane->file, path, identity, error);
    if (status == GQ_OK && !gq_shm_lock (&lane->file))
        status = gq_fail (error, GQ_REFUSED, "%.900s is another process's", path);
    /* The optimizer locks a file before it gives up waiting for us: one that we lock after that is
     * removed, and nobody would see what we lease. */
    if (status == GQ_OK && removed (&lane->file))
        status = gq_fail (error, GQ_NOTFOUND, "%.900s was removed: we came too late", path);
    if (status != GQ_OK) {
        gq_shm_close (&lane->file);
        free (lane);
        return status;
    }
    lane->base = (gq_lane){.ops = &shm_ops, .count = identity->count};
    lane->slot_count = identity->slot_count;
    lane->reserved = NO_SLOT;
    *words = gq_lane_file_words (&lane->file);
    atomic_store (&(*words)->attached, 1);
    *lane_p = &lane->base;
    return GQ_OK;
}

bool
gq_lane_shm_removed (const gq_lane *base)
{
    return removed (&((const shm_lane *)base)->file);
}
