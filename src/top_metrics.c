/*
 * The broker's statistics in Prometheus' text format.  Beside a gradient's path.
 *
 * Must never print a series twice, or a label as it came: one such line, and Prometheus drops the
 * whole page.  The format:
 * https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
 */
#include "top.h"

#include <math.h>
#include <string.h>

#include "gradq/limits.h"

#define COUNTER "counter"
#define GAUGE   "gauge"
/* Quantiles alone: sum and count, which the format leaves out freely, are not in the answer. */
#define SUMMARY "summary"

#define LENGTH(array) (sizeof (array) / sizeof (array)[0])

/* A family, and where its value lies in the answer.  A family of several labels is several rows,
 * one after another. */
typedef struct metric {
    const char *name, *type, *help;
    const char *group; /* NULL: beside the groups */
    const char *key;
    double divisor; /* from the unit of the answer to the base unit */
    const char *label;
} metric;

/* clang-format off */
static const metric of_run[] = {
    {"gradq_broker_uptime_seconds", GAUGE, "Time since the broker started.", NULL, "uptime_ms", 1e3, NULL},
    {"gradq_queue_depth", GAUGE, "Gradients that the optimizer has not taken yet.", "queue", "depth", 1, NULL},
    {"gradq_queue_capacity", GAUGE, "Gradients that the queue holds before actors wait.", "queue", "capacity", 1, NULL},
    {"gradq_queue_bytes", GAUGE, "Bytes of the gradients in the queue.", "queue", "bytes", 1, NULL},
    {"gradq_queue_capacity_bytes", GAUGE, "Bytes that the queue holds before actors wait.", "queue", "bytes_capacity", 1, NULL},
    {"gradq_received_total", COUNTER, "Gradients that came to the broker.", "queue", "received", 1, NULL},
    {"gradq_delivered_total", COUNTER, "Gradients that the optimizer has taken, or that were lost on the way to it and come again.", "queue", "delivered", 1, NULL},
    {"gradq_refused_total", COUNTER, "Messages on the way of gradients that the broker refused.", "queue", "refused", 1, NULL},
    {"gradq_relayed_weights_total", COUNTER, "Versions of the weights that the broker passed on.", "relay", "weights", 1, NULL},
    {"gradq_relayed_acks_total", COUNTER, "Acknowledgements that the broker passed on.", "relay", "acks", 1, NULL},
    {"gradq_relay_repeated_total", COUNTER, "Last values that were sent again to late subscribers.", "relay", "repeated", 1, NULL},
    {"gradq_malformed_total", COUNTER, "Messages that were dropped because they were none, by who dropped them.", NULL, "control_malformed", 1, "where=\"control\""},
    {"gradq_malformed_total", COUNTER, NULL, "relay", "malformed", 1, "where=\"relay\""},
    {"gradq_malformed_total", COUNTER, NULL, "optimizer", "malformed", 1, "where=\"optimizer\""},
    {"gradq_optimizer_last_seen_seconds", GAUGE, "Time since the broker heard from the optimizer.", "optimizer", "last_seen_ms", 1e3, NULL},
    {"gradq_optimizer_version", GAUGE, "Current version of the weights; a run goes back only where it has no journal.", "optimizer", "version", 1, NULL},
    {"gradq_optimizer_term", GAUGE, "Life of the optimizer in this run.", "optimizer", "term", 1, NULL},
    {"gradq_checkpoint_version", GAUGE, "Version of the newest checkpoint; -1: there is none.", "optimizer", "checkpoint_version", 1, NULL},
    {"gradq_parameters", GAUGE, "Elements of the vector of weights.", "optimizer", "parameters", 1, NULL},
    {"gradq_applied_total", COUNTER, "Gradients that were applied.", "optimizer", "applied", 1, NULL},
    {"gradq_duplicates_total", COUNTER, "Gradients that came again and were not applied again.", "optimizer", "duplicates", 1, NULL},
    {"gradq_published_total", COUNTER, "Versions of the weights that were published.", "optimizer", "published", 1, NULL},
    {"gradq_journal_records_total", COUNTER, "Number of the last record in the journal.", "optimizer", "lsn", 1, NULL},
    {"gradq_rolled_back_total", COUNTER, "Versions that restarts undid.", "optimizer", "rolled_back", 1, NULL},
    {"gradq_staleness", SUMMARY, "Steps between the weights of a gradient and those that it was applied to.", "optimizer", "staleness_p50", 1, "quantile=\"0.5\""},
    {"gradq_staleness", SUMMARY, NULL, "optimizer", "staleness_p99", 1, "quantile=\"0.99\""},
    {"gradq_staleness", SUMMARY, NULL, "optimizer", "staleness_max", 1, "quantile=\"1\""},
    {"gradq_apply_seconds", SUMMARY, "Time of a step of the optimizer.", "optimizer", "apply_us_p50", 1e6, "quantile=\"0.5\""},
    {"gradq_apply_seconds", SUMMARY, NULL, "optimizer", "apply_us_p99", 1e6, "quantile=\"0.99\""},
    {"gradq_publish_seconds", SUMMARY, "Time to publish a version.", "optimizer", "publish_us_p50", 1e6, "quantile=\"0.5\""},
};

