/*
 * Being asked to stop.  Beside a gradient's path.
 *
 * Must never do more in the handler than note the signal: whoever waits or plays asks for it.
 */
#include <signal.h>
#include <stddef.h>

#include "jobs.h"

static volatile sig_atomic_t stop_signal;

static void
on_signal (int signal_number)
{
    stop_signal = signal_number;
}

bool
gq_stop_requested (void)
{
    return stop_signal != 0;
}

void
gq_stop_on_signals (void)
{
    struct sigaction stop = {.sa_handler = on_signal}; /* no SA_RESTART: waits shall end */
    struct sigaction ignore = {.sa_handler = SIG_IGN};

    sigaction (SIGINT, &stop, NULL);
    sigaction (SIGTERM, &stop, NULL);
    /* A peer or a child that has gone is a status, not a death. */
    sigaction (SIGPIPE, &ignore, NULL);
}
