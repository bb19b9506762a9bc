/*
 * Pieces that the broker's threads share: bound sockets, and STATS over a thread's pipe.
 */
#ifndef GQ_BIND_H
#define GQ_BIND_H

#include <czmq.h>

#include "socket.h"

/* New czmq socket with the options, bound.  NULL and *error: the address is in use, or not ours. */
zsock_t *gq_bind (const gq_socket_options *options, const char *endpoint, gq_error *error);

/* Start a thread; it writes config's *error before it signals if it cannot start: then NULL. */
zactor_t *gq_thread_start (zactor_fn *run, void *config, gq_error *error);

/* Ask a thread "STATS" and wait for stats[size]; threads never block for long.  false: it is
 * gone. */
bool gq_thread_ask (zactor_t *thread, void *stats, size_t size);

#endif
