/*
 * How a gradient's payload travels from an actor: steps 0 and 1 of its path.
 *
 * One lane exists, inline: the payload follows its header through the sockets.  A second one for
 * shared memory slips in behind the same four calls.
 */
#ifndef GQ_LANE_H
#define GQ_LANE_H

#include <stdint.h>
#include <zmq.h>

#include "gradq/protocol.h"

typedef struct gq_lane gq_lane;

typedef struct gq_lane_ops {
    const char *name; /* as --lane and hello name it */

    /* A lane for vectors of `count` elements.  NULL: out of memory. */
    gq_lane *(*open) (uint64_t count);

    /* The buffer f32[count] of the next frame; the same one until send took it.  NULL: memory. */
    float *(*reserve) (gq_lane *lane);

    /* Complete *frame (payload_bytes, lane), send it and the reserved buffer on `socket` without
     * waiting.  GQ_OK: sent, and *sent (may be NULL), not initialised before, is the message, to
     * send again or to close; it shares the bytes with the one on its way.  GQ_AGAIN: nothing
     * changed.  GQ_INVALID: nothing reserved. */
    gq_status (*send) (gq_lane *lane, void *socket, gq_frame *frame, zmq_msg_t *sent);

    void (*close) (gq_lane **lane_p);
} gq_lane_ops;

struct gq_lane {
    const gq_lane_ops *ops;
    uint64_t count;
};

extern const gq_lane_ops gq_lane_inline;

#endif
