/*
 * Tells the broker how many gradients were taken, so that the depth it shows counts those that are
 * on their way as well (broker/handed.h).  Beside step 4 of a gradient's path.
 */
#ifndef GQ_TAKEN_H
#define GQ_TAKEN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gradq/protocol.h"

typedef struct gq_taken {
    uint8_t mark[GQ_MARK_BYTES]; /* the newest that came; the broker's to read */
    bool marked;                 /* one has come */
    uint64_t count;              /* gradients that came out since it */
    uint64_t early;              /* gradients taken that have not come out yet */
    bool owed;                   /* a report: something has changed */
    uint64_t due_ns;             /* when to send it */
} gq_taken;

/* Is this message a mark, and no frame?  Then it is entered, and a report is due at once.
 * *another: it is of another broker than the one before. */
bool gq_taken_mark (gq_taken *taken, const void *bytes, size_t size, bool *another);

/* One gradient more came out of the queue and was decided upon, now or before. */
void gq_taken_add (gq_taken *taken);
/* So many were taken (lane shm) whose frames are still on their way. */
void gq_taken_early (gq_taken *taken, uint64_t early);

/* Send what is due on the control socket.  Never waits. */
void gq_taken_report (gq_taken *taken, void *socket, uint64_t now_ns);

/* When gq_taken_report has something to do next. */
uint64_t gq_taken_next_ns (const gq_taken *taken);

#endif
