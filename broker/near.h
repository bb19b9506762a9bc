/*
 * Near: an optimizer on the broker's host, with which it shares memory (src/hop.h).  Between steps
 * 3 and 4 of a gradient's path, and between 6 and 7.
 *
 * One thread sees the optimizer's reports, others use what they lead to.  Without it, or while it
 * cannot be had, vectors go through the sockets.
 */
#ifndef GQ_NEAR_H
#define GQ_NEAR_H

#include <jansson.h>

#include "hop.h"

typedef struct gq_near gq_near;

gq_near *gq_near_new (void); /* NULL: out of memory */
/* Nobody holds anything any more. */
void gq_near_free (gq_near **near_p);

/* What the optimizer's newest report says of shared memory; NULL: it is gone. */
void gq_near_see (gq_near *near, const json_t *report);

/* A connection to an optimizer has ended: until the next report nothing is shared. */
void gq_near_forget (gq_near *near);

/* What is shared now, until it is released; NULL: nothing is. */
gq_hop *gq_near_hold (gq_near *near);
void gq_near_release (gq_near *near, gq_hop *hop); /* hop may be NULL */

#endif
