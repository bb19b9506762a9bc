/*
 * Hello: grants an actor its id and epoch, and settles the layout: the first proposal wins, later
 * ones must equal it.
 */
#include "hello.h"

#include <math.h>
#include <string.h>
#include <xxhash.h>

#include "gradq/gradq.h"
#include "hex.h"
#include "log.h"
#include "shm.h"

static json_t *
refuse (const json_t *request, gq_status status, bool retry, const char *message)
{
    json_t *answer = json_pack ("{s:b, s:s, s:s, s:b}", "ok", 0, "error", gq_status_name (status),
                                "message", message, "retry", (int)retry);
    if (answer != NULL)
        json_object_set (answer, "op", json_object_get (request, "op"));
    return answer;
}

static bool
same_tensor (const gq_tensor_shape *a, const gq_tensor_shape *b)
{
    return strcmp (a->name, b->name) == 0 && a->rank == b->rank &&
           memcmp (a->shape, b->shape, a->rank * sizeof a->shape[0]) == 0;
}

/* A sentence that names the first difference between the run's layout and the proposed one. */
static void
explain_difference (const gq_layout *ours, const gq_layout *theirs, gq_error *error)
{
    size_t i = 0;
    while (i < ours->tensor_count && i < theirs->tensor_count &&
           same_tensor (&ours->tensors[i], &theirs->tensors[i]))
        i++;
    gq_fail (error, GQ_LAYOUT,
             "this run trains another model: it has %zu tensors with %llu parameters, yours has "
             "%zu with %llu; the first difference is tensor %zu, %s here and %s in yours",
             ours->tensor_count, (unsigned long long)ours->element_count, theirs->tensor_count,
             (unsigned long long)theirs->element_count, i,
             i < ours->tensor_count ? ours->tensors[i].name : "none",
             i < theirs->tensor_count ? theirs->tensors[i].name : "none");
}

/* Settle the layout that a hello proposes, if any, against the run's. */
static gq_status
settle_layout (gq_core *core, const json_t *request, bool *retry, gq_error *error)
{
    const json_t *proposal = json_object_get (request, "layout");
    bool have = core->layout.tensor_count > 0;
    *retry = false;
    if (proposal == NULL || json_is_null (proposal)) {
        *retry = !have;
        return have ? GQ_OK
                    : gq_fail (error, GQ_LAYOUT,
                               "the run has no model yet; start the optimizer "
                               "with --init FILE, or an actor that brings layout and weights");
    }
    gq_layout layout = {0};
    gq_status status = gq_layout_from_json (&layout, proposal, error);
    if (status != GQ_OK)
        return status;
    if (have && layout.digest != core->layout.digest) {
        explain_difference (&core->layout, &layout, error);
        status = GQ_LAYOUT;
    } else if (!have && !json_is_true (json_object_get (request, "initial"))) {
        *retry = true;
        status = gq_fail (error, GQ_LAYOUT,
                          "the run has no weights yet, and this actor brings "
                          "a layout without any");
    } else if (!have) {
        status = gq_core_check_layout (core->rule, &layout, error);
        if (status == GQ_OK && gq_core_set_layout (core, &layout) != GQ_OK)
            status = gq_fail (error, GQ_MEMORY, "the optimizer has no memory for %llu parameters",
                              (unsigned long long)layout.element_count);
    }
    gq_layout_clear (&layout);
    return status;
}

static bool
asks_for (const json_t *request, const char *lane)
{
    const json_t *lanes = json_object_get (request, "lanes");
    for (size_t i = 0; i < json_array_size (lanes); i++) {
        const char *word = json_string_value (json_array_get (lanes, i));
        if (word != NULL && strcmp (word, lane) == 0)
            return true;
    }
    return false;
}

static gq_status
check_request (const json_t *request, uint8_t nonce[GQ_NONCE_BYTES], uint32_t *actor,
               gq_error *error)
{
    const json_t *id = json_object_get (request, "actor");
    const char *text = json_string_value (json_object_get (request, "nonce"));
    if (json_integer_value (json_object_get (request, "protocol")) != GQ_PROTOCOL_VERSION)
        return gq_fail (error, GQ_INVALID, "hello: this run speaks protocol %d",
                        GQ_PROTOCOL_VERSION);
    if (text == NULL || !gq_hex_decode (text, nonce, GQ_NONCE_BYTES))
        return gq_fail (error, GQ_INVALID, "hello: a nonce of %d hexadecimal digits is needed",
                        2 * GQ_NONCE_BYTES);
    if (!asks_for (request, "inline"))
        return gq_fail (error, GQ_INVALID, "hello: lanes must hold \"inline\"");
    *actor = GQ_ACTORS_MAX;
    if (id == NULL || json_is_null (id))
        return GQ_OK;
    if (!json_is_integer (id) || json_integer_value (id) < 0 ||
        json_integer_value (id) >= GQ_ACTORS_MAX)
        return gq_fail (error, GQ_INVALID, "hello: an actor's id is an integer from 0 to %d",
                        GQ_ACTORS_MAX - 1);
    *actor = (uint32_t)json_integer_value (id);
    return GQ_OK;
}