/* Of each actor; its counters begin anew with each epoch, as those of a process that restarts. */
static const metric of_actor[] = {
    {"gradq_actor_epoch", GAUGE, "Life of the actor in this run.", NULL, "epoch", 1, NULL},
    {"gradq_actor_pushed_total", COUNTER, "Gradients that the actor pushed in this epoch.", NULL, "pushed", 1, NULL},
    {"gradq_actor_acknowledged_total", COUNTER, "Gradients of the actor that are settled, refused ones included.", NULL, "acknowledged", 1, NULL},
    {"gradq_actor_refused_total", COUNTER, "Gradients of the actor that the optimizer refused.", NULL, "refused", 1, NULL},
    {"gradq_actor_resent_total", COUNTER, "Sendings of the actor that repeated an earlier one.", NULL, "resent", 1, NULL},
    {"gradq_actor_received_total", COUNTER, "Gradients of the actor that came to the broker.", NULL, "received", 1, NULL},
    {"gradq_actor_return_mean", GAUGE, "Mean return of the actor's last episodes.", NULL, "return_mean", 1, NULL},
    {"gradq_actor_last_seen_seconds", GAUGE, "Time since the broker heard from the actor.", NULL, "last_seen_ms", 1e3, NULL},
};
/* clang-format on */

static double
number (const json_t *object, const char *key)
{
    const json_t *value = json_object_get (object, key);
    return json_is_number (value) ? json_number_value (value) : NAN;
}

