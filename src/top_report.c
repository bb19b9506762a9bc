/*
 * The broker's statistics taken apart, and put together again as JSON.  Beside a gradient's path.
 * Must never assume that a field is there, or that it is a number.
 */
#include "top.h"

#include <assert.h>
#include <math.h>
#include <string.h>

double
gq_top_number (const gq_top_report *report, const char *group, const char *name)
{
    const json_t *value = json_object_get (json_object_get (report->stats, group), name);
    return json_is_number (value) ? json_number_value (value) : NAN;
}

/* Change of a counter per second; NAN when unknown. */
static double
rate (double now, double before, double seconds)
{
    if (isnan (now) || isnan (before) || !(seconds > 0) || now < before)
        return NAN;
    return (now - before) / seconds;
}

static double
drain (double depth, double out_per_s)
{
    if (isnan (depth) || isnan (out_per_s))
        return NAN;
    if (depth <= 0)
        return 0;
    return out_per_s > 0 ? depth / out_per_s : INFINITY;
}

gq_status
gq_top_report_read (gq_top_report *report, json_t **stats_p, const gq_top_report *previous,
                    double at_s, double wall_s, gq_error *error)
{
    assert (report != previous);
    const json_t *ok = json_object_get (*stats_p, "ok");
    if (json_is_false (ok)) {
        const char *why = json_string_value (json_object_get (*stats_p, "error"));
        return gq_fail (error, GQ_REFUSED, "the broker refused to give statistics: %s",
                        why != NULL ? why : "it gave no reason");
    }
    if (!json_is_object (json_object_get (*stats_p, "queue")))
        return gq_fail (error, GQ_MALFORMED,
                        "the answer holds no queue statistics; is the address a gradq broker of "
                        "this version?");
    *report = (gq_top_report){.stats = *stats_p, .at_s = at_s, .wall_s = wall_s};
    *stats_p = NULL;
    report->depth = gq_top_number (report, "queue", "depth");
    report->capacity = gq_top_number (report, "queue", "capacity");
    report->bytes = gq_top_number (report, "queue", "bytes");
    report->bytes_capacity = gq_top_number (report, "queue", "bytes_capacity");
    report->received = gq_top_number (report, "queue", "received");
    report->delivered = gq_top_number (report, "queue", "delivered");
    report->in_per_s = report->out_per_s = NAN;
    if (previous != NULL) {
        double seconds = at_s - previous->at_s;
        report->in_per_s = rate (report->received, previous->received, seconds);
        report->out_per_s = rate (report->delivered, previous->delivered, seconds);
    }
    report->drain_s = drain (report->depth, report->out_per_s);
    return GQ_OK;
}

void
gq_top_report_clear (gq_top_report *report)
{
    json_decref (report->stats);
    memset (report, 0, sizeof *report);
}

bool
gq_top_above (const gq_top_report *report, double limit)
{
    return report->depth > limit; /* false for NAN */
}

/* names[] that are missing in object[group] become null, so that readers find every key. */
static int
complete (json_t *object, const char *group, const char *const *names)
{
    json_t *inner = json_object_get (object, group);
    if (!json_is_object (inner)) {
        inner = json_object ();
        if (json_object_set_new (object, group, inner) != 0)
            return -1;
    }
    for (; *names != NULL; names++)
        if (json_object_get (inner, *names) == NULL &&
            json_object_set_new (inner, *names, json_null ()) != 0)
            return -1;
    return 0;
}

static int
set_known (json_t *object, const char *name, double value)
{
    return isfinite (value) ? json_object_set_new (object, name, json_real (value)) : 0;
}

json_t *
gq_top_report_json (const gq_top_report *report)
{
    static const char *const queue[] = {"depth",     "capacity", "bytes", "received",
                                        "delivered", "refused",  NULL};
    static const char *const optimizer[] = {"name",          "version",      "applied",
                                            "rejected",      "duplicates",   "staleness_p50",
                                            "staleness_p99", "apply_us_p50", NULL};
    json_t *object = json_deep_copy (report->stats);
    if (object == NULL)
        return NULL;
    json_object_del (object, "op");
    json_object_del (object, "ok");
    bool whole = complete (object, "queue", queue) == 0 &&
                 complete (object, "optimizer", optimizer) == 0 &&
                 set_known (object, "time", report->wall_s) == 0 &&
                 set_known (object, "in_per_s", report->in_per_s) == 0 &&
                 set_known (object, "out_per_s", report->out_per_s) == 0 &&
                 set_known (object, "drain_s", report->drain_s) == 0;
    if (whole && !json_is_array (json_object_get (object, "actors")))
        whole = json_object_set_new (object, "actors", json_array ()) == 0;
    if (!whole) {
        json_decref (object);
        return NULL;
    }
    return object;
}

json_t *
gq_top_silent_json (double wall_s, double silent_s, const char *error)
{
    /* A path in the sentence may be no UTF-8, which JSON cannot hold. */
    json_t *why = json_string (error);
    if (why == NULL)
        why = json_string ("the broker is silent");
    return json_pack ("{s:f, s:f, s:o}", "time", wall_s, "silent_s", silent_s, "error", why);
}
