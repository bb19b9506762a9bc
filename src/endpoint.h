/*
 * The endpoints of a run, all derived from the one address that users know.
 */
#ifndef GQ_ENDPOINT_H
#define GQ_ENDPOINT_H

#include "gradq/limits.h"
#include "gradq/status.h"

typedef struct gq_endpoints {
    char control[GQ_ENDPOINT_MAX];       /* the address itself: ROUTER */
    char gradients_in[GQ_ENDPOINT_MAX];  /* PULL: actors push here */
    char gradients_out[GQ_ENDPOINT_MAX]; /* PUSH: the optimizer pulls here */
    char weights_in[GQ_ENDPOINT_MAX];    /* XSUB: the optimizer publishes here */
    char weights_out[GQ_ENDPOINT_MAX];   /* XPUB: actors subscribe to weights here */
    char acks_out[GQ_ENDPOINT_MAX];      /* XPUB: actors subscribe to acknowledgements here */
} gq_endpoints;

/*
 * tcp://HOST:PORT gives PORT + 1 .. PORT + 5, ipc://PATH gives PATH.gradients-in and so on, in the
 * order above.  GQ_INVALID with *error: another transport, no or too high a port, or a path that
 * ZeroMQ could not bind (over 107 bytes with its ending).
 */
GQ_CHECK gq_status gq_endpoints_derive (gq_endpoints *endpoints, const char *address,
                                        gq_error *error);

#endif