static void
print_header (FILE *out, const char *name, const char *type, const char *help)
{
    fprintf (out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void
print_value (FILE *out, double value)
{
    if (isfinite (value))
        fprintf (out, " %.15g\n", value);
    else
        fputs (isnan (value) ? " NaN\n" : value > 0 ? " +Inf\n" : " -Inf\n", out);
}

/* Between the quotes of a label. */
static void
print_escaped (FILE *out, const char *text)
{
    for (; *text != '\0'; text++) {
        if (*text == '\n')
            fputs ("\\n", out);
        else if (*text == '"' || *text == '\\')
            fprintf (out, "\\%c", *text);
        else
            fputc (*text, out);
    }
}

static void
print_label (FILE *out, char before, const char *name, const json_t *value)
{
    fprintf (out, "%c%s=\"", before, name);
    print_escaped (out, json_is_string (value) ? json_string_value (value) : "");
    fputc ('"', out);
}

static bool
alive (const json_t *peer)
{
    const char *state = json_string_value (json_object_get (peer, "state"));
    return state != NULL && strcmp (state, "alive") == 0;
}

static void
print_run (FILE *out, const json_t *stats)
{
    const char *begun = "";
    for (const metric *row = of_run; row < of_run + LENGTH (of_run); row++) {
        const json_t *group = row->group != NULL ? json_object_get (stats, row->group) : stats;
        double value = number (group, row->key) / row->divisor;
        if (isnan (value))
            continue;
        if (strcmp (begun, row->name) != 0) {
            /* The first row of a family has the help, and may be unknown itself. */
            const metric *first = row;
            while (first->help == NULL)
                first--;
            print_header (out, row->name, row->type, first->help);
            begun = row->name;
        }
        fputs (row->name, out);
        if (row->label != NULL)
            fprintf (out, "{%s}", row->label);
        print_value (out, value);
    }
}

static void
print_rejected (FILE *out, const json_t *by_reason)
{
    static const char name[] = "gradq_rejected_total";
    bool begun = false;
    for (void *i = json_object_iter ((json_t *)by_reason); i != NULL;
         i = json_object_iter_next ((json_t *)by_reason, i)) {
        if (!json_is_number (json_object_iter_value (i)))
            continue;
        if (!begun)
            print_header (out, name, COUNTER, "Gradients that the optimizer refused, by reason.");
        begun = true;
        fprintf (out, "%s{reason=\"", name);
        print_escaped (out, json_object_iter_key (i));
        fputs ("\"}", out);
        print_value (out, json_number_value (json_object_iter_value (i)));
    }
}

/* Actors by id: an id that came twice would be a series twice.  The number of them. */
static size_t
sort_actors (const json_t *list, const json_t *actors[GQ_ACTORS_MAX])
{
    size_t count = 0, i;
    const json_t *actor;
    memset (actors, 0, GQ_ACTORS_MAX * sizeof *actors);
    json_array_foreach (list, i, actor)
    {
        const json_t *id = json_object_get (actor, "id");
        json_int_t index = json_is_integer (id) ? json_integer_value (id) : -1;
        if (index < 0 || index >= GQ_ACTORS_MAX)
            continue;
        count += actors[index] == NULL;
        actors[index] = actor;
    }
    return count;
}

static void
print_actors (FILE *out, const json_t *list)
{
    const json_t *actors[GQ_ACTORS_MAX];
    if (sort_actors (list, actors) == 0)
        return;
    print_header (out, "gradq_actor_up", GAUGE, "1: the broker hears from the actor.");
    for (size_t id = 0; id < GQ_ACTORS_MAX; id++)
        if (actors[id] != NULL)
            fprintf (out, "gradq_actor_up{actor=\"%zu\"} %d\n", id, alive (actors[id]));
    for (const metric *row = of_actor; row < of_actor + LENGTH (of_actor); row++) {
        bool begun = false;
        for (size_t id = 0; id < GQ_ACTORS_MAX; id++) {
            double value = number (actors[id], row->key) / row->divisor;
            if (isnan (value))
                continue;
            if (!begun)
                print_header (out, row->name, row->type, row->help);
            begun = true;
            fprintf (out, "%s{actor=\"%zu\"}", row->name, id);
            print_value (out, value);
        }
    }
}

void
gq_top_metrics (FILE *out, const gq_top_report *report)
{
    print_header (out, "gradq_up", GAUGE, "1: the broker answers.");
    fprintf (out, "gradq_up %d\n", report != NULL);
    if (report == NULL)
        return;
    const json_t *optimizer = json_object_get (report->stats, "optimizer");
    print_header (out, "gradq_info", GAUGE, "1; the labels tell what runs.");
    fputs ("gradq_info", out);
    print_label (out, '{', "program", json_object_get (report->stats, "program"));
    print_label (out, ',', "rule", json_object_get (optimizer, "name"));
    print_label (out, ',', "run", json_object_get (optimizer, "run"));
    fputs ("} 1\n", out);
    print_header (out, "gradq_optimizer_up", GAUGE, "1: the broker hears from the optimizer.");
    fprintf (out, "gradq_optimizer_up %d\n", alive (optimizer));
    print_run (out, report->stats);
    if (!isnan (report->drain_s)) {
        print_header (out, "gradq_queue_drain_seconds", GAUGE,
                      "Depth by the rate of delivery between the last two looks at the broker.");
        fputs ("gradq_queue_drain_seconds", out);
        print_value (out, report->drain_s);
    }
    print_rejected (out, json_object_get (optimizer, "rejected_by"));
    print_actors (out, json_object_get (report->stats, "actors"));
}
