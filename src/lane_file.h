/*
 * Lane file: the shared memory between one life of an actor and the optimizer.  Slots in which the
 * actor builds gradients for the optimizer to copy, and words by which the two tell
 * each other what the sockets would, only sooner.  Steps 1, 6 and 7 of a gradient's path on lane
 * shm.
 *
 * The optimizer creates the file when it grants the epoch; the actor locks it for its life.  A slot
 * is the actor's until the descriptor that names it is sent, then nobody writes it until it is
 * settled.  The sockets stay the truth: whatever is said here is said there too, later.
 */
#ifndef GQ_LANE_FILE_H
#define GQ_LANE_FILE_H

#include <limits.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "gradq/protocol.h"
#include "shm.h"

/* Whose file it is, and of what shape. */
typedef struct gq_lane_identity {
    uint8_t run[GQ_RUN_ID_BYTES];
    uint32_t actor, epoch;
    uint64_t count;      /* elements of a vector */
    uint32_t slot_count; /* 1 .. GQ_WINDOW_MAX + 1: a window of gradients and one being built */
} gq_lane_identity;

/* The last acknowledgement, and how far the optimizer was when it gave it. */
typedef struct gq_lane_ack {
    gq_ack ack;
    uint64_t version;
    uint32_t term;
} gq_lane_ack;

#define GQ_LANE_ACK_WORDS 7

/* The beginning of the file. */
typedef struct gq_lane_words {
    uint32_t magic, layout;
    gq_lane_identity identity;
    uint64_t slot_bytes; /* from one slot to the next */

    /* written by the optimizer */
    _Alignas(64) atomic_uint bell; /* rises with each change below; the actor sleeps on it */
    atomic_uint beat;              /* rises at least once a second: the optimizer lives */
    atomic_uint term;              /* of the optimizer that serves this file and shows the board */
    atomic_uint fenced;            /* 1: another life of this actor has begun */
    atomic_uint turn;              /* of the acknowledgement: odd while it is written */
    atomic_ullong ack[GQ_LANE_ACK_WORDS];
    atomic_uint may_hold; /* 1: the actor may lease a block for as long as it computes */

    /* written by the actor */
    _Alignas(64) atomic_uint attached; /* 1: locked, and the words above are read */
    atomic_uint lease;                 /* on a block of the board (board.h) */
    atomic_uint waiting;               /* 1: sleeps on the bell, or is about to */
    /* The sequence number of the gradient in each slot, 0 while it is being built: a descriptor
     * that comes late, of a slot that has been used anew, shows. */
    atomic_ullong holds[GQ_WINDOW_MAX + 1];
    /* The same once its descriptor was sent, which is in `headers` as well: an optimizer that has
     * nothing else to do need not wait for the message. */
    atomic_ullong ready[GQ_WINDOW_MAX + 1];
    uint8_t headers[GQ_WINDOW_MAX + 1][GQ_FRAME_HEADER_BYTES];
} gq_lane_words;

/* "DIR/actor-ID-EPOCH"; false: too long. */
bool gq_lane_file_path (char path[PATH_MAX], const char *directory, uint32_t actor, uint32_t epoch);
/* ID and EPOCH of such a name, without the directory; false: it is none. */
bool gq_lane_file_parse (const char *name, uint32_t *actor, uint32_t *epoch);

/* The optimizer's side.  Statuses of gq_shm_create. */
GQ_CHECK gq_status gq_lane_file_create (gq_shm *shm, const char *path,
                                        const gq_lane_identity *identity, gq_error *error);

/* Either side: open an existing one, which must be *identity's; slot_count is filled in.
 * GQ_OK; GQ_NOTFOUND, GQ_IO, GQ_MALFORMED with *error. */
GQ_CHECK gq_status gq_lane_file_open (gq_shm *shm, const char *path, gq_lane_identity *identity,
                                      gq_error *error);

gq_lane_words *gq_lane_file_words (const gq_shm *shm);
/* Slot `index`, below slot_count, of a file for vectors of `count`: f32[count], on a page of its
 * own.  Both as they were when it was opened: what the file says now is the other side's word. */
float *gq_lane_file_slot (const gq_shm *shm, uint64_t count, uint32_t index);

/* One writer, any reader; *ack is whole or, if the writer died in between, false. */
void gq_lane_ack_write (gq_lane_words *words, const gq_lane_ack *ack);
bool gq_lane_ack_read (gq_lane_words *words, gq_lane_ack *ack);

/* Something changed: wake the actor if it sleeps. */
void gq_lane_ring (gq_lane_words *words);
/* Sleep until the bell is no longer `seen`, at most wait_ns. */
void gq_lane_sleep (gq_lane_words *words, unsigned seen, uint64_t wait_ns);

#endif
