/*
 * Files that processes of one host map together: the ground of lane shm.
 *
 * They live in the run directory, not in /dev/shm: what a killed process leaves lies where the next
 * optimizer finds and removes it, and small containers do not bound it.  Who may not open the file
 * (another user, another host, another container) takes lane inline.
 */
#ifndef GQ_SHM_H
#define GQ_SHM_H

#include <limits.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gradq/status.h"

/* What starts on a page of its own starts at a multiple of this. */
#define GQ_SHM_PAGE 4096

typedef struct gq_shm {
    int fd;
    uint8_t *bytes; /* NULL: not mapped */
    size_t size;
    char path[PATH_MAX];
} gq_shm;

/*
 * A file of `size` zero bytes, mapped, for this user only (0600), under a temporary name until
 * gq_shm_show.  Its space is reserved: writing to it never fails for want of it.
 * GQ_OK; GQ_FULL, GQ_IO with *error, and nothing is left.
 */
GQ_CHECK gq_status gq_shm_create (gq_shm *shm, const char *path, size_t size, gq_error *error);

/* Give it its name, in the place of any file that had it.  GQ_OK, GQ_IO with *error. */
GQ_CHECK gq_status gq_shm_show (gq_shm *shm, gq_error *error);

/* Map an existing file, at least size_min bytes.  Its content is anybody's: check it.
 * GQ_OK; GQ_NOTFOUND, GQ_IO (no permission, say), GQ_MALFORMED (too short) with *error. */
GQ_CHECK gq_status gq_shm_open (gq_shm *shm, const char *path, size_t size_min, gq_error *error);

/*
 * A ring: `bytes` (a multiple of GQ_SHM_PAGE) at offset `at` of a file, mapped twice in a row, so
 * that what begins anywhere in the first copy and goes round the end lies in one piece.
 * NULL: errno says why.
 */
void *gq_shm_ring (int fd, uint64_t at, size_t bytes);
/* The same in memory of our own, all zero; takes memory only where it is used. */
void *gq_shm_ring_private (size_t bytes);
void gq_shm_ring_free (void *ring, size_t bytes); /* ring may be NULL */

/* Remove the name, if it is still this file's: the directory may have been moved, and another's be
 * in its place. */
void gq_shm_remove (const gq_shm *shm);

/* Unmap; the file stays.  Any number of times. */
void gq_shm_close (gq_shm *shm);

/* Hold the file's lock until it is closed or the process dies.  false: another process does. */
bool gq_shm_lock (const gq_shm *shm);
/* Does another process hold it? */
bool gq_shm_locked (const gq_shm *shm);

/* Which boot of which host this is, as text; two processes with the same one share memory. */
#define GQ_HOST_ID_BYTES 40
void gq_host_id (char id[GQ_HOST_ID_BYTES]);

/* Sleep while *word is `seen`, at most wait_ns; may end early.  And wake who sleeps on it. */
void gq_futex_wait (atomic_uint *word, unsigned seen, uint64_t wait_ns);
void gq_futex_wake (atomic_uint *word);

#endif
