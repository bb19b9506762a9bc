/*
 * Shared files: mapping, life locks, and sleeping on a word of them.
 */
#include "shm.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define S_NS      1000000000u
#define TEMPORARY ".new"

_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2,
               "words shared between processes need atomics without locks");

static gq_status
map (gq_shm *shm, size_t size, gq_error *error)
{
    void *bytes = mmap (NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, shm->fd, 0);
    if (bytes == MAP_FAILED)
        return gq_fail (error, GQ_IO, "cannot map %.900s: %s", shm->path, strerror (errno));
    shm->bytes = bytes;
    shm->size = size;
    return GQ_OK;
}

gq_status
gq_shm_create (gq_shm *shm, const char *path, size_t size, gq_error *error)
{
    char name[PATH_MAX + sizeof TEMPORARY];
    *shm = (gq_shm){.fd = -1};
    if (strlen (path) >= sizeof shm->path)
        return gq_fail (error, GQ_IO, "the name of %.900s is too long", path);
    memcpy (shm->path, path, strlen (path) + 1);
    snprintf (name, sizeof name, "%s" TEMPORARY, path);
    unlink (name);
    shm->fd = open (name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (shm->fd < 0)
        return gq_fail (error, GQ_IO, "cannot create %.900s: %s", name, strerror (errno));
    int reserved = posix_fallocate (shm->fd, 0, (off_t)size);
    gq_status status = reserved == 0 ? map (shm, size, error)
                                     : gq_fail (error, reserved == ENOSPC ? GQ_FULL : GQ_IO,
                                                "cannot reserve %zu bytes for %.900s: %s", size,
                                                path, strerror (reserved));
    if (status != GQ_OK) {
        unlink (name);
        gq_shm_close (shm);
    }
    return status;
}

gq_status
gq_shm_show (gq_shm *shm, gq_error *error)
{
    char name[PATH_MAX + sizeof TEMPORARY];
    snprintf (name, sizeof name, "%s" TEMPORARY, shm->path);
    if (rename (name, shm->path) == 0)
        return GQ_OK;
    gq_status status = gq_fail (error, GQ_IO, "cannot rename %.900s: %s", name, strerror (errno));
    unlink (name);
    return status;
}

gq_status
gq_shm_open (gq_shm *shm, const char *path, size_t size_min, gq_error *error)
{
    struct stat info;
    *shm = (gq_shm){.fd = -1};
    if (strlen (path) >= sizeof shm->path)
        return gq_fail (error, GQ_IO, "the name of %.900s is too long", path);
    memcpy (shm->path, path, strlen (path) + 1);
    shm->fd = open (path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (shm->fd < 0)
        return gq_fail (error, errno == ENOENT ? GQ_NOTFOUND : GQ_IO, "cannot open %.900s: %s",
                        path, strerror (errno));
    gq_status status = GQ_OK;
    if (fstat (shm->fd, &info) != 0 || !S_ISREG (info.st_mode) || info.st_size < (off_t)size_min)
        status =
            gq_fail (error, GQ_MALFORMED, "%.900s is no file of %zu bytes or more", path, size_min);
    if (status == GQ_OK)
        status = map (shm, (size_t)info.st_size, error);
    if (status != GQ_OK)
        gq_shm_close (shm);
    return status;
}

void *
gq_shm_ring (int fd, uint64_t at, size_t bytes)
{
    /* Room for both first, so that nobody else's mapping comes to lie in between. */
    uint8_t *room = mmap (NULL, 2 * bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED)
        return NULL;
    for (size_t i = 0; i < 2; i++)
        if (mmap (room + i * bytes, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
                  (off_t)at) == MAP_FAILED) {
            int cause = errno;
            munmap (room, 2 * bytes);
            errno = cause;
            return NULL;
        }
    return room;
}

void *
gq_shm_ring_private (size_t bytes)
{
    int fd = memfd_create ("gradq-ring", MFD_CLOEXEC);
    if (fd < 0)
        return NULL;
    void *ring = ftruncate (fd, (off_t)bytes) == 0 ? gq_shm_ring (fd, 0, bytes) : NULL;
    close (fd);
    return ring;
}

void
gq_shm_ring_free (void *ring, size_t bytes)
{
    if (ring != NULL)
        munmap (ring, 2 * bytes);
}

void
gq_shm_remove (const gq_shm *shm)
{
    struct stat ours;
    struct stat named;
    if (fstat (shm->fd, &ours) == 0 && lstat (shm->path, &named) == 0 &&
        ours.st_dev == named.st_dev && ours.st_ino == named.st_ino)
        unlink (shm->path);
}

void
gq_shm_close (gq_shm *shm)
{
    if (shm->bytes != NULL)
        munmap (shm->bytes, shm->size);
    if (shm->fd >= 0)
        close (shm->fd);
    shm->bytes = NULL;
    shm->size = 0;
    shm->fd = -1;
}

bool
gq_shm_lock (const gq_shm *shm)
{
    return flock (shm->fd, LOCK_EX | LOCK_NB) == 0;
}

bool
gq_shm_locked (const gq_shm *shm)
{
    if (flock (shm->fd, LOCK_EX | LOCK_NB) != 0)
        return true;
    flock (shm->fd, LOCK_UN);
    return false;
}

void
gq_host_id (char id[GQ_HOST_ID_BYTES])
{
    int fd = open ("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? -1 : read (fd, id, GQ_HOST_ID_BYTES - 1);
    if (fd >= 0)
        close (fd);
    id[size > 0 ? size : 0] = '\0';
    id[strcspn (id, "\n")] = '\0';
}

void
gq_futex_wait (atomic_uint *word, unsigned seen, uint64_t wait_ns)
{
    const struct timespec wait = {.tv_sec = (time_t)(wait_ns / S_NS),
                                  .tv_nsec = (long)(wait_ns % S_NS)};
    syscall (SYS_futex, word, FUTEX_WAIT, seen, &wait, NULL, 0);
}

void
gq_futex_wake (atomic_uint *word)
{
    syscall (SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}
