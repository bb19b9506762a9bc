/*
 * Inline lane: header and payload in one ZeroMQ message, sent without a copy.  A float32 vector is
 * built in the message itself; one that travels as bfloat16 beside it, and is rounded into it.
 */
#include <stdlib.h>
#include <zmq.h>

#include "bf16.h"
#include "frame.h"
#include "lane.h"

typedef struct inline_lane {
    gq_lane base;
    float *vector;     /* bf16: f32[count], where each vector is built; NULL before the first */
    zmq_msg_t message; /* of the next frame; bf16: only while it is being sent */
    gq_encoding encoding;
    int reserved;
} inline_lane;

static uint8_t *
header_of (inline_lane *lane)
{
    return zmq_msg_data (&lane->message);
}

static size_t
payload_bytes (const inline_lane *lane)
{
    const size_t element = lane->encoding == GQ_ENCODING_BF16 ? sizeof (uint16_t) : sizeof (float);
    return (size_t)lane->base.count * element;
}

static gq_status
make_message (inline_lane *lane)
{
    size_t size = GQ_FRAME_HEADER_BYTES + payload_bytes (lane);
    return zmq_msg_init_size (&lane->message, size) == 0 ? GQ_OK : GQ_MEMORY;
}

static float *
reserve_beside (inline_lane *lane)
{
    if (lane->vector == NULL)
        lane->vector = malloc ((size_t)lane->base.count * sizeof *lane->vector);
    lane->reserved = lane->vector != NULL;
    return lane->vector;
}

static float *
inline_reserve (gq_lane *base)
{
    inline_lane *lane = (inline_lane *)base;
    if (lane->encoding == GQ_ENCODING_BF16)
        return reserve_beside (lane);
    if (!lane->reserved && make_message (lane) != GQ_OK)
        return NULL;
    lane->reserved = 1;
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
    const bool beside = lane->encoding == GQ_ENCODING_BF16;
    if (beside && make_message (lane) != GQ_OK)
        return GQ_MEMORY;
    uint8_t *payload = header_of (lane) + GQ_FRAME_HEADER_BYTES;
    if (beside)
        gq_bf16_encode (lane->vector, payload, base->count);
    frame->encoding = (uint16_t)lane->encoding;
    frame->lane = GQ_LANE_INLINE;
    frame->payload_bytes = payload_bytes (lane);
    frame->slot = 0;
    gq_frame_encode (frame, payload, header_of (lane));
    zmq_msg_t copy;
    zmq_msg_init (&copy);
    if (zmq_msg_copy (&copy, &lane->message) != 0 ||
        zmq_msg_send (&lane->message, socket, ZMQ_DONTWAIT) < 0) {
        zmq_msg_close (&copy);
        if (beside) /* until the next try the caller may write to the vector */
            zmq_msg_close (&lane->message);
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
    if (lane->reserved && lane->encoding != GQ_ENCODING_BF16)
        zmq_msg_close (&lane->message);
    free (lane->vector);
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
gq_lane_inline_open (gq_lane **lane_p, uint64_t count, gq_encoding encoding)
{
    inline_lane *lane = calloc (1, sizeof *lane);
    *lane_p = (gq_lane *)lane;
    if (lane == NULL)
        return GQ_MEMORY;
    lane->base = (gq_lane){.ops = &inline_ops, .count = count};
    lane->encoding = encoding;
    return GQ_OK;
}
