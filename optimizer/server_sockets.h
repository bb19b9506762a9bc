/*
 * The optimizer's sockets, all of which connect to the broker.  Steps 3 and 6 of a gradient's path.
 */
#ifndef GQ_SERVER_SOCKETS_H
#define GQ_SERVER_SOCKETS_H

#include <czmq.h>

#include "endpoint.h"

typedef struct gq_server_sockets {
    gq_endpoints endpoints;
    zsock_t *gradients; /* PULL */
    zsock_t *weights;   /* XPUB */
    zsock_t *control;   /* DEALER */
} gq_server_sockets;

/* To `endpoints`.  GQ_OK; GQ_IO with *error, and what was opened is to be closed. */
GQ_CHECK gq_status gq_server_sockets_open (gq_server_sockets *sockets, gq_error *error);
void gq_server_sockets_close (gq_server_sockets *sockets);

#endif
