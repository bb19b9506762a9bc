/*
 * Run directory.  Order matters throughout: lock before reading, the term on the disk before
 * anybody hears of it, this life in the journal before its first decision.
 */
#include "run.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "log.h"
#include "service.h"

/* A segment holds about a second of gradients of a million parameters: small enough to come and go
 * with checkpoints, large enough that beginning one costs nothing. */
#define SEGMENT_BYTES (64u << 20)
/* What recovery has to read at most, and half of what the journal takes on the disk. */
#define CHECKPOINT_BYTES (256u << 20)
#define MS_NS            1000000u

static gq_status
load_life (gq_run *self, const gq_options *options, gq_error *error)
{
    gq_error warning = {""};
    gq_status status = gq_life_from_options (&self->life, options);
    if (status != GQ_OK)
        return gq_fail (error, status, "out of memory");
    status = gq_life_load (&self->life, &self->rule, gq_options_text (options, "plugins"),
                           gq_options_text (options, "cpu"), &warning, error);
    if (status == GQ_OK && warning.text[0] != '\0')
        gq_log (GQ_LOG_WARNING, warning.text, NULL);
    return status;
}

static gq_status
lock_directory (gq_run *self, const char *directory, gq_error *error)
{
    char lock[PATH_MAX + 32];
    if (directory == NULL)
        return gq_fail (error, GQ_INVALID,
                        "--run DIR is needed: checkpoints, journal, term and lock live there");
    if (strlen (directory) > PATH_MAX - 64)
        return gq_fail (error, GQ_INVALID, "--run: the directory's name is too long");
    if (mkdir (directory, 0755) != 0 && errno != EEXIST)
        return gq_fail (error, GQ_IO, "cannot create %s: %s", directory, strerror (errno));
    snprintf (self->checkpoints, sizeof self->checkpoints, "%.4000s/checkpoints", directory);
    snprintf (lock, sizeof lock, "%.4000s/optimizer.lock", directory);
    char *absolute = realpath (directory, NULL);
    snprintf (self->lane_directory, sizeof self->lane_directory, "%.4000s/lane",
              absolute != NULL ? absolute : directory);
    free (absolute);
    gq_status status = gq_service_lock (&self->lock_fd, lock, error);
    if (status == GQ_REFUSED)
        return gq_fail (error, status,
                        "another optimizer works in %s; stop it, or choose another --run directory",
                        directory);
    return status;
}

/* Records name gradients that lay in the memory of another boot.  They name them only with --fsync
 * never, which says that the loss of power may lose what was acknowledged: so nobody is asked. */
static gq_status
give_up_lost (gq_run *self, gq_core *core, gq_recovery *recovery, gq_error *error)
{
    const gq_journal_end end = recovery->end;
    gq_log (
        GQ_LOG_WARNING,
        "the machine was restarted: gradients that were in its memory only are lost, as --fsync "
        "never allows; the run goes back to where they are not needed",
        "version", "u", core->version, "lsn", "u", end.lsn, NULL);
    gq_status status = gq_journal_cut (self->disk, &end);
    if (status != GQ_OK)
        return gq_fail (error, status, "the journal could not be cut: %s", gq_status_text (status));
    gq_recovery_begin_anew (recovery, core);
    return gq_recover (recovery, core, error);
}

/* The last gradient was journaled, its step had not begun, and it is gone: never acknowledged, so
 * its actor has it, and sends it again. */
static gq_status
drop_unmade (gq_run *self, const gq_recovery *recovery, gq_error *error)
{
    const gq_journal_end end = recovery->end;
    gq_log (GQ_LOG_WARNING, "the last record names a gradient that is gone; it is cut off", "lsn",
            "u", end.lsn + 1, NULL);
    gq_status status = gq_journal_cut (self->disk, &end);
    return status == GQ_OK ? GQ_OK
                           : gq_fail (error, status, "the journal could not be cut: %s",
                                      gq_status_text (status));
}

