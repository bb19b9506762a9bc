/*
 * What every long-running process does before its first socket.
 */
#ifndef GQ_SERVICE_H
#define GQ_SERVICE_H

#include <stddef.h>

#include "gradq/status.h"

/*
 * Ignore SIGPIPE, block SIGINT, SIGTERM and SIGUSR1 in this and all later threads, raise the limit
 * of open files (ZeroMQ aborts when accept runs out of them), keep czmq's signal handlers away.
 * Returns a signalfd that delivers the blocked signals; -1 with *error.
 */
int gq_service_start (gq_error *error);

/*
 * So many bytes of large vectors and frames will be asked of malloc from now on: have them lie in
 * huge pages, where the system has some.  Walking through them then misses its table of pages less
 * often.  Takes no memory; without gq_service_start it does nothing.
 */
void gq_service_expect (size_t bytes);

/* The next signal waiting on that descriptor, 0 for none. */
int gq_service_signal (int signal_fd);

/*
 * Create and lock `path` (flock) for as long as the returned descriptor stays open.
 * GQ_OK; GQ_REFUSED: another process holds it; GQ_IO with *error.
 */
GQ_CHECK gq_status gq_service_lock (int *fd, const char *path, gq_error *error);

#endif
