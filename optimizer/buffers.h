/*
 * Rotating weights: the reason why nobody ever sees a torn version.  Steps 5 and 6 of a gradient's
 * path.
 *
 * A version, once current, is never written again while anybody can read it.  A step reads the
 * current buffer and writes another, free one, which then becomes current.  Publishing lends the
 * current buffer to ZeroMQ without a copy; its I/O thread gives it back.  With lane shm the buffers
 * are blocks of the board, where actors of this host read them in place.
 */
#ifndef GQ_BUFFERS_H
#define GQ_BUFFERS_H

#include <stdbool.h>
#include <stdint.h>
#include <zmq.h>

#include "gradq/protocol.h"
#include "lanes.h"

typedef struct gq_buffers gq_buffers;

/* For vectors of `count` elements, all zero; blocks of the board of `lanes` (borrowed), or memory
 * of our own when that is NULL.  NULL: out of memory. */
gq_buffers *gq_buffers_new (uint64_t count, gq_lanes *lanes);

/* Every message lent must have come back: terminate the ZeroMQ context first.  Asserted. */
void gq_buffers_free (gq_buffers **buffers_p);

const float *gq_buffers_current (const gq_buffers *buffers); /* f32[count], 64-byte aligned */

/* A free buffer f32[count] to write the next version to.  There always is one, whatever readers
 * hold. */
float *gq_buffers_next (gq_buffers *buffers);

/* Which block of the board they are. */
uint32_t gq_buffers_current_block (const gq_buffers *buffers);
uint32_t gq_buffers_next_block (const gq_buffers *buffers); /* after gq_buffers_next */

/* The buffer of gq_buffers_next is whole: it becomes the current one. */
void gq_buffers_turn (gq_buffers *buffers);

/*
 * Lend the current buffer: encode *frame's header in front of it and make *message of both.
 * GQ_OK: send or close the message.  GQ_AGAIN: readers are so far behind that lending this one too
 * would leave no buffer for the next step; a later version will do.
 */
GQ_CHECK gq_status gq_buffers_lend (gq_buffers *buffers, const gq_frame *frame, zmq_msg_t *message);

/*
 * Show the current version, frame->version, to readers of this host, in place where it lies in a
 * block that may be shown, with *frame's header in front of it, whose checksum of the payload means
 * nothing.  false: it does not, and readers hold all that may be; again later.  There are lanes.
 */
bool gq_buffers_show (gq_buffers *buffers, const gq_frame *frame);

#endif