/* From checkpoint and journal to where the last life ended. */
static gq_status
recover (gq_run *self, gq_core *core, const gq_options *options, gq_recovery *recovery,
         gq_error *error)
{
    bool any = gq_checkpoint_any (self->checkpoints);
    if (any && !gq_options_flag (options, "resume"))
        return gq_fail (error, GQ_INVALID,
                        "%s holds checkpoints of a run; add --resume to go on with it, or choose "
                        "another --run directory",
                        self->checkpoints);
    *recovery = (gq_recovery){.disk = self->disk,
                              .checkpoints = self->checkpoints,
                              .lane_directory = self->lane_directory,
                              .alone = true,
                              .plugins = gq_options_text (options, "plugins"),
                              .cpu = gq_options_text (options, "cpu"),
                              .checkpoint_max = UINT64_MAX,
                              .version_max = UINT64_MAX,
                              .lsn_max = UINT64_MAX};
    gq_status status = gq_recover (recovery, core, error);
    if (status == GQ_NOTFOUND && recovery->lost && recovery->restarted)
        status = give_up_lost (self, core, recovery, error);
    if (status == GQ_OK && recovery->unmade)
        status = drop_unmade (self, recovery, error);
    if (status != GQ_OK)
        return status;
    /* What came from shared memory has to be in a checkpoint before that memory is used anew. */
    self->checkpoint_version =
        recovery->live_lsn > 0 || recovery->named > 0 ? UINT64_MAX : recovery->checkpoint_version;
    if (any || recovery->replayed > 0)
        gq_log (GQ_LOG_INFO, "recovered", "checkpoint_version", "u", recovery->checkpoint_version,
                "records_replayed", "u", recovery->replayed, "live_lsn", "u", recovery->live_lsn,
                "version", "u", core->version, "torn_bytes", "u", recovery->end.torn_bytes, NULL);
    const char *init = gq_options_text (options, "init");
    return core->has_weights || init == NULL ? GQ_OK : gq_checkpoint_init (core, init, error);
}

/* What becomes of moments: whoever swapped the rule by mistake has to hear that going back is
 * possible, and for how long. */
static void
warn_of_another_rule (const gq_core *core, const gq_rule *rule)
{
    const gq_rule_state *from = gq_rule_state_of (core->rule);
    const gq_rule_state *to = gq_rule_state_of (rule);
    const gq_rule_state *kept = &core->retired;
    if (gq_rule_state_same (to, kept))
        gq_log (GQ_LOG_WARNING,
                "another rule takes over the weights; it goes on with the slots that were kept of "
                "it, and those of the rule before it are kept in their place",
                "from", "s", from->name, "to", "s", to->name, "steps", "u", kept->steps, NULL);
    else
        gq_log (GQ_LOG_WARNING,
                "another rule takes over the weights; its slots start anew, and those of the rule "
                "before it are kept until a third one comes",
                "from", "s", from->name, "to", "s", to->name, "dropped", "s",
                kept->name[0] != '\0' ? kept->name : "none", NULL);
}

