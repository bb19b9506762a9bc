/*
 * What the suites of run directories share: a life of the optimizer without its sockets, which ends
 * as kill -9 ends it, and recoveries that only look.  Never fails quietly.
 */
#ifndef GQ_RUN_TESTING_H
#define GQ_RUN_TESTING_H

#include "replay_testing.h"

#include "log.h"
#include "optimizer/run.h"

/* More words than any test gives. */
#define WORDS_MAX 32

static char directory[64];
static gq_run run;
static gq_options *options;

static inline void
path_below (char path[PATH_MAX], const char *name)
{
    snprintf (path, PATH_MAX, "%s/%s", directory, name);
}

static inline void
directory_begin (void)
{
    gq_error error;
    /* What goes wrong on purpose is logged. */
    cr_assert_eq (gq_log_open ("test", "/dev/null", GQ_LOG_ERROR, &error), GQ_OK);
    support_directory (directory);
}

static inline void
directory_end (void)
{
    static const char *const parts[] = {"checkpoints", "journal"};
    for (size_t i = 0; i < 2; i++) {
        char path[PATH_MAX];
        path_below (path, parts[i]);
        if (access (path, F_OK) == 0)
            support_remove (path);
    }
    support_remove (directory);
}

static inline gq_options *
options_of (const char *const *words)
{
    gq_options *result = NULL;
    gq_error error = {""};
    const char *all[WORDS_MAX] = {"gradq-optimizer", "--plugins", build_path ("plugins")};
    int count = 3;
    for (; *words != NULL; words++) {
        cr_assert (count < WORDS_MAX);
        all[count++] = *words;
    }
    cr_assert_eq (
        gq_options_read (&result, GQ_PROGRAM_OPTIMIZER, count, (char **)(uintptr_t)all, &error),
        GQ_OK, "%s", error.text);
    return result;
}

/* Begin a life in the directory, under these words and --resume. */
static inline gq_status
try_open (const char *const *words, gq_error *error)
{
    const char *all[WORDS_MAX] = {"--run", directory, "--resume"};
    size_t count = 3;
    for (; *words != NULL; words++)
        all[count++] = *words;
    options = options_of (all);
    return gq_run_open (&run, &core, options, error);
}

/* The process is gone, without a word to the disk. */
static inline void
die (void)
{
    gq_core_clear (&core);
    gq_run_close (&run);
    gq_options_free (&options);
}

static inline void
write_checkpoint (void)
{
    gq_error error = {""};
    cr_assert_eq (gq_run_checkpoint (&run, &core, NULL, &error), GQ_OK, "%s", error.text);
}

static inline void
open_run (const char *const *words)
{
    gq_error error = {""};
    cr_assert_eq (try_open (words, &error), GQ_OK, "%s", error.text);
    rule = run.rule;
}

/* A run's first life: actors and weights come as they do to the service. */
static inline void
begin_run (const char *const *words)
{
    const gq_tensor_shape shapes[] = {{.name = "a", .rank = 1, .shape = {3}},
                                      {.name = "b", .rank = 2, .shape = {2, 2}}};
    const float weights[N] = {0.1f, -0.2f, 1e-30f, 4, 5, 6, 7};
    gq_layout layout;
    gq_status reason;
    open_run (words);
    cr_assert_eq (gq_layout_init (&layout, shapes, 2, NULL), GQ_OK);
    cr_assert_eq (gq_core_set_layout (&core, &layout), GQ_OK);
    for (uint32_t actor = 0; actor < ACTORS; actor++)
        grant (actor, EPOCH);
    gq_frame frame = support_frame (GQ_KIND_INIT, core.layout.digest, N);
    memcpy (frame.run, core.run, GQ_RUN_ID_BYTES);
    cr_assert_eq (take_frame (&frame, weights, &reason), GQ_OUTCOME_STARTED);
    write_checkpoint ();
}

/* ---- looking ---- */

/* What a recovery of the directory leads to. */
typedef struct view {
    gq_core core;
    gq_recovery recovery;
    gq_disk *disk;
    gq_error error;
} view;

static inline gq_status
view_open (view *self, uint64_t checkpoint_max, uint64_t version_max)
{
    static char checkpoints[PATH_MAX], journal[PATH_MAX], plugins[PATH_MAX];
    memset (self, 0, sizeof *self);
    path_below (checkpoints, "checkpoints");
    path_below (journal, "journal");
    snprintf (plugins, sizeof plugins, "%s", build_path ("plugins"));
    cr_assert_eq (gq_disk_open (&self->disk, journal, &self->error), GQ_OK, "%s", self->error.text);
    self->recovery = (gq_recovery){.disk = self->disk,
                                   .checkpoints = checkpoints,
                                   .plugins = plugins,
                                   .cpu = "auto",
                                   .checkpoint_max = checkpoint_max,
                                   .version_max = version_max,
                                   .lsn_max = UINT64_MAX};
    gq_core_init (&self->core, &plain, NULL);
    cr_assert_eq (gq_identity_read (self->core.run, directory, &self->error), GQ_OK, "%s",
                  self->error.text);
    return gq_recover (&self->recovery, &self->core, &self->error);
}

static inline void
view_close (view *self)
{
    gq_core_clear (&self->core);
    gq_recovery_clear (&self->recovery);
    self->disk->ops->close (&self->disk);
}

/* A recovery that succeeds leads to this state; answers where it started. */
static inline uint64_t
expect_recovers_to (uint64_t checkpoint_max, uint64_t digest)
{
    static view seen;
    cr_assert_eq (view_open (&seen, checkpoint_max, UINT64_MAX), GQ_OK, "%s", seen.error.text);
    cr_assert_eq (digest_of (&seen.core), digest, "from checkpoint %llu to version %llu",
                  (unsigned long long)seen.recovery.checkpoint_version,
                  (unsigned long long)seen.core.version);
    const uint64_t from = seen.recovery.checkpoint_version;
    view_close (&seen);
    return from;
}

/* ---- files ---- */

/* Names in a part of the directory that begin so, counted; the last of them in `last`. */
static inline size_t
count_files (const char *part, const char *prefix, char last[PATH_MAX])
{
    char path[PATH_MAX];
    char highest[256] = "";
    size_t count = 0;
    path_below (path, part);
    DIR *entries = opendir (path);
    cr_assert_not_null (entries, "%s", path);
    for (struct dirent *entry = readdir (entries); entry != NULL; entry = readdir (entries)) {
        if (strncmp (entry->d_name, prefix, strlen (prefix)) != 0)
            continue;
        count++;
        if (strcmp (entry->d_name, highest) > 0)
            snprintf (highest, sizeof highest, "%s", entry->d_name);
    }
    closedir (entries);
    if (last != NULL)
        snprintf (last, PATH_MAX, "%.64s/%.64s/%.200s", directory, part, highest);
    return count;
}

#endif
