/*
 * File operations that are done when they return.  They must never try again after anything but
 * EINTR.
 */
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <unistd.h>

int
gq_file_open (int directory_fd, const char *path, int flags, mode_t mode)
{
    int fd;
    do
        fd = openat (directory_fd, path, flags, mode);
    while (fd < 0 && errno == EINTR);
    return fd;
}

int
gq_file_write (int fd, const void *bytes, size_t size)
{
    const uint8_t *at = bytes;
    while (size > 0) {
        ssize_t written = write (fd, at, size);
        if (written < 0 && errno != EINTR)
            return -1;
        if (written > 0) {
            at += written;
            size -= (size_t)written;
        }
    }
    return 0;
}

int
gq_file_resize (int fd, off_t size)
{
    int rc;
    do
        rc = ftruncate (fd, size);
    while (rc != 0 && errno == EINTR);
    return rc;
}

int
gq_file_sync (int fd)
{
    int rc;
    do
        rc = fsync (fd);
    while (rc != 0 && errno == EINTR);
    return rc;
}

int
gq_file_sync_data (int fd)
{
    int rc;
    do
        rc = fdatasync (fd);
    while (rc != 0 && errno == EINTR);
    return rc;
}
