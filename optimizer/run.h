/*
 * The run directory: lock, identity, checkpoints, journal, and the way back from them.  Everything
 * of the optimizer that touches a disk.
 */
#ifndef GQ_RUN_H
#define GQ_RUN_H

#include <limits.h>

#include "checkpoint.h"
#include "core.h"
#include "identity.h"
#include "life.h"
#include "options.h"
#include "recover.h"

typedef enum gq_fsync {
    GQ_FSYNC_NEVER,    /* survives the death of every process */
    GQ_FSYNC_INTERVAL, /* after a loss of power, all but the last moments */
    GQ_FSYNC_ALWAYS    /* acknowledged means on the disk */
} gq_fsync;

/* Checkpoints whose place in the journal is remembered; --checkpoints-kept goes up to this. */
#define GQ_KEPT_MAX 1000

typedef struct gq_run {
    char checkpoints[PATH_MAX];
    char lane_directory[PATH_MAX]; /* absolute: actors are told */
    int lock_fd;
    gq_identity identity;
    gq_life life; /* this one */
    char *life_text;
    gq_rule *rule; /* this life's, used by the core */
    gq_crew *crew; /* its threads; NULL: one does all */
    gq_disk *disk; /* of the journal */
    gq_journal journal;
    bool keep_journal;
    bool name_gradients; /* in the journal, where shared memory has them */
    gq_fsync fsync;
    uint64_t fsync_interval_ns;
    uint64_t fsync_ns;              /* due */
    uint64_t kept;                  /* checkpoints to keep */
    uint64_t kept_lsn[GQ_KEPT_MAX]; /* of the checkpoints written by this life, newest last */
    uint64_t kept_count;
    uint64_t kept_version;       /* of the last of them */
    uint64_t checkpoint_version; /* of the newest checkpoint, UINT64_MAX: one has to be written */
    uint64_t checkpoint_bytes;   /* that the journal had written by then */
} gq_run;

/*
 * Lock the directory, raise the term, recover *core from checkpoint and journal or take --init, and
 * begin this life in the journal.  The core is then ready, and has weights or waits for some.  When
 * this life has another rule than the one before, or something was recovered from shared memory, a
 * checkpoint has to be written before the first gradient is taken, and before gq_core_share:
 * checkpoint_version is UINT64_MAX then.
 *
 * GQ_OK; else *error says what to do, and gq_run_close cleans up: GQ_INVALID, GQ_NOTFOUND, GQ_ABI
 * (configuration), GQ_REFUSED (another optimizer works here), GQ_MALFORMED (damage), GQ_FULL,
 * GQ_IO, GQ_MEMORY.
 */
GQ_CHECK gq_status gq_run_open (gq_run *run, gq_core *core, const gq_options *options,
                                gq_error *error);

/* Checkpoint the core, and forget what the journal no longer needs.  Statuses of
 * gq_checkpoint_write. */
GQ_CHECK gq_status gq_run_checkpoint (gq_run *run, gq_core *core, char *path, gq_error *error);

/* Has the journal grown so much since the last checkpoint that another one is due? */
bool gq_run_checkpoint_due (const gq_run *run);

/* Before anything is acknowledged or published: sync as --fsync says.  GQ_OK, GQ_IO: end. */
GQ_CHECK gq_status gq_run_sync (gq_run *run, uint64_t now_ns);

/* After gq_core_clear: the core uses the rule. */
void gq_run_close (gq_run *run);

#endif
