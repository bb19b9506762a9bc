/*
 * Registry.  Of a report its known fields are kept: the broker shows them and computes only
 * what it alone can know, the ages and what a restart of the optimizer rolled back.
 */
#include "registry.h"

#include <stdlib.h>
#include <string.h>

#include "gradq/protocol.h"

#define MS_NS 1000000u
/* An optimizer that said nothing for this long is no longer asked, and may be replaced. */
#define OPTIMIZER_SILENT_MS 3000
/* Bytes of a metric's name, NUL included: as the client keeps them. */
#define METRIC_NAME_MAX 32

typedef struct actor_entry {
    json_t *report; /* NULL: never reported */
    uint64_t last_ns;
    bool gone;
} actor_entry;

struct gq_registry {
    char peer[2 * 256 + 1]; /* identity of the optimizer, "" for none */
    json_t *optimizer;      /* last report */
    uint64_t optimizer_ns;
    bool optimizer_gone;
    uint64_t rolled_back; /* steps that restarts from older checkpoints undid */
    actor_entry actors[GQ_ACTORS_MAX];
};

gq_registry *
gq_registry_new (void)
{
    return calloc (1, sizeof (gq_registry));
}

void
gq_registry_free (gq_registry **registry_p)
{
    gq_registry *registry = *registry_p;
    if (registry == NULL)
        return;
    json_decref (registry->optimizer);
    for (size_t i = 0; i < GQ_ACTORS_MAX; i++)
        json_decref (registry->actors[i].report);
    free (registry);
    *registry_p = NULL;
}

/* The queue's thread stamps what it sees: that may lie past the moment at which we were asked. */
static uint64_t
age_ms_of (uint64_t last_ns, uint64_t now_ns)
{
    return last_ns < now_ns ? (now_ns - last_ns) / MS_NS : 0;
}

static bool
alive (const gq_registry *registry, uint64_t now_ns)
{
    return registry->optimizer != NULL && !registry->optimizer_gone &&
           now_ns - registry->optimizer_ns < (uint64_t)OPTIMIZER_SILENT_MS * MS_NS;
}

static json_int_t
integer (const json_t *object, const char *key)
{
    return json_integer_value (json_object_get (object, key));
}

static bool
same_run (const json_t *a, const json_t *b)
{
    const char *left = json_string_value (json_object_get (a, "run"));
    const char *right = json_string_value (json_object_get (b, "run"));
    return left != NULL && right != NULL && strcmp (left, right) == 0;
}

