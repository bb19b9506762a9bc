/*
 * Bell: an actor of this host wakes the optimizer that sleeps.  Beside step 3 of a gradient's path
 * on lane shm.
 *
 * A datagram socket whose name, in no directory, is the board's device and inode: nothing is left
 * behind.  It carries nothing and promises nothing: the descriptor comes through the queue in any
 * case, only later.
 */
#ifndef GQ_BELL_H
#define GQ_BELL_H

#include <stdint.h>

typedef struct gq_bell_name {
    uint64_t device, inode;
} gq_bell_name;

/* Of the optimizer whose board is open as `board_fd`. */
gq_bell_name gq_bell_name_of (int board_fd);

/* The optimizer's end: readable after a ring.  -1: none. */
int gq_bell_open (gq_bell_name name);
/* Forget the rings so far, as many as a crowd makes: of a flood, the rest is heard next time. */
void gq_bell_silence (int bell);

/* An actor's end, for any bell; -1: none. */
int gq_bell_rope (void);
void gq_bell_ring (int rope, gq_bell_name name);

#endif
