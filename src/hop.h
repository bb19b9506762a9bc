/*
 * Hop: vectors between the broker and the optimizer of one host, in memory in the place of a
 * socket.  Between steps 3 and 4 of a gradient's path, and between 6 and 7, on lane inline.
 *
 * Messages go through the sockets all the same, and in their order; but one of a large vector holds
 * a ticket behind its header, and the payload lies in a slot of the file RUN/lane/broker (a
 * gradient) or in a block of the board (weights).
 *
 * What lies in a slot is on its way, as in a socket: when one of the two dies it may be lost, and
 * its actor sends it again.  But from the moment that the optimizer takes it until it is done with
 * it nobody writes there, whoever is killed: a step is made of it, and the journal may only name
 * it.
 */
#ifndef GQ_HOP_H
#define GQ_HOP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gradq/protocol.h"

/* The file's name in RUN/lane. */
#define GQ_HOP_NAME "broker"
/* Gradients on the way: one that a step is made of, and two behind it.  Others go whole. */
#define GQ_HOP_SLOTS 3
/* Smaller payloads go through the socket as fast. */
#define GQ_HOP_PAYLOAD_MIN 4096
/* What is in the place of the payload: u64 number, u32 slot, u32 0. */
#define GQ_HOP_TICKET_BYTES  16
#define GQ_HOP_MESSAGE_BYTES (GQ_FRAME_HEADER_BYTES + GQ_HOP_TICKET_BYTES)

typedef struct gq_hop gq_hop;

typedef struct gq_hop_identity {
    uint8_t run[GQ_RUN_ID_BYTES];
    uint32_t term;
    uint64_t digest;
    uint64_t count; /* elements of a vector */
} gq_hop_identity;

typedef struct gq_hop_ticket {
    uint64_t number; /* of a gradient handed on, never 0, never twice in a file; 0: weights */
    uint32_t slot;
} gq_hop_ticket;

/* Behind the header that is there already. */
void gq_hop_write (const gq_hop_ticket *ticket, uint8_t message[GQ_HOP_MESSAGE_BYTES]);
/* Is bytes[size] such a message?  Then *frame is its header, and *ticket.  Nobody else takes it for
 * a frame: it has not the size that its header says. */
bool gq_hop_read (const void *bytes, size_t size, gq_frame *frame, gq_hop_ticket *ticket);

/*
 * The optimizer's side: a new file in the place of an older one.
 * GQ_OK; GQ_FULL, GQ_IO, GQ_MEMORY with *error.
 */
GQ_CHECK gq_status gq_hop_create (gq_hop **hop_p, const char *path, const gq_hop_identity *identity,
                                  gq_error *error);
/* Is there a broker at the other end? */
bool gq_hop_attached (const gq_hop *hop);
/* As gq_board's lease words: the block that the broker copies, + 1, or 0. */
unsigned gq_hop_leased (const gq_hop *hop);
/* Take the frame that a ticket is for: from now on nobody writes there.  May be repeated.  NULL:
 * the slot is another one's by now, or free, or its broker is another one. */
const uint8_t *gq_hop_take (gq_hop *hop, const gq_hop_ticket *ticket);
/* Its slot is free. */
void gq_hop_done (gq_hop *hop, const gq_hop_ticket *ticket);
void gq_hop_remove (const gq_hop *hop); /* its name, if it is still this file's */

/*
 * Recovery: the file of an earlier life, whatever its term, to read.  Statuses of gq_hop_open.  And
 * the frame in slot i < GQ_HOP_SLOTS if that life had taken it, else NULL; trust nothing in it.
 */
GQ_CHECK gq_status gq_hop_look (gq_hop **hop_p, const char *path, const gq_hop_identity *identity,
                                gq_error *error);
const uint8_t *gq_hop_taken (const gq_hop *hop, uint32_t slot);

/*
 * The broker's side: slots are free, whatever a broker before had on the way, and no other broker
 * opens the file before this one closes it.  GQ_OK; GQ_NOTFOUND, GQ_IO, GQ_MALFORMED (of another
 * run, layout or term), GQ_MEMORY; GQ_AGAIN: somebody else has it.  With *error.
 */
GQ_CHECK gq_status gq_hop_open (gq_hop **hop_p, const char *path, const char *board_path,
                                const gq_hop_identity *identity, gq_error *error);
/* Was it opened for this run, term and layout? */
bool gq_hop_is (const gq_hop *hop, const gq_hop_identity *identity);
/* Copy a frame into a free slot.  false: it is too large, or no slot is free. */
bool gq_hop_put (gq_hop *hop, const void *frame, size_t bytes, gq_hop_ticket *ticket);
/* Its message could not be sent. */
void gq_hop_withdraw (gq_hop *hop, const gq_hop_ticket *ticket);
/* Room that a frame of weights takes; and the version that is shown now as a whole frame, in one
 * pass.  GQ_OK; GQ_NOTFOUND: none is shown; GQ_MALFORMED: what is there is no such frame. */
size_t gq_hop_weights_bytes (const gq_hop *hop);
GQ_CHECK gq_status gq_hop_weights (gq_hop *hop, uint8_t *frame);

/* Either side; the file stays. */
void gq_hop_close (gq_hop **hop_p);

#endif
