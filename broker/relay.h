/*
 * The broker's weights thread: XSUB in, XPUB out, with the last value for late joiners, and weights
 * only while somebody subscribes to them.  Between steps 6 and 7 of a gradient's path.
 */
#ifndef GQ_RELAY_H
#define GQ_RELAY_H

#include <czmq.h>

#include "gradq/status.h"
#include "near.h"

typedef struct gq_relay_config {
    const char *weights_in, *weights_out, *acks_out; /* endpoints to bind */
    uint64_t frame_bytes_max;
    gq_near *near;  /* borrowed */
    gq_error error; /* out, when starting fails */
} gq_relay_config;

/* What the thread answers to "STATS": one frame that holds this. */
typedef struct gq_relay_stats {
    uint64_t weights; /* versions relayed */
    uint64_t acks;
    uint64_t malformed; /* dropped */
    uint64_t repeated;  /* last values sent again for late joiners */
} gq_relay_stats;

/* Start the thread (a zactor).  NULL: config->error says why.  Its pipe knows "STATS", "REPEAT"
 * (send the last weights once more) and czmq's own "$TERM". */
zactor_t *gq_relay_start (gq_relay_config *config);

#endif