gq_status
gq_registry_optimizer (gq_registry *registry, const char *peer, const json_t *report,
                       uint64_t now_ns, gq_error *error)
{
    const json_t *known = registry->optimizer;
    bool resumed = known != NULL && same_run (known, report) &&
                   integer (report, "term") > integer (known, "term");
    if (strcmp (peer, registry->peer) != 0 && alive (registry, now_ns) && !resumed) {
        const char *run = json_string_value (json_object_get (known, "run"));
        return gq_fail (error, GQ_REFUSED,
                        "another optimizer (run %s) is alive at this broker; stop it first, or use "
                        "another --address",
                        run == NULL ? "unknown" : run);
    }
    if (strlen (peer) >= sizeof registry->peer)
        return gq_fail (error, GQ_INVALID, "peer identity too long");
    if (resumed && integer (known, "version") > integer (report, "start_version"))
        registry->rolled_back +=
            (uint64_t)(integer (known, "version") - integer (report, "start_version"));
    json_t *copy = json_deep_copy (report);
    if (copy == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory");
    json_decref (registry->optimizer);
    registry->optimizer = copy;
    registry->optimizer_ns = now_ns;
    registry->optimizer_gone = false;
    memcpy (registry->peer, peer, strlen (peer) + 1);
    return GQ_OK;
}

const char *
gq_registry_peer (const gq_registry *registry, uint64_t now_ns)
{
    return alive (registry, now_ns) ? registry->peer : NULL;
}

bool
gq_registry_optimizer_gone (gq_registry *registry, const char *peer)
{
    if (strcmp (peer, registry->peer) != 0)
        return false;
    registry->optimizer_gone = true;
    return true;
}

/*
 * What is kept of an actor's report: its run, its counts, a few metrics.  A peer may send anything
 * up to a whole control message for every id; kept as it came it would fill memory, and make the
 * answer to stats too large, or too deep, for whoever asks.
 */
static json_t *
known_fields (const json_t *report)
{
    static const char *const counts[] = {"epoch", "pushed", "acknowledged", "refused", "resent"};
    json_t *kept = json_object ();
    json_t *metrics = json_object ();
    const json_t *run = json_object_get (report, "run");
    if (json_string_length (run) == 2 * (size_t)GQ_RUN_ID_BYTES)
        json_object_set_new (kept, "run", json_string (json_string_value (run)));
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
        if (json_is_integer (json_object_get (report, counts[i])))
            json_object_set_new (kept, counts[i], json_integer (integer (report, counts[i])));
    const char *name;
    json_t *value;
    json_object_foreach (json_object_get (report, "metrics"), name, value)
    {
        if (json_object_size (metrics) == GQ_METRICS_MAX)
            break;
        if (json_is_number (value) && strlen (name) < METRIC_NAME_MAX)
            json_object_set_new (metrics, name, json_copy (value));
    }
    json_object_set_new (kept, "metrics", metrics);
    return kept;
}

gq_status
gq_registry_actor (gq_registry *registry, const json_t *report, bool gone, uint64_t now_ns)
{
    const json_t *id = json_object_get (report, "actor");
    if (!json_is_integer (id) || json_integer_value (id) < 0 ||
        json_integer_value (id) >= GQ_ACTORS_MAX)
        return GQ_INVALID;
    actor_entry *entry = &registry->actors[json_integer_value (id)];
    /* The bye of a life that ended must not silence the one that followed it. */
    if (entry->report != NULL && same_run (entry->report, report) &&
        integer (report, "epoch") < integer (entry->report, "epoch"))
        return GQ_OK;
    json_t *copy = known_fields (report);
    if (copy == NULL)
        return GQ_MEMORY;
    json_decref (entry->report);
    *entry = (actor_entry){.report = copy, .last_ns = now_ns, .gone = gone};
    return GQ_OK;
}

static const char *
state_of (bool gone, uint64_t age_ms)
{
    return gone ? "gone" : age_ms >= GQ_SILENT_MS ? "silent" : "alive";
}

static void
copy_key (json_t *to, const json_t *from, const char *key)
{
    json_t *value = json_object_get (from, key);
    json_object_set (to, key, value != NULL ? value : json_null ());
}

json_t *
gq_registry_optimizer_json (const gq_registry *registry, uint64_t now_ns)
{
    static const char *const keys[] = {
        "name",         "lr",           "version",        "term",          "start_version",
        "applied",      "rejected",     "rejected_by",    "duplicates",    "taken_early",
        "lsn",          "malformed",    "staleness_p50",  "staleness_p99", "staleness_max",
        "apply_us_p50", "apply_us_p99", "publish_us_p50", "published",     "checkpoint_version",
        "parameters",   "run"};
    json_t *result = json_object ();
    uint64_t age_ms = age_ms_of (registry->optimizer_ns, now_ns);
    const char *state =
        registry->optimizer == NULL ? "none" : state_of (registry->optimizer_gone, age_ms);
    json_object_set_new (result, "state", json_string (state));
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        copy_key (result, registry->optimizer, keys[i]);
    json_object_set_new (result, "rolled_back", json_integer ((json_int_t)registry->rolled_back));
    json_object_set_new (result, "last_seen_ms",
                         registry->optimizer == NULL ? json_null ()
                                                     : json_integer ((json_int_t)age_ms));
    return result;
}

static json_t *
actor_json (json_int_t id, const actor_entry *entry, const gq_queue_actor *seen, uint64_t now_ns)
{
    static const char *const keys[] = {"epoch", "pushed", "acknowledged", "refused", "resent"};
    json_t *result = json_object ();
    uint64_t last_ns = entry->last_ns > seen->last_ns ? entry->last_ns : seen->last_ns;
    uint64_t age_ms = age_ms_of (last_ns, now_ns);
    json_object_set_new (result, "id", json_integer (id));
    json_object_set_new (
        result, "state",
        json_string (state_of (entry->gone && entry->last_ns >= seen->last_ns, age_ms)));
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        copy_key (result, entry->report, keys[i]);
    json_object_set_new (result, "received", json_integer ((json_int_t)seen->received));
    json_object_set_new (result, "lane",
                         seen->last_ns == 0
                             ? json_null ()
                             : json_string (seen->lane == GQ_LANE_SHM ? "shm" : "inline"));
    const json_t *metrics = json_object_get (entry->report, "metrics");
    copy_key (result, metrics, "return_mean");
    const char *key;
    json_t *value;
    json_object_foreach ((json_t *)(uintptr_t)metrics, key, value)
    {
        if (json_object_get (result, key) == NULL)
            json_object_set (result, key, value);
    }
    json_object_set_new (result, "last_seen_ms", json_integer ((json_int_t)age_ms));
    return result;
}

json_t *
gq_registry_actors_json (const gq_registry *registry, const gq_queue_actor *queue_actors,
                         uint64_t now_ns)
{
    json_t *list = json_array ();
    for (size_t i = 0; i < GQ_ACTORS_MAX; i++)
        if (registry->actors[i].report != NULL || queue_actors[i].last_ns != 0)
            json_array_append_new (
                list, actor_json ((json_int_t)i, &registry->actors[i], &queue_actors[i], now_ns));
    return list;
}
