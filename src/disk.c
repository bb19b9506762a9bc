/*
 * A directory of the real file system as a disk.
 *
 * EINTR and short writes are finished (file.h); any other failure is the caller's to give up on.
 */
#include "disk.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "crash.h"
#include "file.h"

/* Large records have space reserved for this many at once: blocks found one by one cost as much as
 * the copy into them.  Below the least size it is not worth a call. */
#define RESERVED_RECORDS   16
#define RESERVED_BYTES_MIN (64u * 1024u)

/* So much is appended before the disk is told to begin with it: small records shall not pay for a
 * call, and an interrupt of the disk, each. */
#define BEGUN_BYTES_MIN (2u << 20)
#define PAGE_BYTES      4096u
/* Below it a thread costs more than what it is to do. */
#define LARGE_BYTES_MIN (4 << 20)

typedef struct directory {
    gq_disk base;
    int directory_fd;
    int file_fd;            /* the open file, -1: none */
    uint64_t end, reserved; /* of it: where the next record goes; up to where space is reserved */
    uint64_t begun;         /* up to where the disk was told to begin */
    int name_pending;       /* the open file's name is not known to be on the disk yet */
} directory;

static gq_status
status_of (int reason)
{
    switch (reason) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
        return GQ_FULL;
    case ENOENT:
        return GQ_NOTFOUND;
    default:
        return GQ_IO;
    }
}

static int
by_name (const void *a, const void *b)
{
    return strcmp (*(char *const *)a, *(char *const *)b);
}

/* The names with the prefix, one behind the other, in a block to free; NULL: errno says why.  In
 * one pass, for between two the directory may change; and a directory that cannot be read to its
 * end is an error: a journal must not look shorter than it is. */
static char *
gather (DIR *entries, const char *prefix, size_t *count, size_t *bytes)
{
    size_t capacity = 4096;
    char *text = malloc (capacity);
    *count = *bytes = 0;
    if (text == NULL)
        return NULL; /* errno is ENOMEM */
    errno = 0;
    for (struct dirent *entry; (entry = readdir (entries)) != NULL; errno = 0) {
        size_t size = strlen (entry->d_name) + 1;
        if (strncmp (entry->d_name, prefix, strlen (prefix)) != 0)
            continue;
        if (*bytes + size > capacity) {
            char *larger = realloc (text, capacity *= 2); /* a name is below 4096 bytes */
            if (larger == NULL)
                break; /* errno is ENOMEM */
            text = larger;
        }
        memcpy (text + *bytes, entry->d_name, size);
        *count += 1;
        *bytes += size;
    }
    if (errno == 0)
        return text;
    free (text);
    return NULL;
}

