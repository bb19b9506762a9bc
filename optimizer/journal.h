/*
 * Journal: every decision of the optimizer, in order, before it takes effect.  Between steps 4 and
 * 5 of a gradient's path.  docs/PROTOCOL.md has the bytes.
 *
 * Append-only segments of records, each with its number (lsn, from 1), the CRC of the one before
 * it, and its own.  What was appended survives the death of every process; what was synced, the
 * loss of power.
 */
#ifndef GQ_JOURNAL_H
#define GQ_JOURNAL_H

#include <stdbool.h>
#include <stdint.h>

#include "disk.h"
#include "gradq/protocol.h"

typedef enum gq_record_kind {
    GQ_RECORD_TERM = 1,     /* JSON: a life of the optimizer begins, with these settings */
    GQ_RECORD_GRANT = 2,    /* an actor is granted an epoch: gq_grant */
    GQ_RECORD_GRADIENT = 3, /* a frame, accepted */
    GQ_RECORD_REFUSAL = 4,  /* u32 gq_status, u32 0, then the frame's header */
    GQ_RECORD_NAMED = 5     /* the header of a frame, accepted, u64 gq_live_boot */
} gq_record_kind;

typedef struct gq_record {
    uint64_t lsn;
    uint32_t kind;
    const uint8_t *payload; /* 8-byte aligned */
    uint64_t payload_bytes;
    const char *segment; /* file and */
    uint64_t offset;     /* place in it, for messages */
    uint32_t crc;        /* what the next record, and a checkpoint, call chain */
    const float *vector; /* NAMED: the gradient, if whoever replays it has its values; else NULL */
} gq_record;

/* Called for each record in order; anything but GQ_OK ends the reading with that status. */
typedef gq_status gq_record_handler (void *context, const gq_record *record, gq_error *error);

/* Where reading ended. */
typedef struct gq_journal_end {
    uint64_t lsn;     /* of the last good record, 0: none */
    uint32_t chain;   /* its CRC */
    char segment[64]; /* the last segment, "": none */
    uint64_t size;    /* of its good part */
    bool torn;        /* bytes of an unfinished record follow */
    uint64_t torn_bytes;
} gq_journal_end;

/*
 * Read all records with lsn > after_lsn, where after_chain is the CRC of that one: what a
 * checkpoint holds, or 0 and 0 for all.
 *
 * GQ_OK: *end says where it ended, never before after_lsn; a torn tail is an unfinished last record
 * or segment header with no valid record after it in the last segment.  GQ_MALFORMED: damage
 * anywhere else, or records after after_lsn are missing; *error names segment, offset, reason and
 * what can be saved.  GQ_RUN: another run's journal.  GQ_IO, GQ_MEMORY, or what the handler
 * answered.
 */
GQ_CHECK gq_status gq_journal_read (gq_disk *disk, const uint8_t run[GQ_RUN_ID_BYTES],
                                    uint64_t after_lsn, uint32_t after_chain,
                                    gq_record_handler *handler, void *context, gq_journal_end *end,
                                    gq_error *error);

typedef struct gq_journal {
    gq_disk *disk; /* borrowed */
    uint8_t run[GQ_RUN_ID_BYTES];
    uint64_t lsn;           /* of the last record */
    uint32_t chain;         /* its CRC */
    uint64_t size;          /* of the open segment; 0: none is open */
    uint64_t segment_bytes; /* a new one is begun beyond this */
    uint64_t written;       /* bytes of records appended since start */
    bool unsynced;
    bool failed; /* the disk did: nothing may follow what it may have left, says append and sync */
    bool off;    /* append and sync do nothing, and say GQ_OK */
} gq_journal;

/*
 * Go on behind `end`: cuts a torn tail.  What was read counts as not synced: gq_journal_sync
 * before it is acknowledged, where power may be lost.  GQ_OK, GQ_IO, GQ_FULL with *error.
 */
GQ_CHECK gq_status gq_journal_start (gq_journal *journal, gq_disk *disk,
                                     const uint8_t run[GQ_RUN_ID_BYTES], const gq_journal_end *end,
                                     uint64_t segment_bytes, gq_error *error);

/*
 * Append one record whose payload is parts[count] (at most GQ_RECORD_PARTS_MAX).
 * GQ_OK: lsn rose by one.  GQ_FULL: no space, nothing changed.  GQ_IO: the disk failed; end.
 */
#define GQ_RECORD_PARTS_MAX 4
GQ_CHECK gq_status gq_journal_append (gq_journal *journal, gq_record_kind kind,
                                      const struct iovec *parts, int count);

/* The same, where the CRC32C of the last part is known: saves a pass over a gradient. */
GQ_CHECK gq_status gq_journal_append_summed (gq_journal *journal, gq_record_kind kind,
                                             const struct iovec *parts, int count,
                                             uint32_t last_crc);

/* Make what was appended survive a loss of power.  GQ_OK, GQ_IO: end, never try again. */
GQ_CHECK gq_status gq_journal_sync (gq_journal *journal);

/* Remove all behind `end`.  Statuses of the disk. */
GQ_CHECK gq_status gq_journal_cut (gq_disk *disk, const gq_journal_end *end);

/* Delete segments that hold no record with lsn > covered_lsn.  The open one stays. */
void gq_journal_forget (gq_journal *journal, uint64_t covered_lsn);

#endif
