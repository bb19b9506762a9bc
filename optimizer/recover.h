/*
 * Recovery: the newest checkpoint, and then the journal behind it, decision by decision.  What a
 * starting optimizer does, and all of gradq-replay.  Idempotent: it writes nothing.
 *
 * Where gradients were only named, vectors come from the live state that the last life left in
 * shared memory: up to its record only ledger and counters are replayed, and behind it the one
 * gradient whose step was interrupted still lies in its actor's slot.
 */
#ifndef GQ_RECOVER_H
#define GQ_RECOVER_H

#include "checkpoint.h"
#include "core.h"
#include "journal.h"
#include "life.h"

typedef struct gq_recovery {
    /* in */
    gq_disk *disk;              /* of the journal */
    const char *checkpoints;    /* directory */
    const char *lane_directory; /* where an earlier life shared memory; NULL: do not look */
    bool numbers_only;          /* ledger and counters alone: no vector is replayed */
    bool alone;                 /* the run directory is locked: no optimizer is at work */
    const char *plugins;        /* of shipped rules, NULL: beside the program */
    const char *cpu;
    uint64_t checkpoint_max; /* start from no checkpoint of a higher version */
    uint64_t version_max;    /* stop at this version; UINT64_MAX: at the journal's end */
    uint64_t lsn_max;        /* stop behind this record; UINT64_MAX: at the journal's end */
    /* out */
    gq_rule *rule; /* that the core uses now, yours to free after the core; NULL: the one it had */
    gq_life life;  /* in force now; term 0: none was found */
    char *life_text;
    gq_journal_end end;
    uint64_t checkpoint_version; /* UINT64_MAX: no checkpoint was there */
    uint64_t checkpoint_lsn;     /* of the last record in it */
    uint64_t replayed;           /* records, */
    uint64_t named;              /* and those among them that only name their gradient */
    uint64_t live_lsn;           /* last record in the live state that was taken; 0: none was */
    uint64_t live_version;
    bool unmade; /* behind `end` is one record whose gradient is gone, and nobody was told of it */
    bool lost;   /* GQ_NOTFOUND, and behind `end` is a record whose gradient is gone, */
    bool restarted; /* because the machine was restarted since */
} gq_recovery;

/*
 * Recover `core`, which gq_core_init has prepared with any rule, and whose run is set.
 *
 * GQ_OK: *recovery says where it ended; a run without checkpoint or journal is fine.  GQ_MALFORMED:
 * damage, *error says where; GQ_NOTFOUND with `lost`: gradients are gone; GQ_NOTFOUND, GQ_ABI,
 * GQ_INVALID: a rule that the journal names cannot be loaded any more; GQ_AGAIN: an optimizer is at
 * work; GQ_IO, GQ_MEMORY.
 */
GQ_CHECK gq_status gq_recover (gq_recovery *recovery, gq_core *core, gq_error *error);

/* Free what it holds, after gq_core_clear. */
/* After a gq_recover that failed: as before it. */
void gq_recovery_begin_anew (gq_recovery *recovery, gq_core *core);

void gq_recovery_clear (gq_recovery *recovery);

#endif
