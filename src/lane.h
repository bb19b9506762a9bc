/*
 * How a gradient's payload travels from an actor: steps 0 and 1 of its path.
 *
 * inline: the payload follows its header through the sockets, as float32 or bfloat16.  shm: it lies
 * in shared memory as float32, and the header alone travels.
 */
#ifndef GQ_LANE_H
#define GQ_LANE_H

#include <stdint.h>
#include <zmq.h>

#include "gradq/protocol.h"
#include "lane_file.h"

typedef struct gq_lane gq_lane;

typedef struct gq_lane_ops {
    const char *name; /* as --lane and hello name it */

    /* The buffer f32[count] of the next frame; the same one until send took it.  NULL: memory. */
    float *(*reserve) (gq_lane *lane);

    /* Complete *frame (encoding, payload_bytes, lane, slot), send it and the reserved buffer on
     * `socket` without waiting.  GQ_OK: sent, and *sent, not initialised before, is the message, to
     * send again until the gradient is settled; it shares the bytes with the one on its way.
     * GQ_AGAIN, GQ_MEMORY: nothing changed.  GQ_INVALID: nothing reserved. */
    gq_status (*send) (gq_lane *lane, void *socket, gq_frame *frame, zmq_msg_t *sent);

    /* The gradient in *sent, which stays the caller's, is settled: its buffer is free again. */
    void (*settled) (gq_lane *lane, zmq_msg_t *sent);

    /* Make *sent a message of lane inline, with the same number and bytes: this lane ends.
     * GQ_OK, GQ_MEMORY. */
    gq_status (*to_inline) (gq_lane *lane, zmq_msg_t *sent);

    void (*close) (gq_lane **lane_p);
} gq_lane_ops;

struct gq_lane {
    const gq_lane_ops *ops;
    uint64_t count;
    gq_lane *next; /* for who keeps several */
};

/* A lane for vectors of `count` elements, which travel in that encoding (f32 or bf16).  GQ_OK,
 * GQ_MEMORY. */
GQ_CHECK gq_status gq_lane_inline_open (gq_lane **lane_p, uint64_t count, gq_encoding encoding);

/*
 * The lane of the file at `path`, locked for the life of this process; *words is its beginning, for
 * as long as the lane is open.  GQ_OK; GQ_NOTFOUND, GQ_IO, GQ_MALFORMED, GQ_REFUSED (another
 * process has it), GQ_MEMORY with *error.
 */
GQ_CHECK gq_status gq_lane_shm_open (gq_lane **lane_p, gq_lane_words **words, const char *path,
                                     gq_lane_identity *identity, gq_error *error);

/* Has the optimizer removed the file?  Then it does not know this life, or takes it for over. */
bool gq_lane_shm_removed (const gq_lane *lane);

#endif
