/*
 * The few file operations that journal and recovery need, behind a table, so that a simulator or a
 * fault-injecting test can stand in for the disk.
 *
 * A disk is one flat directory.  Names are file names without '/'.
 */
#ifndef GQ_DISK_H
#define GQ_DISK_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "gradq/status.h"

typedef struct gq_disk gq_disk;

/* All return GQ_OK, GQ_FULL (no space: what was written of this call may be cut off again), GQ_IO
 * (give up: a disk that failed is not asked twice), or GQ_NOTFOUND. */
typedef struct gq_disk_ops {
    /* Sorted names that start with `prefix`; *names and its strings are one block to free.  Also
     * GQ_MEMORY, with nothing to free. */
    gq_status (*list) (gq_disk *disk, const char *prefix, char ***names, size_t *count);
    /* The whole file, read-only, until unmap. */
    gq_status (*map) (gq_disk *disk, const char *name, const uint8_t **bytes, size_t *size);
    void (*unmap) (gq_disk *disk, const uint8_t *bytes, size_t size);
    /* Open for appending at `size`, creating the file if need be, and cutting what lies beyond.
     * One file is open at a time; it stays so until the next open or close.  Never GQ_NOTFOUND. */
    gq_status (*open) (gq_disk *disk, const char *name, uint64_t size);
    /* Append all of parts[count]; on any failure the file may hold a part of it. */
    gq_status (*append) (gq_disk *disk, const struct iovec *parts, int count);
    gq_status (*cut) (gq_disk *disk, uint64_t size); /* the open file, back to `size` */
    gq_status (*sync) (gq_disk *disk);               /* data of the open file, and its name */
    gq_status (*remove) (gq_disk *disk, const char *name);
    void (*close) (gq_disk **disk_p);
} gq_disk_ops;

struct gq_disk {
    const gq_disk_ops *ops;
};

/* A directory of the file system, created if need be.  GQ_OK, GQ_IO, GQ_MEMORY with *error. */
GQ_CHECK gq_status gq_disk_open (gq_disk **disk_p, const char *directory, gq_error *error);

#endif
