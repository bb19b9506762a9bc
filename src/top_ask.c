/*
 * One look at the broker: its address, the question, the answer taken apart.  Beside a gradient's
 * path.  Must never wait without a limit, and never lose the report before when it fails.
 */
#include <errno.h>
#include <string.h>

#include "control.h"
#include "gradq/gradq.h"
#include "stats.h"
#include "top.h"

/* The address that the run directory has now. */
static gq_status
read_address (const char *run, char address[GQ_ENDPOINT_MAX], gq_error *error)
{
    char path[4096];
    if (snprintf (path, sizeof path, "%s/address", run) >= (int)sizeof path)
        return gq_fail (error, GQ_INVALID, "--run: the path is too long");
    FILE *file = fopen (path, "re");
    if (file == NULL)
        return gq_fail (error, GQ_UNREACHABLE,
                        "%s: %s; no run is up there (tools/gradq up --run %s starts one)", path,
                        strerror (errno), run);
    char *got = fgets (address, GQ_ENDPOINT_MAX, file);
    fclose (file);
    if (got == NULL)
        return gq_fail (error, GQ_UNREACHABLE, "%s is empty; is the run just starting?", path);
    address[strcspn (address, "\r\n")] = '\0';
    return GQ_OK;
}

gq_status
gq_top_ask (gq_top_report *report, const char *run, const char *address, int wait_ms,
            gq_error *error)
{
    char found[GQ_ENDPOINT_MAX];
    json_t *answer = NULL;
    gq_status status = GQ_OK;
    if (run != NULL) {
        status = read_address (run, found, error);
        if (status != GQ_OK)
            return status;
    }
    json_t *request = json_pack ("{s:s}", "op", "stats");
    if (request == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory");
    status = gq_control_ask (&answer, run != NULL ? found : address, request, wait_ms, error);
    json_decref (request);
    if (status != GQ_OK)
        return status;
    gq_top_report fresh;
    status = gq_top_report_read (&fresh, &answer, report->stats != NULL ? report : NULL,
                                 (double)gq_now_ns () / 1e9, (double)gq_wall_ns () / 1e9, error);
    if (status != GQ_OK) {
        json_decref (answer);
        return status;
    }
    gq_top_report_clear (report);
    *report = fresh;
    return GQ_OK;
}
