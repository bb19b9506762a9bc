/*
 * gradq-replay: what a run directory says, without the service.  Reproduces any version that
 * checkpoint and journal still reach, verifies them against each other, explains damage, and, only
 * when asked, cuts it off.
 *
 * Must never write into a run directory but for --cut, and never beside a living optimizer then.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "hex.h"
#include "log.h"
#include "optimizer/checkpoint.h"
#include "optimizer/checkpoint_internal.h"
#include "optimizer/identity.h"
#include "optimizer/journal_format.h"
#include "optimizer/ledger_json.h"
#include "optimizer/recover.h"
#include "options.h"
#include "safetensors.h"
#include "service.h"

typedef struct replay {
    const gq_options *options;
    char checkpoints[PATH_MAX];
    char lane_directory[PATH_MAX]; /* "": what lies in shared memory is not looked at */
    bool numbers_only;
    uint64_t cut_lsn; /* of the last record before the latest cut; UINT64_MAX: none was made */
    int lock_fd;      /* of the run directory, to cut; -1: an optimizer may be at work */
    uint8_t run[GQ_RUN_ID_BYTES];
    gq_disk *disk;
    gq_core core;
    gq_rule *rule; /* only to start a core with */
    gq_recovery recovery;
} replay;

static int
complain (const gq_error *error, int code)
{
    fprintf (stderr, "gradq-replay: %s\n", error->text);
    return code;
}

static gq_status
open_directory (replay *self, gq_error *error)
{
    const char *run = gq_options_text (self->options, "run");
    char path[PATH_MAX];
    if (run == NULL)
        return gq_fail (error, GQ_INVALID, "--run DIR is needed");
    snprintf (self->checkpoints, sizeof self->checkpoints, "%.4000s/checkpoints", run);
    snprintf (path, sizeof path, "%.4000s/journal", run);
    if (access (path, R_OK) != 0)
        return gq_fail (error, GQ_NOTFOUND, "%s: no journal there; is this a run directory?", path);
    gq_status status = gq_identity_read (self->run, run, error);
    return status == GQ_OK ? gq_disk_open (&self->disk, path, error) : status;
}

/* Recover up to `version`, or to record `lsn`, from the newest checkpoint that is no newer than
 * `from`. */
static gq_status
reach (replay *self, uint64_t from, uint64_t version, uint64_t lsn, gq_error *error)
{
    static const gq_core_config config = {.aggregate = 1, .max_staleness = UINT64_MAX};
    self->recovery = (gq_recovery){
        .disk = self->disk,
        .checkpoints = self->checkpoints,
        .lane_directory = self->lane_directory[0] != '\0' ? self->lane_directory : NULL,
        .numbers_only = self->numbers_only,
        .alone = self->lock_fd >= 0,
        .plugins = gq_options_text (self->options, "plugins"),
        .cpu = gq_options_text (self->options, "cpu"),
        .checkpoint_max = from,
        .version_max = version,
        .lsn_max = lsn};
    gq_status status = gq_rule_load (&self->rule, "sgd", self->recovery.plugins, NULL, 0,
                                     self->recovery.cpu, NULL, error);
    if (status != GQ_OK)
        return status;
    gq_core_init (&self->core, &config, self->rule);
    memcpy (self->core.run, self->run, GQ_RUN_ID_BYTES);
    return gq_recover (&self->recovery, &self->core, error);
}

static void
leave (replay *self)
{
    gq_core_clear (&self->core);
    gq_recovery_clear (&self->recovery);
    gq_rule_free (&self->rule);
}

static uint64_t
digest (const float *vector, uint64_t count)
{
    return XXH64 (vector, count * sizeof *vector, 0);
}

/* Of the same rule, with the same slots, scalars and steps?  Both may be of none. */
static bool
same_rule_state (const gq_rule_state *a, const gq_rule_state *b)
{
    if (!gq_rule_state_same (a, b) || a->n != b->n || a->steps != b->steps ||
        a->version != b->version ||
        memcmp (a->scalars, b->scalars, a->scalar_count * sizeof (double)) != 0)
        return false;
    for (size_t i = 0; i < a->slot_count; i++)
        if (memcmp (a->slots[i], b->slots[i], a->n * sizeof (float)) != 0)
            return false;
    return true;
}

/* Are weights, the states of both rules and the step being aggregated equal?  Compares what two
 * recoveries up to the same record come to. */
static bool
same_state (gq_core *a, gq_core *b)
{
    uint64_t bytes = a->layout.element_count * sizeof (float);
    return a->version == b->version && a->applied == b->applied && a->held == b->held &&
           a->layout.digest == b->layout.digest &&
           memcmp (gq_buffers_current (a->buffers), gq_buffers_current (b->buffers), bytes) == 0 &&
           (a->held == 0 || memcmp (a->sum, b->sum, bytes) == 0) &&
           same_rule_state (gq_rule_state_of (a->rule), gq_rule_state_of (b->rule)) &&
           same_rule_state (&a->retired, &b->retired);
}

