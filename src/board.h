/*
 * Board: whole versions of the weights, shown by the optimizer to the actors of its host in one
 * shared file.  Step 7 of a gradient's path on lane shm.
 *
 * A version is shown in a block.  A reader leases the block by writing its index into a word that
 * the optimizer reads, and then looks again whether it is still shown; the optimizer writes only
 * blocks that are neither shown nor leased.  All four accesses are sequentially consistent, so one
 * of the two always sees the other (Dekker): what is leased is whole and stays so.
 */
#ifndef GQ_BOARD_H
#define GQ_BOARD_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "gradq/protocol.h"

/* Blocks that are shown: one is, one is being written, and six that readers still hold.  When they
 * hold more, no newer version is shown until a block comes back. */
#define GQ_BOARD_BLOCKS 8
/* Readers that may hold one for long; the others, for the time of a copy. */
#define GQ_BOARD_HOLDERS 4
/* And blocks that never are, so that steps go on whatever readers hold. */
#define GQ_BOARD_SPARES 4
#define GQ_BOARD_ALL    (GQ_BOARD_BLOCKS + GQ_BOARD_SPARES)
#define GQ_BOARD_NONE   UINT32_MAX

/* What a lease word holds: 0 for none, else the block's index + 1. */
#define GQ_LEASE_NONE 0u

typedef struct gq_board gq_board;

typedef struct gq_board_config {
    uint8_t run[GQ_RUN_ID_BYTES];
    uint32_t term; /* to open: 0 for any */
    uint64_t digest;
    uint64_t count;      /* elements */
    uint64_t rest_bytes; /* behind the blocks, for the optimizer's own use */
} gq_board_config;

/*
 * The optimizer's side: a new file in the place of an older one, whose readers keep theirs.  Blocks
 * are zero and none is shown.  GQ_OK; GQ_FULL, GQ_IO, GQ_MEMORY with *error.
 */
GQ_CHECK gq_status gq_board_create (gq_board **board_p, const char *path,
                                    const gq_board_config *config, gq_error *error);

/* Block i < GQ_BOARD_ALL: room for a frame's header, then f32[count], 64-byte aligned. */
uint8_t *gq_board_block (const gq_board *board, uint32_t index);
/* Show block i < GQ_BOARD_BLOCKS as `version`; it is whole. */
void gq_board_show (gq_board *board, uint32_t index, uint64_t version);
uint32_t gq_board_shown (const gq_board *board); /* GQ_BOARD_NONE: none */
/* What lies behind the blocks, from a page of its own to the file's end, and at which offset of the
 * file.  Who opened the board may only read it. */
void *gq_board_rest (const gq_board *board, uint64_t *bytes, uint64_t *at);
int gq_board_fd (const gq_board *board);

/*
 * An actor's side, to read: nothing that an actor does by mistake reaches it.  GQ_OK; GQ_NOTFOUND,
 * GQ_IO, GQ_MALFORMED (no board, or of another run, layout or term than *config says), GQ_MEMORY
 * with *error.
 */
GQ_CHECK gq_status gq_board_open (gq_board **board_p, const char *path,
                                  const gq_board_config *config, gq_error *error);

/* The optimizer is about to sleep, or is awake; and does it sleep? */
void gq_board_set_idle (gq_board *board, bool idle);
bool gq_board_idle (const gq_board *board);

/* The version that is shown now, without leasing it; false: none is. */
bool gq_board_peek (const gq_board *board, uint64_t *version);

/* Lease the block that is shown, in the place of what *lease held: f32[count] and its version.
 * NULL: none is shown, and *lease is as it was. */
const float *gq_board_lease (const gq_board *board, atomic_uint *lease, uint64_t *version);

/* Remove its name, if it is still this board's. */
void gq_board_remove (const gq_board *board);

/* Either side.  The file stays; leases are words of their owner's. */
void gq_board_close (gq_board **board_p);

#endif
