/*
 * A disk in memory for tests and simulation: the journal's path without a file system, with every
 * fault of one.  Never forgiving: reading past a mapped file runs into the sanitizer's guard, and
 * what was not synced is lost when the power is.
 *
 * Two states of every file are kept.  The live one is what a process sees, and what the next one
 * sees after a kill -9.  The durable one is what a loss of power leaves: data as of the last sync,
 * names and removals as of the last sync of a newly opened file (as src/disk.c syncs the directory
 * only then).
 */
#ifndef GQ_MEMORY_DISK_H
#define GQ_MEMORY_DISK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "disk.h"

#define GQ_MEMORY_DISK_NAME_MAX 64

typedef struct gq_memory_bytes {
    uint8_t *at;
    size_t size;
    size_t capacity;
} gq_memory_bytes;

typedef struct gq_memory_file {
    char name[GQ_MEMORY_DISK_NAME_MAX];
    gq_memory_bytes live, durable;
    size_t same; /* the first bytes, in which the two certainly agree */
    bool here;   /* the live name is there */
    bool stays;  /* the durable one is */
} gq_memory_file;

typedef struct gq_memory_disk {
    gq_disk base; /* first: a gq_disk * of ours is a gq_memory_disk * */
    gq_memory_file *files;
    size_t count, capacity;
    size_t open;       /* index of the open file, SIZE_MAX: none */
    bool name_pending; /* the next sync makes names durable */

    /* ---- faults, set by the test at any time ---- */
    uint64_t room_bytes;    /* for all live files; an append beyond writes what fits: GQ_FULL */
    uint64_t fail_at_call;  /* the call that makes `calls` this fails with GQ_IO; 0: none */
    uint64_t partial_bytes; /* that much of an append which fails so is written all the same */

    /* ---- what happened ---- */
    uint64_t calls;         /* of all operations but unmap and close */
    uint64_t written_bytes; /* by append */
    uint64_t syncs;
    uint64_t maps;        /* that are not unmapped yet */
    bool failed;          /* a call gave GQ_IO */
    uint64_t after_fault; /* calls after that one: nobody should ask a failed disk again */
} gq_memory_disk;

/* Empty, endless and without fault; NULL: out of memory.  ops->close destroys it. */
gq_memory_disk *gq_memory_disk_new (void);

/* Take all faults away and forget that there was one. */
void gq_memory_disk_repair (gq_memory_disk *disk);

/* The process dies: no file is open, everything written stays. */
void gq_memory_disk_kill (gq_memory_disk *disk);

/* The power fails: everything that was not synced is gone. */
void gq_memory_disk_crash (gq_memory_disk *disk);

/*
 * The power fails, and chance decides how much of what was not synced is there: each file is its
 * durable self or the live one cut anywhere in the unsynced part, or zeros from there on; each
 * unsynced name and removal took place or not.  The same *seed does the same; it moves on.
 */
void gq_memory_disk_crash_anywhere (gq_memory_disk *disk, uint64_t *seed);

/* The live bytes of a file, to look at or to damage; NULL: there is none of this name.  Valid until
 * the next change of the file. */
uint8_t *gq_memory_disk_bytes (gq_memory_disk *disk, const char *name, size_t *size);

/* Make a file of this name hold a copy of bytes[size], durably, whatever it held. */
GQ_CHECK gq_status gq_memory_disk_put (gq_memory_disk *disk, const char *name, const void *bytes,
                                       size_t size);

#endif
