/*
 * Inline lane: header and payload in one ZeroMQ message, built in place and sent without a copy.
 */
#include <stdlib.h>
#include <zmq.h>

#include "frame.h"
#include "lane.h"

typedef struct inline_lane {
    gq_lane base;
    zmq_msg_t message;
    int reserved;
} inline_lane;

static uint8_t *
header_of (inline_lane *lane)
{
    return zmq_msg_data (&lane->message);
}

static float *
inline_reserve (gq_lane *base)
{
    inline_lane *lane = (inline_lane *)base;
    if (!lane->reserved) {
        size_t size = GQ_FRAME_HEADER_BYTES + (size_t)base->count * sizeof (float);
        if (zmq_msg_init_size (&lane->message, size) != 0)
            return NULL;
        lane->reserved = 1;
    }
    /* A new message's bytes are aligned for any type up to 8 bytes, small ones lie in the
     * zmq_msg_t itself only below 34 bytes, which a header never is. */
    return (float *)(void *)(header_of (lane) + GQ_FRAME_HEADER_BYTES);
}

static gq_status
inline_send (gq_lane *base, void *socket, gq_frame *frame, zmq_msg_t *sent)
{
    inline_lane *lane = (inline_lane *)base;
    if (!lane->reserved)
        return GQ_INVALID;
    frame->lane = GQ_LANE_INLINE;
    frame->payload_bytes = base->count * sizeof (float);
    frame->slot = 0;
    gq_frame_encode (frame, header_of (lane) + GQ_FRAME_HEADER_BYTES, header_of (lane));
    zmq_msg_t copy;
    zmq_msg_init (&copy);
    if (zmq_msg_copy (&copy, &lane->message) != 0 ||
        zmq_msg_send (&lane->message, socket, ZMQ_DONTWAIT) < 0) {
        zmq_msg_close (&copy);
        return GQ_AGAIN;
    }
    lane->reserved = 0;
    zmq_msg_init (sent);
    zmq_msg_move (sent, &copy);
    zmq_msg_close (&copy);
    return GQ_OK;
}

static void
inline_settled (gq_lane *lane, zmq_msg_t *sent)
{
    (void)lane; /* the message is the buffer */
    (void)sent;
}

static gq_status
inline_to_inline (gq_lane *lane, zmq_msg_t *sent)
{
    (void)lane;
    (void)sent;
    return GQ_OK;
}

static void
inline_close (gq_lane **lane_p)
{
    inline_lane *lane = (inline_lane *)*lane_p;
    if (lane == NULL)
        return;
    if (lane->reserved)
        zmq_msg_close (&lane->message);
    free (lane);
    *lane_p = NULL;
}

static const gq_lane_ops inline_ops = {.name = "inline",
                                       .reserve = inline_reserve,
                                       .send = inline_send,
                                       .settled = inline_settled,
                                       .to_inline = inline_to_inline,
                                       .close = inline_close};

gq_status
gq_lane_inline_open (gq_lane **lane_p, uint64_t count)
{
    inline_lane *lane = calloc (1, sizeof *lane);
    *lane_p = (gq_lane *)lane;
    if (lane == NULL)
        return GQ_MEMORY;
    lane->base = (gq_lane){.ops = &inline_ops, .count = count};
    return GQ_OK;
}