static gq_status
directory_list (gq_disk *disk, const char *prefix, char ***names, size_t *count)
{
    directory *self = (directory *)disk;
    size_t bytes;
    int fd = gq_file_open (self->directory_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    DIR *entries = fd < 0 ? NULL : fdopendir (fd);
    if (entries == NULL) {
        if (fd >= 0)
            close (fd);
        return GQ_IO;
    }
    char *text = gather (entries, prefix, count, &bytes);
    int reason = errno;
    closedir (entries);
    if (text == NULL)
        return reason == ENOMEM ? GQ_MEMORY : GQ_IO;
    *names = malloc ((*count + 1) * sizeof **names + bytes);
    if (*names != NULL) {
        char *at = memcpy (*names + *count + 1, text, bytes);
        for (size_t i = 0; i < *count; i++, at += strlen (at) + 1)
            (*names)[i] = at;
        qsort (*names, *count, sizeof **names, by_name);
    }
    free (text);
    return *names == NULL ? GQ_MEMORY : GQ_OK;
}

static gq_status
directory_map (gq_disk *disk, const char *name, const uint8_t **bytes, size_t *size)
{
    directory *self = (directory *)disk;
    struct stat info;
    int fd = gq_file_open (self->directory_fd, name, O_RDONLY | O_CLOEXEC, 0);
    if (fd < 0)
        return status_of (errno);
    if (fstat (fd, &info) != 0) {
        close (fd);
        return GQ_IO;
    }
    static const uint8_t nothing[1];
    void *memory = (void *)(uintptr_t)nothing;
    if (info.st_size > 0)
        memory = mmap (NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close (fd);
    if (memory == MAP_FAILED)
        return GQ_IO;
    *bytes = memory;
    *size = (size_t)info.st_size;
    return GQ_OK;
}

static void
directory_unmap (gq_disk *disk, const uint8_t *bytes, size_t size)
{
    (void)disk;
    if (size > 0)
        munmap ((void *)(uintptr_t)bytes, size);
}

/* Space that was reserved in vain goes back.  Whether that works is of no consequence. */
static void
close_file (directory *self)
{
    if (self->file_fd < 0)
        return;
    if (self->reserved > self->end)
        (void)!gq_file_resize (self->file_fd, (off_t)self->end);
    close (self->file_fd);
    self->file_fd = -1;
}

static gq_status
directory_open (gq_disk *disk, const char *name, uint64_t size)
{
    directory *self = (directory *)disk;
    close_file (self);
    self->file_fd = gq_file_open (self->directory_fd, name, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (self->file_fd < 0) /* ENOENT: the directory itself is gone */
        return errno == ENOENT ? GQ_IO : status_of (errno);
    self->name_pending = 1;
    if (gq_file_resize (self->file_fd, (off_t)size) != 0 ||
        lseek (self->file_fd, (off_t)size, SEEK_SET) < 0)
        return status_of (errno);
    self->end = self->reserved = self->begun = size;
    return GQ_OK;
}

/* Space for what is about to be appended and for more like it, beyond the file's end.  A file
 * system that cannot, or has no room, says so when the bytes themselves are written. */
static void
reserve (directory *self, uint64_t bytes)
{
    if (bytes < RESERVED_BYTES_MIN || self->end + bytes <= self->reserved)
        return;
    bytes *= RESERVED_RECORDS;
    int rc = fallocate (self->file_fd, FALLOC_FL_KEEP_SIZE, (off_t)self->end, (off_t)bytes);
    self->reserved = rc == 0 ? self->end + bytes : UINT64_MAX; /* no second try in this file */
}

/* Let the disk begin with whole pages that were appended.  Nothing waits for it, and it promises
 * nothing: the sync at a segment's end, for which a step has to wait, then finds little left to do
 * (it took 25 to 50 ms for 64 MiB, and less than 1 ms since).  What fails shows in that sync. */
static void
begin_writing (directory *self)
{
    const uint64_t whole = self->end - self->end % PAGE_BYTES;
    if (whole < self->begun + BEGUN_BYTES_MIN)
        return;
    (void)!sync_file_range (self->file_fd, (off_t)self->begun, (off_t)(whole - self->begun),
                            SYNC_FILE_RANGE_WRITE);
    self->begun = whole;
}

static gq_status
directory_append (gq_disk *disk, const struct iovec *parts, int count)
{
    directory *self = (directory *)disk;
    uint64_t bytes = 0;
    for (int i = 0; i < count; i++)
        bytes += parts[i].iov_len;
    reserve (self, bytes);
    for (int i = 0; i < count; i++) {
        if (i > 0)
            gq_crash_point ("appending");
        if (gq_file_write (self->file_fd, parts[i].iov_base, parts[i].iov_len) != 0) {
            self->reserved = self->end; /* a disk that failed is not asked for anything more */
            return status_of (errno);
        }
    }
    self->end += bytes;
    begin_writing (self);
    return GQ_OK;
}

static gq_status
directory_cut (gq_disk *disk, uint64_t size)
{
    directory *self = (directory *)disk;
    if (gq_file_resize (self->file_fd, (off_t)size) != 0 ||
        lseek (self->file_fd, (off_t)size, SEEK_SET) < 0)
        return GQ_IO;
    self->end = self->reserved = self->begun = size;
    return GQ_OK;
}

static gq_status
directory_sync (gq_disk *disk)
{
    directory *self = (directory *)disk;
    if (gq_file_sync_data (self->file_fd) != 0)
        return GQ_IO;
    if (self->name_pending && gq_file_sync (self->directory_fd) != 0)
        return GQ_IO;
    self->name_pending = 0;
    return GQ_OK;
}

static void *
let_go (void *fd)
{
    close ((int)(intptr_t)fd);
    return NULL;
}

/* Close a file that has no name any more.  Giving its pages back takes 10 to 20 ms for 64 MiB: a
 * thread does it, which touches nothing else. */
static void
let_go_aside (int fd)
{
    struct stat info;
    pthread_t thread;
    pthread_attr_t detached;
    int started = 0;
    if (fstat (fd, &info) == 0 && info.st_size >= LARGE_BYTES_MIN &&
        pthread_attr_init (&detached) == 0) {
        pthread_attr_setdetachstate (&detached, PTHREAD_CREATE_DETACHED);
        started = pthread_create (&thread, &detached, let_go, (void *)(intptr_t)fd) == 0;
        pthread_attr_destroy (&detached);
    }
    if (!started)
        close (fd);
}

static gq_status
directory_remove (gq_disk *disk, const char *name)
{
    directory *self = (directory *)disk;
    /* While it is open, only its name goes.  If it cannot be opened, all of it goes at once. */
    int fd = gq_file_open (self->directory_fd, name, O_RDONLY | O_CLOEXEC, 0);
    gq_status status = unlinkat (self->directory_fd, name, 0) == 0 ? GQ_OK : status_of (errno);
    if (fd >= 0)
        let_go_aside (fd);
    return status;
}

static void
directory_close (gq_disk **disk_p)
{
    directory *self = (directory *)*disk_p;
    if (self == NULL)
        return;
    close_file (self);
    close (self->directory_fd);
    free (self);
    *disk_p = NULL;
}

static const gq_disk_ops directory_ops = {.list = directory_list,
                                          .map = directory_map,
                                          .unmap = directory_unmap,
                                          .open = directory_open,
                                          .append = directory_append,
                                          .cut = directory_cut,
                                          .sync = directory_sync,
                                          .remove = directory_remove,
                                          .close = directory_close};

gq_status
gq_disk_open (gq_disk **disk_p, const char *path, gq_error *error)
{
    *disk_p = NULL;
    if (mkdir (path, 0755) != 0 && errno != EEXIST)
        return gq_fail (error, GQ_IO, "cannot create %s: %s", path, strerror (errno));
    directory *self = calloc (1, sizeof *self);
    if (self == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory");
    self->base.ops = &directory_ops;
    self->file_fd = -1;
    self->directory_fd = gq_file_open (AT_FDCWD, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    if (self->directory_fd < 0) {
        free (self);
        return gq_fail (error, GQ_IO, "cannot open %s: %s", path, strerror (errno));
    }
    /* The directory's own name: without it nothing in it survives a loss of power.  A parent that
     * may not be read cannot be synced. */
    int parent_fd = gq_file_open (self->directory_fd, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    int failed = parent_fd >= 0 && gq_file_sync (parent_fd) != 0;
    int reason = errno;
    if (parent_fd >= 0)
        close (parent_fd);
    *disk_p = &self->base;
    if (failed) {
        directory_close (disk_p);
        return gq_fail (error, GQ_IO, "cannot sync the parent of %s: %s", path, strerror (reason));
    }
    return GQ_OK;
}