static json_t *
digest_json (const gq_core *core)
{
    return json_sprintf ("%016llx", (unsigned long long)core->layout.digest);
}

static void
describe_layout (const gq_core *core, json_t *answer)
{
    json_object_set_new (answer, "layout", gq_layout_to_json (&core->layout));
    json_object_set_new (answer, "digest", digest_json (core));
    json_object_set_new (answer, "parameters",
                         json_integer ((json_int_t)core->layout.element_count));
}

static json_t *
grant (const gq_core *core, uint32_t actor, uint32_t epoch)
{
    char run[2 * GQ_RUN_ID_BYTES + 1];
    gq_hex_encode (core->run, GQ_RUN_ID_BYTES, run);
    json_t *answer = json_pack (
        "{s:s, s:b, s:i, s:s, s:I, s:I, s:I, s:I, s:s, s:I, s:b, s:s}", "op", "hello", "ok", 1,
        "protocol", GQ_PROTOCOL_VERSION, "run", run, "term", (json_int_t)core->term, "version",
        (json_int_t)core->version, "actor", (json_int_t)actor, "epoch", (json_int_t)epoch, "lane",
        "inline", "aggregate", (json_int_t)core->config.aggregate, "need_weights",
        (int)!core->has_weights, "optimizer", gq_rule_plugin (core->rule)->name);
    if (answer == NULL)
        return NULL;
    bool bounded = core->config.max_staleness <= INT64_MAX;
    json_object_set_new (answer, "max_staleness",
                         bounded ? json_integer ((json_int_t)core->config.max_staleness)
                                 : json_null ());
    describe_layout (core, answer);
    return answer;
}

/* Shared memory for an actor of this host that asks for it. */
static void
offer_lane (gq_core *core, const json_t *request, uint32_t actor, uint32_t epoch, json_t *answer)
{
    char host[GQ_HOST_ID_BYTES];
    gq_error error = {""};
    const char *theirs = json_string_value (json_object_get (request, "host"));
    json_int_t window = json_integer_value (json_object_get (request, "window"));
    gq_host_id (host);
    if (core->lanes == NULL || !asks_for (request, "shm") || theirs == NULL || host[0] == '\0' ||
        strcmp (theirs, host) != 0 || window < 1 || window > GQ_WINDOW_MAX)
        return;
    const char *path = gq_lanes_grant (core->lanes, actor, epoch, (uint32_t)window, &error);
    if (path == NULL) {
        gq_log (GQ_LOG_WARNING, "no shared memory for an actor, which takes lane inline", "actor",
                "u", (uint64_t)actor, "message", "s", error.text, NULL);
        return;
    }
    json_object_set_new (answer, "lane", json_string ("shm"));
    json_object_set_new (
        answer, "shm",
        json_pack ("{s:s, s:s}", "slots", path, "board", gq_lanes_board_path (core->lanes)));
}

/*
 * A hello that would end an older life of its actor must come from a process that is alive: what a
 * dead one left in a network that was cut arrives after its successor's, and would fence that.  So
 * the asker is given a word that only it hears, and has to say it.  *answer: the refusal with that
 * word, when the request does not hold it.
 */
static bool
is_alive (const gq_core *core, const gq_identity *identity, const json_t *request, uint32_t actor,
          json_t **answer)
{
    const char *from = json_string_value (json_object_get (request, "from"));
    const char *nonce = json_string_value (json_object_get (request, "nonce"));
    const char *said = json_string_value (json_object_get (request, "challenge"));
    char word[17];
    /* Of this asker, this hello, and the life that it would end: no word outlives that one. */
    uint64_t hash = identity->secret + core->ledger.actors[actor].epoch;
    hash = XXH64 (nonce, strlen (nonce), hash);
    if (from != NULL)
        hash = XXH64 (from, strlen (from), hash);
    snprintf (word, sizeof word, "%016llx", (unsigned long long)hash);
    if (said != NULL && strcmp (said, word) == 0)
        return true;
    *answer = refuse (request, GQ_AGAIN, true,
                      "this actor's id has a life already: to end it, repeat the hello with this "
                      "challenge in it");
    if (*answer != NULL)
        json_object_set_new (*answer, "challenge", json_string (word));
    return false;
}

static json_t *
hello (gq_core *core, gq_identity *identity, const json_t *request)
{
    uint8_t nonce[GQ_NONCE_BYTES];
    uint32_t actor;
    uint32_t epoch;
    bool retry = false;
    gq_error error = {""};
    gq_status status = check_request (request, nonce, &actor, &error);
    if (status == GQ_OK)
        status = settle_layout (core, request, &retry, &error);
    if (status == GQ_OK)
        status = gq_identity_reserve (identity, &error);
    if (status != GQ_OK)
        return refuse (request, status, retry, error.text);
    if (gq_ledger_find (&core->ledger, &actor, nonce, &epoch) != GQ_OK)
        return refuse (request, GQ_FULL, false, "all 4096 actor ids of this run are taken");
    json_t *refusal = NULL;
    if (epoch == 0 && core->ledger.actors[actor].known &&
        !is_alive (core, identity, request, actor, &refusal))
        return refusal;
    if (epoch == 0) {
        /* Journaled before it is granted: no later life may grant it again. */
        epoch = identity->next_epoch;
        if (gq_core_grant (core, actor, epoch, nonce) != GQ_OK)
            return refuse (request, GQ_IO, true, "the optimizer cannot write its journal now");
        identity->next_epoch++;
    }
    gq_log (GQ_LOG_INFO, "hello", "actor", "u", (uint64_t)actor, "epoch", "u", (uint64_t)epoch,
            NULL);
    gq_core_share (core);
    json_t *answer = grant (core, actor, epoch);
    if (answer != NULL)
        offer_lane (core, request, actor, epoch, answer);
    return answer;
}

