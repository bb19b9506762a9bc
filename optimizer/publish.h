/*
 * Publisher: whole versions and acknowledgements on one XPUB socket.  Step 6 of a gradient's path.
 */
#ifndef GQ_PUBLISH_H
#define GQ_PUBLISH_H

#include <stdbool.h>
#include <stdint.h>

#include "core.h"
#include "interest.h"

typedef struct gq_publisher {
    void *socket;         /* XPUB, borrowed */
    gq_interest interest; /* nobody's: no weights are sent, nor made into a frame */
    uint64_t interval_ns; /* least time between two versions */
    bool last;            /* nobody will be there to read from: weights go whole */
    uint64_t weights_ns;  /* when weights last went out; 0: somebody waits for the first ones */
    uint64_t version;     /* of those */
    uint64_t attempt_ns;  /* last try to send weights */
    uint64_t repeat_ns;   /* when to repeat that version */
    uint32_t repeats;     /* of it so far */
    uint64_t show_ns;     /* when to try again to show a version; 0: none waits */
    uint64_t acks_ns;     /* when the first acknowledgement is to be repeated */
    uint64_t published;   /* versions sent, repetitions included */
    gq_histogram publish_us;
} gq_publisher;

/* Take in subscriptions, and their ends: call when the socket has something to read.  After a first
 * one the current version is due, whatever the interval.  Never waits. */
void gq_publish_subscriptions (gq_publisher *publisher);

/*
 * Send what is due: the current version, if somebody subscribes to weights, when it is new and the
 * interval has passed; then the acknowledgements owed.  Whatever did not change is repeated, soon
 * at first and then once a second, so that what was lost on the way heals.  Never waits.
 */
void gq_publish_due (gq_publisher *publisher, gq_core *core, uint64_t now_ns);

/* When gq_publish_due has something to do next. */
uint64_t gq_publish_next_ns (const gq_publisher *publisher, const gq_core *core);

#endif
