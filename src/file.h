/*
 * File operations that a signal may cut short and that a file system may do in part: all that a
 * run directory is written with.
 */
#ifndef GQ_FILE_H
#define GQ_FILE_H

#include <stddef.h>
#include <sys/types.h>

#include "gradq/status.h"

/*
 * As openat, write, ftruncate, fsync and fdatasync, until they are done: EINTR is tried again, and
 * a short write goes on where it stopped.  Any other failure is returned at once, with errno.
 *
 * An interrupted sync has told of no error, so asking again hides none; a failed one must never be
 * tried again: the kernel may have dropped the pages, and a second success would lie.
 */
GQ_CHECK int gq_file_open (int directory_fd, const char *path, int flags, mode_t mode);
GQ_CHECK int gq_file_write (int fd, const void *bytes, size_t size); /* 0: all, or -1 */
GQ_CHECK int gq_file_resize (int fd, off_t size);
GQ_CHECK int gq_file_sync (int fd);
GQ_CHECK int gq_file_sync_data (int fd);

#endif
