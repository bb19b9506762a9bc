/*
 * Lanes: the optimizer's side of lane shm.  The directory RUN/lane, with the board and one lane
 * file for each life of an actor on this host.  Steps 4 and 6 of a gradient's path.
 *
 * Everything here may fail or be missing: an actor then takes lane inline.
 */
#ifndef GQ_LANES_H
#define GQ_LANES_H

#include <stdbool.h>
#include <stdint.h>

#include "board.h"
#include "hop.h"
#include "ledger.h"

typedef struct gq_lanes gq_lanes;

typedef struct gq_lanes_config {
    const char *directory; /* made if need be; absolute, for it is told to actors */
    uint8_t run[GQ_RUN_ID_BYTES];
    uint32_t term;
    uint64_t digest;
    uint64_t count;            /* elements */
    uint64_t board_rest_bytes; /* as gq_board_config.rest_bytes */
} gq_lanes_config;

/*
 * Create the board of this life, and take up the files of actors that outlived the one before.
 * Files of actors that did not are removed: recovery has read what it needs by now.
 *
 * GQ_OK; GQ_FULL, GQ_IO, GQ_MEMORY with *error, and *lanes_p is NULL: go on without this lane.
 */
GQ_CHECK gq_status gq_lanes_open (gq_lanes **lanes_p, const gq_lanes_config *config,
                                  const gq_ledger *ledger, gq_error *error);

/* A clean end: removes the board, unless it is kept, and the files of actors that are gone. */
void gq_lanes_close (gq_lanes **lanes_p);
/* The board may hold what is nowhere else: the next life looks into it. */
void gq_lanes_keep_board (gq_lanes *lanes);

/* What an earlier life left in `directory`, for one that offers no memory: the same. */
void gq_lanes_sweep (const char *directory);

gq_board *gq_lanes_board (gq_lanes *lanes);
const char *gq_lanes_board_path (const gq_lanes *lanes);
/* The way to and from a broker of this host, and its path; NULL: there is no room for it. */
gq_hop *gq_lanes_hop (gq_lanes *lanes);
const char *gq_lanes_hop_path (const gq_lanes *lanes);

/*
 * An actor was granted `epoch`: fence its earlier life, and make a file for this one, for `window`
 * gradients on the way.  The same epoch again: the same file.
 * NULL: no space for it, say; *error has the reason.  Else its path, ours until the next call.
 */
const char *gq_lanes_grant (gq_lanes *lanes, uint32_t actor, uint32_t epoch, uint32_t window,
                            gq_error *error);

/* The vector f32[count] that a descriptor names.  NULL: its actor has no such file or slot, or the
 * slot holds another gradient by now. */
const float *gq_lanes_vector (const gq_lanes *lanes, const gq_frame *frame);

/*
 * A gradient that `ledger` has not seen lies ready in some actor's slot: its descriptor, which is
 * on its way through the queue as well.  Of all actors in turn, each at most once.  false: there is
 * none.
 */
bool gq_lanes_ready (gq_lanes *lanes, const gq_ledger *ledger,
                     uint8_t header[GQ_FRAME_HEADER_BYTES]);
/* A descriptor came: is it of one that gq_lanes_ready gave?  Then it is no duplicate, this once. */
bool gq_lanes_announced (gq_lanes *lanes, const gq_frame *frame);
/* How many gq_lanes_ready gave whose descriptors have not come, as far as is known. */
uint64_t gq_lanes_early (const gq_lanes *lanes);
/* How many it gave in all. */
uint64_t gq_lanes_early_total (const gq_lanes *lanes);
/* They are lost: the broker is another one. */
void gq_lanes_forget_early (gq_lanes *lanes);
/* Readable after an actor has rung (bell.h), -1: there is none; and forget the rings. */
int gq_lanes_bell (const gq_lanes *lanes);
void gq_lanes_silence (const gq_lanes *lanes);

/* Tell the actor by its file, and wake it.  false: it has none, or does not read it. */
bool gq_lanes_ack (gq_lanes *lanes, uint32_t actor, uint32_t epoch, const gq_ack *ack,
                   uint64_t version);

/* A gradient came inline: an actor that has not attached its file by then never will. */
void gq_lanes_goes_inline (gq_lanes *lanes, uint32_t actor, uint32_t epoch);

/* Bit i: block i of the board is leased. */
uint32_t gq_lanes_leased (const gq_lanes *lanes);

/* A version was shown that some may have waited for longer than for their acknowledgement. */
void gq_lanes_ring_all (gq_lanes *lanes);

/* Each second: say that we live, and forget actors that do not, or that never came. */
void gq_lanes_tend (gq_lanes *lanes);

#endif
