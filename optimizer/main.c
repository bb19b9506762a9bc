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
    int code = GQ_EXIT_USAGE;
    gq_status status = gq_options_read (&options, GQ_PROGRAM_OPTIMIZER, argc, argv, &error);
    if (status == GQ_AGAIN)
        return GQ_EXIT_OK;
    if (status == GQ_OK)
        status = gq_log_open ("optimizer", gq_options_text (options, "log-file"),
                              gq_log_level_from (gq_options_text (options, "log-level")), &error);
    if (status == GQ_OK)
        code = gq_server_run (options, &error);
    if (code != GQ_EXIT_OK) {
        fprintf (stderr, "gradq-optimizer: %s\n", error.text);
        gq_log (GQ_LOG_ERROR, "stopped", "message", "s", error.text, NULL);
    }
    gq_options_free (&options);
    return code;
}