static json_t *
layout (const gq_core *core, const json_t *request)
{
    if (core->layout.tensor_count == 0)
        return refuse (request, GQ_LAYOUT, true, "the run has no model yet");
    json_t *answer = json_pack ("{s:s, s:b}", "op", "layout", "ok", 1);
    if (answer != NULL)
        describe_layout (core, answer);
    return answer;
}

json_t *
gq_hello_answer (gq_core *core, gq_identity *identity, const json_t *request)
{
    const char *op = json_string_value (json_object_get (request, "op"));
    json_t *answer = NULL;
    if (op != NULL && strcmp (op, "hello") == 0)
        answer = hello (core, identity, request);
    else if (op != NULL && strcmp (op, "layout") == 0)
        answer = layout (core, request);
    if (answer == NULL)
        return NULL;
    json_t *from = json_object_get (request, "from");
    json_t *nonce = json_object_get (request, "nonce");
    if (from != NULL)
        json_object_set (answer, "to", from);
    if (nonce != NULL)
        json_object_set (answer, "nonce", nonce);
    return answer;
}

static json_t *
rejected_by (const gq_core *core)
{
    json_t *object = json_object ();
    for (int i = 0; i < GQ_STATUS_COUNT; i++)
        if (core->rejected_by[i] > 0)
            json_object_set_new (object, gq_status_name ((gq_status)i),
                                 json_integer ((json_int_t)core->rejected_by[i]));
    return object;
}

/* Where a broker of this host finds large vectors. */
static void
describe_hop (const gq_core *core, json_t *report)
{
    char host[GQ_HOST_ID_BYTES];
    if (core->lanes == NULL || gq_lanes_hop (core->lanes) == NULL)
        return;
    gq_host_id (host);
    if (host[0] == '\0')
        return;
    json_object_set_new (report, "shm",
                         json_pack ("{s:s, s:o, s:s, s:s}", "host", host, "digest",
                                    digest_json (core), "board", gq_lanes_board_path (core->lanes),
                                    "broker", gq_lanes_hop_path (core->lanes)));
}

json_t *
gq_hello_report (gq_core *core, const gq_publisher *publisher, const gq_histogram *apply_us,
                 uint64_t checkpoint_version)
{
    char run[2 * GQ_RUN_ID_BYTES + 1];
    gq_hex_encode (core->run, GQ_RUN_ID_BYTES, run);
    const struct {
        const char *key;
        uint64_t value;
    } numbers[] = {{"term", core->term},
                   {"version", core->version},
                   {"start_version", core->start_version},
                   {"applied", core->applied},
                   {"rejected", gq_core_rejected (core)},
                   {"duplicates", core->ledger.duplicates},
                   {"outdated", core->ledger.outdated},
                   {"taken_early", core->lanes != NULL ? gq_lanes_early_total (core->lanes) : 0},
                   {"lsn", core->journal != NULL ? core->journal->lsn : 0},
                   {"malformed", core->malformed},
                   {"held", core->held},
                   {"parameters", core->layout.element_count},
                   {"published", publisher->published},
                   {"checkpoint_version", checkpoint_version},
                   {"staleness_p50", gq_histogram_quantile (&core->staleness, 0.5)},
                   {"staleness_p99", gq_histogram_quantile (&core->staleness, 0.99)},
                   {"staleness_max", core->staleness.max},
                   {"apply_us_p50", gq_histogram_quantile (apply_us, 0.5)},
                   {"apply_us_p99", gq_histogram_quantile (apply_us, 0.99)},
                   {"publish_us_p50", gq_histogram_quantile (&publisher->publish_us, 0.5)}};
    json_t *report =
        json_pack ("{s:s, s:s, s:s, s:s, s:o}", "op", "report", "role", "optimizer", "run", run,
                   "name", gq_rule_plugin (core->rule)->name, "rejected_by", rejected_by (core));
    for (size_t i = 0; report != NULL && i < sizeof numbers / sizeof numbers[0]; i++)
        json_object_set_new (report, numbers[i].key, json_integer ((json_int_t)numbers[i].value));
    if (report != NULL)
        describe_hop (core, report);
    const double lr = gq_rule_lr (core->rule);
    if (report != NULL && !isnan (lr))
        json_object_set_new (report, "lr", json_real (lr));
    return report;
}