/* Ledger and counters, which need no vector. */
static bool
same_numbers (const gq_core *a, const gq_core *b)
{
    json_t *one = gq_ledger_to_json (&a->ledger);
    json_t *other = gq_ledger_to_json (&b->ledger);
    bool same = one != NULL && json_equal (one, other) && a->version == b->version &&
                a->applied == b->applied && a->held == b->held &&
                a->staleness_count == b->staleness_count && a->staleness_sum == b->staleness_sum;
    json_decref (one);
    json_decref (other);
    return same;
}

/* Gradients between the two are gone, for the journal only names them: without them its decisions
 * must still come to what the checkpoint says of ledger and counters. */
static gq_status
verify_numbers (const replay *self, replay *other, uint64_t before, uint64_t version,
                gq_error *error)
{
    leave (other);
    other->numbers_only = true;
    gq_status status = reach (other, before, UINT64_MAX, self->recovery.checkpoint_lsn, error);
    if (status == GQ_OK && !same_numbers (&self->core, &other->core))
        status = gq_fail (error, GQ_CHECKSUM,
                          "version %" PRIu64 ": the checkpoint's ledger or counters differ from "
                          "the journal behind checkpoint %" PRIu64,
                          version, before);
    if (status == GQ_OK)
        printf ("not replayed %" PRIu64 " -> %" PRIu64 ": %" PRIu64 " gradients are only named in "
                "the journal; ledger and counters verified (%" PRIu64 " records)\n",
                before, version, other->recovery.named, other->recovery.replayed);
    return status;
}

/* Replay from the checkpoint before `version` must come to what the checkpoint of it holds: up to
 * the last record that it covers, for several records may leave the version as it is. */
static gq_status
verify_step (replay *self, uint64_t before, uint64_t version, gq_error *error)
{
    replay other = {.options = self->options, .disk = self->disk, .lock_fd = -1};
    memcpy (other.run, self->run, sizeof other.run);
    memcpy (other.checkpoints, self->checkpoints, sizeof other.checkpoints);
    gq_status status = reach (self, version, version, UINT64_MAX, error);
    if (status == GQ_OK)
        status = reach (&other, before, UINT64_MAX, self->recovery.checkpoint_lsn, error);
    if (status == GQ_NOTFOUND && other.recovery.lost) {
        status = verify_numbers (self, &other, before, version, error);
        leave (&other);
        leave (self);
        return status;
    }
    if (status == GQ_OK && other.core.version < version)
        status =
            gq_fail (error, GQ_CHECKSUM,
                     "version %" PRIu64 ": the journal behind checkpoint %" PRIu64
                     " leads to %" PRIu64 " only; a life with --journal off cannot be verified",
                     version, before, other.core.version);
    else if (status == GQ_OK && !same_state (&self->core, &other.core))
        status = gq_fail (error, GQ_CHECKSUM,
                          "version %" PRIu64 ": the checkpoint differs from the replay of the "
                          "journal behind checkpoint %" PRIu64,
                          version, before);
    if (status == GQ_OK)
        printf ("verified %" PRIu64 " -> %" PRIu64 " (%" PRIu64 " records)\n", before, version,
                other.recovery.replayed);
    leave (&other);
    leave (self);
    return status;
}

/* Each retained checkpoint against the replay from the one before it. */
static gq_status
verify (replay *self, gq_error *error)
{
    uint64_t *versions;
    size_t count = gq_checkpoint_list (self->checkpoints, &versions);
    gq_status status = GQ_OK;
    for (size_t i = count; i > 1 && status == GQ_OK; i--)
        status = verify_step (self, versions[i - 1], versions[i - 2], error);
    free (versions);
    return status;
}

