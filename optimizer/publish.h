/*
 * Publisher: whole versions and acknowledgements on one PUB socket.  Step 6 of a gradient's path.
 */
#ifndef GQ_PUBLISH_H
#define GQ_PUBLISH_H

#include <stdbool.h>
#include <stdint.h>

#include "core.h"

typedef struct gq_publisher {
    void *socket;         /* PUB, borrowed */
    uint64_t interval_ns; /* least time between two versions */
    uint64_t weights_ns;  /* when weights last went out; 0: never */
    uint64_t version;     /* of those */
    uint64_t attempt_ns;  /* last try to send weights */
    uint64_t repeated_ns; /* when all acknowledgements were last repeated */
    uint64_t published;   /* versions sent, repetitions included */
    gq_histogram publish_us;
} gq_publisher;

/*
 * Send what is due: the current version when it is new and the interval has passed, or once a
 * second when nothing changed; then the acknowledgements owed, and all of them once a second, so
 * that whatever was lost on the way heals.  Never waits.
 */
void gq_publish_due (gq_publisher *publisher, gq_core *core, uint64_t now_ns);

/* When gq_publish_due has something to do next. */
uint64_t gq_publish_next_ns (const gq_publisher *publisher, const gq_core *core);

#endif
