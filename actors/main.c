/*
 * gradq-actor: options, signals, one of three jobs, exit code.  Step 0 of a gradient's path begins
 * here.
 *
 * Must never do any of the jobs' work.
 */
#include <stdio.h>

#include "blas.h"
#include "jobs.h"
#include "log.h"

static int
exit_code (gq_status status)
{
    switch (status) {
    case GQ_OK:
        return GQ_EXIT_OK;
    case GQ_UNREACHABLE:
        return GQ_EXIT_UNREACHABLE;
    case GQ_LAYOUT:
    case GQ_INVALID:
        return GQ_EXIT_CONFIG;
    default:
        return GQ_EXIT_FAILED;
    }
}

/* NULL, or what is wrong with this combination of options. */
static const char *
usage_problem (const gq_options *options)
{
    bool gradients = gq_options_flag (options, "gradients");
    bool in = gq_options_given (options, "in"), out = gq_options_given (options, "out");

    if (gradients + gq_options_given (options, "evaluate") +
            gq_options_given (options, "benchmark") >
        1)
        return "--gradients, --evaluate and --benchmark are three jobs; ask for one";
    if (gradients && !(in && out))
        return "--gradients needs --in FILE and --out FILE";
    if (gq_options_given (options, "record") && !gq_options_given (options, "evaluate"))
        return "--record FILE.gif shows an evaluated episode: add --evaluate WEIGHTS";
    return NULL;
}

static int
run (const gq_options *options)
{
    const char *log_file = gq_options_text (options, "log-file");
    const char *problem = usage_problem (options);
    gq_error error = {""};

    if (problem != NULL) {
        fprintf (stderr, "gradq-actor: %s\n", problem);
        return GQ_EXIT_USAGE;
    }
    gq_status status = gq_log_open (
        "actor", log_file, gq_log_level_from (gq_options_text (options, "log-level")), &error);
    if (status != GQ_OK) {
        fprintf (stderr, "gradq-actor: %s\n", error.text);
        return exit_code (status);
    }
    bool training = false;
    if (gq_options_flag (options, "gradients"))
        status =
            gq_job_gradients (gq_options_text (options, "net"), gq_options_text (options, "in"),
                              gq_options_text (options, "out"), &error);
    else if (gq_options_given (options, "evaluate"))
        status = gq_job_evaluate (options, &error);
    else if (gq_options_given (options, "benchmark"))
        status = gq_job_benchmark (options, &error);
    else {
        training = true;
        status = gq_job_train (options, &error);
        if (status != GQ_OK)
            gq_log (GQ_LOG_ERROR, "actor failed", "status", "s", gq_status_name (status), "reason",
                    "s", error.text, NULL);
    }
    /* The log is stderr unless a file was named: do not say it twice there. */
    if (status != GQ_OK && (!training || log_file != NULL))
        fprintf (stderr, "gradq-actor: %s\n", error.text);
    return exit_code (status);
}

int
main (int argc, char **argv)
{
    gq_options *options = NULL;
    gq_error error = {""};

    gq_status status = gq_options_read (&options, GQ_PROGRAM_ACTOR, argc, argv, &error);
    if (status == GQ_AGAIN)
        return GQ_EXIT_OK;
    if (status != GQ_OK) {
        fprintf (stderr, "gradq-actor: %s\n", error.text);
        return gq_options_exit (status);
    }
    gq_blas_begin ();
    gq_stop_on_signals ();
    int code = run (options);
    gq_options_free (&options);
    return code;
}