static gq_status
write_weights (const replay *self, const char *path, gq_error *error)
{
    const gq_layout *layout = &self->core.layout;
    const float *at = gq_buffers_current (self->core.buffers);
    gq_tensor *tensors = calloc (layout->tensor_count, sizeof *tensors);
    char version[32];
    if (tensors == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory");
    for (size_t i = 0; i < layout->tensor_count; i++) {
        const gq_tensor_shape *shape = &layout->tensors[i];
        uint64_t elements = gq_tensor_elements (shape);
        tensors[i] = (gq_tensor){.name = shape->name,
                                 .dtype = GQ_DTYPE_F32,
                                 .rank = shape->rank,
                                 .element_count = elements,
                                 .data = at,
                                 .bytes = elements * sizeof *at};
        memcpy (tensors[i].shape, shape->shape, sizeof shape->shape);
        at += elements;
    }
    snprintf (version, sizeof version, "%" PRIu64, self->core.version);
    const gq_meta meta = {.key = "version", .value = version};
    gq_status status = gq_safetensors_write (path, tensors, layout->tensor_count, &meta, 1, error);
    free (tensors);
    return status;
}

/* Before anything is read: where to cut must not have moved by then. */
static gq_status
lock (replay *self, gq_error *error)
{
    char path[PATH_MAX];
    snprintf (path, sizeof path, "%.4000s/optimizer.lock", gq_options_text (self->options, "run"));
    gq_status status = gq_service_lock (&self->lock_fd, path, error);
    return status == GQ_REFUSED
               ? gq_fail (error, status, "an optimizer is at work in this run: stop it first")
               : status;
}

/* Cut the journal behind its last good record; only what was never acknowledged may be lost by a
 * torn tail, but by damage anything behind it is: hence only on request. */
static gq_status
cut (replay *self, gq_error *error)
{
    const gq_journal_end *end = &self->recovery.end;
    gq_status status = gq_journal_cut (self->disk, end);
    if (status != GQ_OK)
        return gq_fail (error, status, "the journal could not be cut: %s", gq_status_text (status));
    printf ("cut %s to %" PRIu64 " bytes; the last record is %" PRIu64 "\n", end->segment,
            end->size, end->lsn);
    return GQ_OK;
}

/* The version asked for, or the last one; what there is to say about the journal.  With --cut, once
 * more behind each cut, which must have made it shorter. */
static gq_status
show (replay *self, gq_error *error)
{
    uint64_t until = gq_options_count (self->options, "until");
    const char *out = gq_options_text (self->options, "out");
    snprintf (self->lane_directory, sizeof self->lane_directory, "%.4000s/lane",
              gq_options_text (self->options, "run"));
    gq_status status = reach (self, UINT64_MAX, until, UINT64_MAX, error);
    const gq_journal_end *end = &self->recovery.end;
    const bool unmade = status == GQ_OK && self->recovery.unmade;
    if (status == GQ_NOTFOUND && self->recovery.lost && until != UINT64_MAX)
        return gq_fail (error, status,
                        "version %" PRIu64 " cannot be made: gradients before it are only named "
                        "in the journal; version %" PRIu64 " can, and so can those of checkpoints "
                        "(--journal keep keeps all)",
                        until, self->core.version);
    if ((status == GQ_MALFORMED || (status == GQ_NOTFOUND && self->recovery.lost) || unmade) &&
        self->lock_fd >= 0 && end->segment[0] != '\0' && end->lsn < self->cut_lsn) {
        fprintf (stderr, "gradq-replay: %s\n",
                 unmade ? "the last record names a gradient that is gone" : error->text);
        self->cut_lsn = end->lsn;
        status = cut (self, error);
        if (status == GQ_OK) {
            leave (self);
            return show (self, error); /* what is left */
        }
    }
    if (status != GQ_OK)
        return status;
    if (end->torn)
        printf ("torn tail: %" PRIu64 " bytes in %s behind offset %" PRIu64
                "; the next start cuts them\n",
                end->torn_bytes, end->segment, end->size);
    if (self->recovery.live_lsn > 0)
        printf ("live state: version %" PRIu64 ", in shared memory up to record %" PRIu64 "\n",
                self->recovery.live_version, self->recovery.live_lsn);
    if (!self->core.has_weights)
        return gq_fail (error, GQ_NOTFOUND, "the run has no weights yet");
    if (until != UINT64_MAX && self->core.version != until)
        return gq_fail (error, GQ_NOTFOUND,
                        "version %" PRIu64 " cannot be reproduced: the run reaches %" PRIu64, until,
                        self->core.version);
    if (out != NULL)
        status = write_weights (self, out, error);
    if (status == GQ_OK)
        printf ("version %" PRIu64 " weights xxh64:%016" PRIx64 "\n", self->core.version,
                digest (gq_buffers_current (self->core.buffers), self->core.layout.element_count));
    return status;
}

static int
run (const gq_options *options)
{
    gq_error error = {""};
    replay *self = calloc (1, sizeof *self);
    if (self == NULL)
        return GQ_EXIT_FAILED;
    self->options = options;
    self->cut_lsn = UINT64_MAX;
    self->lock_fd = -1;
    gq_status status = open_directory (self, &error);
    int code = status == GQ_INVALID    ? GQ_EXIT_USAGE
               : status == GQ_NOTFOUND ? GQ_EXIT_CONFIG
                                       : GQ_EXIT_FAILED;
    if (status == GQ_OK && gq_options_flag (options, "cut")) {
        if (gq_options_count (options, "until") != UINT64_MAX) {
            status = gq_fail (&error, GQ_INVALID,
                              "--cut looks at the whole run: it cannot be used with --until");
            code = GQ_EXIT_USAGE;
        } else {
            status = lock (self, &error);
        }
    }
    if (status == GQ_OK && gq_options_flag (options, "verify"))
        status = verify (self, &error);
    if (status == GQ_OK) {
        status = show (self, &error);
        leave (self);
    }
    if (self->disk != NULL)
        self->disk->ops->close (&self->disk);
    if (self->lock_fd >= 0)
        close (self->lock_fd);
    free (self);
    return status == GQ_OK ? GQ_EXIT_OK : complain (&error, code);
}

int
main (int argc, char **argv)
{
    gq_error error = {""};
    gq_options *options = NULL;
    gq_status status = gq_options_read (&options, GQ_PROGRAM_REPLAY, argc, argv, &error);
    if (status == GQ_AGAIN)
        return GQ_EXIT_OK;
    if (status == GQ_OK)
        status = gq_log_open ("replay", NULL, GQ_LOG_ERROR, &error);
    int code = status == GQ_OK ? run (options) : complain (&error, gq_options_exit (status));
    gq_options_free (&options);
    return code;
}
