/*
 * gradq-optimizer: the one process that applies gradients.
 */
#include <stdio.h>

#include "log.h"
#include "server.h"

int
main (int argc, char **argv)
{
    gq_error error = {""};
    gq_options *options = NULL;
    gq_status status = gq_options_read (&options, GQ_PROGRAM_OPTIMIZER, argc, argv, &error);
    if (status == GQ_AGAIN)
        return GQ_EXIT_OK;
    if (status == GQ_OK)
        status = gq_log_open ("optimizer", gq_options_text (options, "log-file"),
                              gq_log_level_from (gq_options_text (options, "log-level")), &error);
    int code = status == GQ_OK ? gq_server_run (options, &error) : gq_options_exit (status);
    if (code != GQ_EXIT_OK) {
        fprintf (stderr, "gradq-optimizer: %s\n", error.text);
        /* The log is stderr unless a file was named: do not say it twice there. */
        if (status == GQ_OK && gq_options_text (options, "log-file") != NULL)
            gq_log (GQ_LOG_ERROR, "stopped", "message", "s", error.text, NULL);
    }
    gq_options_free (&options);
    return code;
}
