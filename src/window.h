/*
 * Window: the gradients of one actor that are sent but not settled, and when to send them again.
 * Step 1 of a gradient's path.  Pure arithmetic: the owner holds the bytes, the sockets, the clock.
 */
#ifndef GQ_WINDOW_H
#define GQ_WINDOW_H

#include <stdbool.h>
#include <stdint.h>

#include "gradq/limits.h"

typedef struct gq_window_slot {
    uint64_t sequence; /* 0: free */
    uint64_t due_ns;   /* when to send it again */
    uint32_t sends;
} gq_window_slot;

typedef struct gq_window {
    uint32_t size;       /* slots in use, 1 .. GQ_WINDOW_MAX */
    uint64_t sequence;   /* last one given out */
    uint64_t cumulative; /* all up to here are settled */
    uint64_t received;   /* all up to here have come; the rest of them waits for its step */
    uint64_t resend_ns;  /* first time-out; doubles with each resend, up to four times it */
    uint64_t resent;     /* how often anything was sent again */
    uint64_t random;     /* state of the jitter */
    gq_window_slot slots[GQ_WINDOW_MAX];
} gq_window;

void gq_window_init (gq_window *window, uint32_t size, uint64_t resend_ns, uint64_t seed);

/* Is there room for another gradient? */
bool gq_window_room (const gq_window *window);

/* The next gradient was sent at now_ns: *slot is where the owner keeps its bytes; returns its
 * sequence number.  There is room: asserted. */
uint64_t gq_window_sent (gq_window *window, uint64_t now_ns, uint32_t *slot);

/*
 * An acknowledgement: everything up to `cumulative`, and cumulative + 1 + i for each bit i of
 * `beyond`.  Bit k of the result: the bytes in slot k are no longer needed.  Older and impossible
 * acknowledgements change nothing.
 */
uint64_t gq_window_settle (gq_window *window, uint64_t cumulative, uint64_t beyond);

/* Every number up to `number` has come to the optimizer, settled or waiting for its step.  Older
 * and impossible ones change nothing. */
void gq_window_received (gq_window *window, uint64_t number);

/*
 * Does an acknowledgement of a later life of the optimizer lack a number that was settled before?
 * (cumulative, beyond) as above.  Then that life has lost it, and this window's numbers mean
 * nothing to it.
 */
bool gq_window_rolled_back (const gq_window *window, uint64_t cumulative, uint64_t beyond);

/* The slot whose gradient is due to be sent again at now_ns, oldest first; -1 for none. */
int gq_window_due (const gq_window *window, uint64_t now_ns);

/* The gradient in `slot` was sent again at now_ns. */
void gq_window_resent (gq_window *window, uint32_t slot, uint64_t now_ns);

/* When gq_window_due has something; UINT64_MAX when nothing is on the way. */
uint64_t gq_window_next_ns (const gq_window *window);

/* Gradients on the way. */
uint32_t gq_window_count (const gq_window *window);

#endif