/* This life takes over from the recovered one, in the journal first. */
static gq_status
begin_life (gq_run *self, gq_core *core, const gq_recovery *recovery, const gq_options *options,
            gq_error *error)
{
    self->life.term = core->term = self->identity.term;
    self->life.version = core->version;
    json_t *json = gq_life_to_json (&self->life);
    self->life_text = json == NULL ? NULL : json_dumps (json, JSON_COMPACT);
    json_decref (json);
    if (self->life_text == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory");
    /* Before the journal says that this rule is in force: no checkpoint could be written. */
    gq_status status = gq_core_check_layout (self->rule, &core->layout, error);
    if (status != GQ_OK)
        return status;
    status = gq_journal_start (&self->journal, self->disk, self->identity.run, &recovery->end,
                               SEGMENT_BYTES, error);
    if (status != GQ_OK)
        return status;
    self->journal.off = strcmp (gq_options_text (options, "journal"), "off") == 0;
    const struct iovec part = {.iov_base = self->life_text, .iov_len = strlen (self->life_text)};
    status = gq_journal_append (&self->journal, GQ_RECORD_TERM, &part, 1);
    if (status == GQ_OK)
        status = gq_run_sync (self, UINT64_MAX);
    if (status != GQ_OK)
        return gq_fail (error, status, "cannot write the journal: %s", gq_status_text (status));
    if (core->has_weights &&
        !gq_rule_state_same (gq_rule_state_of (self->rule), gq_rule_state_of (core->rule))) {
        warn_of_another_rule (core, self->rule);
        self->checkpoint_version = UINT64_MAX; /* what is kept has to be in one */
    }
    if (gq_core_switch (core, &self->life.config, self->rule) != GQ_OK)
        return gq_fail (error, GQ_MEMORY, "out of memory");
    const unsigned threads = (unsigned)gq_options_count (options, "threads");
    status = threads > 1 ? gq_crew_new (&self->crew, threads, error) : GQ_OK;
    if (status == GQ_OK && gq_rule_use_crew (self->rule, self->crew) != GQ_OK)
        status = gq_fail (error, GQ_MEMORY, "out of memory");
    if (status != GQ_OK)
        return status;
    core->life = self->life_text;
    core->journal = &self->journal;
    core->name_gradients = self->name_gradients;
    core->start_version = core->version;
    return GQ_OK;
}

static void
read_policy (gq_run *self, const gq_options *options)
{
    const char *fsync_word = gq_options_text (options, "fsync");
    self->fsync = strcmp (fsync_word, "always") == 0     ? GQ_FSYNC_ALWAYS
                  : strcmp (fsync_word, "interval") == 0 ? GQ_FSYNC_INTERVAL
                                                         : GQ_FSYNC_NEVER;
    self->fsync_interval_ns = (uint64_t)(gq_options_number (options, "fsync-interval-ms") * MS_NS);
    self->keep_journal = strcmp (gq_options_text (options, "journal"), "keep") == 0;
    self->name_gradients = self->fsync == GQ_FSYNC_NEVER &&
                           strcmp (gq_options_text (options, "journal"), "recycle") == 0;
    self->kept = gq_options_count (options, "checkpoints-kept");
}

gq_status
gq_run_open (gq_run *self, gq_core *core, const gq_options *options, gq_error *error)
{
    const char *directory = gq_options_text (options, "run");
    char journal[PATH_MAX];
    gq_recovery recovery = {0};
    *self = (gq_run){.lock_fd = -1, .checkpoint_version = UINT64_MAX};
    read_policy (self, options);
    gq_status status = load_life (self, options, error);
    if (status != GQ_OK)
        return status;
    gq_core_init (core, &self->life.config, self->rule);
    status = lock_directory (self, directory, error);
    if (status == GQ_OK)
        status = gq_identity_open (&self->identity, directory, error);
    if (status != GQ_OK)
        return status;
    memcpy (core->run, self->identity.run, GQ_RUN_ID_BYTES);
    snprintf (journal, sizeof journal, "%.4000s/journal", directory);
    status = gq_disk_open (&self->disk, journal, error);
    if (status == GQ_OK)
        status = recover (self, core, options, &recovery, error);
    if (status == GQ_OK)
        status = begin_life (self, core, &recovery, options, error);
    if (status != GQ_OK)
        gq_core_clear (core); /* it may use the recovery's rule, which goes now */
    gq_recovery_clear (&recovery);
    return status;
}

/* One checkpoint more is kept, or the newest has been written anew: a version has one file. */
static void
remember (gq_run *self, uint64_t version)
{
    if (self->kept_count > 0 && self->kept_version == version) {
        self->kept_count--;
    } else if (self->kept_count == self->kept) {
        memmove (self->kept_lsn, self->kept_lsn + 1,
                 (self->kept_count - 1) * sizeof self->kept_lsn[0]);
        self->kept_count--;
    }
    self->kept_lsn[self->kept_count++] = self->journal.lsn;
    self->kept_version = version;
}

gq_status
gq_run_checkpoint (gq_run *self, gq_core *core, char *path, gq_error *error)
{
    gq_status status = gq_checkpoint_write (core, self->checkpoints, self->kept, path, error);
    if (status != GQ_OK)
        return status;
    self->checkpoint_version = core->version;
    self->checkpoint_bytes = self->journal.written;
    remember (self, core->version);
    /* Only when all the kept ones are of this life is the place of the oldest known. */
    if (self->kept_count == self->kept && !self->keep_journal)
        gq_journal_forget (&self->journal, self->kept_lsn[0]);
    return GQ_OK;
}

bool
gq_run_checkpoint_due (const gq_run *self)
{
    return self->journal.written - self->checkpoint_bytes > CHECKPOINT_BYTES;
}

gq_status
gq_run_sync (gq_run *self, uint64_t now_ns)
{
    if (self->fsync == GQ_FSYNC_NEVER ||
        (self->fsync == GQ_FSYNC_INTERVAL && now_ns < self->fsync_ns))
        return GQ_OK;
    self->fsync_ns = now_ns + self->fsync_interval_ns;
    return gq_journal_sync (&self->journal);
}

void
gq_run_close (gq_run *self)
{
    gq_rule_free (&self->rule);
    gq_crew_free (&self->crew);
    gq_life_clear (&self->life);
    free (self->life_text);
    if (self->disk != NULL)
        self->disk->ops->close (&self->disk);
    if (self->lock_fd >= 0)
        close (self->lock_fd);
}
