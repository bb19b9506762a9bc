/*
 * The optimizer process: sockets, timers and files around the core.  Steps 4 to 6 of a gradient's
 * path.
 */
#ifndef GQ_SERVER_H
#define GQ_SERVER_H

#include "options.h"

/* Serve until SIGINT or SIGTERM.  Returns the exit code; *error says why it is not 0. */
int gq_server_run (const gq_options *options, gq_error *error);

#endif
