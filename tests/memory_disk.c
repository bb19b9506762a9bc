/*
 * Disk in memory.  Stands where src/disk.c stands in the service, and must never be kinder than it:
 * the same statuses, one open file, parts of a failed append left behind.
 */
#include "memory_disk.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static gq_memory_disk *
self_of (gq_disk *disk)
{
    return (gq_memory_disk *)disk;
}

/* Counts the call, and decides whether it is the one that fails. */
static bool
fails (gq_memory_disk *self)
{
    self->calls++;
    if (self->failed)
        self->after_fault++;
    if (self->calls == self->fail_at_call)
        self->failed = true;
    return self->calls == self->fail_at_call;
}

static gq_memory_file *
find (gq_memory_disk *self, const char *name)
{
    for (size_t i = 0; i < self->count; i++)
        if (strcmp (self->files[i].name, name) == 0)
            return &self->files[i];
    return NULL;
}

/* Find or add; what is added has no name yet in either state.  NULL: out of memory. */
static gq_memory_file *
obtain (gq_memory_disk *self, const char *name)
{
    gq_memory_file *file = find (self, name);
    if (file != NULL)
        return file;
    assert (strlen (name) < GQ_MEMORY_DISK_NAME_MAX);
    if (self->count == self->capacity) {
        size_t capacity = self->capacity == 0 ? 8 : self->capacity * 2;
        gq_memory_file *files = realloc (self->files, capacity * sizeof *files);
        if (files == NULL)
            return NULL;
        self->files = files;
        self->capacity = capacity;
    }
    file = &self->files[self->count++];
    memset (file, 0, sizeof *file);
    memcpy (file->name, name, strlen (name) + 1);
    return file;
}

/* Size as told; new bytes are zero.  An empty one has an address too. */
static bool
resize (gq_memory_bytes *bytes, size_t size)
{
    if (size >= bytes->capacity) {
        size_t capacity = size + size / 2 + 1;
        uint8_t *at = realloc (bytes->at, capacity);
        if (at == NULL)
            return false;
        bytes->at = at;
        bytes->capacity = capacity;
    }
    if (size > bytes->size)
        memset (bytes->at + bytes->size, 0, size - bytes->size);
    bytes->size = size;
    return true;
}

/* Make the first `size` bytes of *to those of *from, and its size, too; they agree up to `same`. */
static bool
copy (gq_memory_bytes *to, const gq_memory_bytes *from, size_t same, size_t size)
{
    if (!resize (to, size))
        return false;
    if (size > same)
        memcpy (to->at + same, from->at + same, size - same);
    return true;
}

static void
lower (size_t *same, size_t size)
{
    if (*same > size)
        *same = size;
}

static uint64_t
used_bytes (const gq_memory_disk *self)
{
    uint64_t used = 0;
    for (size_t i = 0; i < self->count; i++)
        used += self->files[i].here ? self->files[i].live.size : 0;
    return used;
}

static int
by_name (const void *a, const void *b)
{
    return strcmp (*(char *const *)a, *(char *const *)b);
}

static gq_status
memory_list (gq_disk *disk, const char *prefix, char ***names, size_t *count)
{
    gq_memory_disk *self = self_of (disk);
    if (fails (self))
        return GQ_IO;
    *names = malloc ((self->count + 1) * (sizeof **names + GQ_MEMORY_DISK_NAME_MAX));
    if (*names == NULL)
        return GQ_MEMORY;
    char *text = (char *)(*names + self->count + 1);
    *count = 0;
    for (size_t i = 0; i < self->count; i++) {
        const gq_memory_file *file = &self->files[i];
        if (!file->here || strncmp (file->name, prefix, strlen (prefix)) != 0)
            continue;
        (*names)[*count] = text + *count * GQ_MEMORY_DISK_NAME_MAX;
        memcpy ((*names)[*count], file->name, GQ_MEMORY_DISK_NAME_MAX);
        *count += 1;
    }
    qsort (*names, *count, sizeof **names, by_name);
    return GQ_OK;
}

/* A copy of exactly the file's size, so that its end is guarded. */
static gq_status
memory_map (gq_disk *disk, const char *name, const uint8_t **bytes, size_t *size)
{
    gq_memory_disk *self = self_of (disk);
    if (fails (self))
        return GQ_IO;
    const gq_memory_file *file = find (self, name);
    if (file == NULL || !file->here)
        return GQ_NOTFOUND;
    uint8_t *mapped = malloc (file->live.size);
    if (mapped == NULL && file->live.size > 0)
        return GQ_MEMORY;
    if (file->live.size > 0)
        memcpy (mapped, file->live.at, file->live.size);
    self->maps++;
    *bytes = mapped;
    *size = file->live.size;
    return GQ_OK;
}

static void
memory_unmap (gq_disk *disk, const uint8_t *bytes, size_t size)
{
    (void)size;
    assert (self_of (disk)->maps > 0);
    self_of (disk)->maps--;
    free ((void *)(uintptr_t)bytes);
}

static gq_status
memory_open (gq_disk *disk, const char *name, uint64_t size)
{
    gq_memory_disk *self = self_of (disk);
    self->open = SIZE_MAX; /* as a real one: the file before is closed whatever comes */
    if (fails (self))
        return GQ_IO;
    gq_memory_file *file = obtain (self, name);
    if (file == NULL)
        return GQ_IO;
    if (!file->here) {
        /* What a removed file of this name held is not this file's. */
        file->live.size = 0;
        file->same = 0;
        file->here = true;
    }
    lower (&file->same, (size_t)size);
    lower (&file->same, file->live.size);
    if (!resize (&file->live, (size_t)size))
        return GQ_IO;
    self->open = (size_t)(file - self->files);
    self->name_pending = true;
    return GQ_OK;
}

/* Append what there is room for. */
static gq_status
append_bytes (gq_memory_disk *self, gq_memory_file *file, const uint8_t *bytes, size_t size)
{
    uint64_t used = used_bytes (self);
    uint64_t room = self->room_bytes > used ? self->room_bytes - used : 0;
    size_t fits = size < room ? size : (size_t)room, before = file->live.size;
    if (!resize (&file->live, before + fits))
        return GQ_IO;
    if (fits > 0)
        memcpy (file->live.at + before, bytes, fits);
    self->written_bytes += fits;
    return fits == size ? GQ_OK : GQ_FULL;
}

static gq_status
memory_append (gq_disk *disk, const struct iovec *parts, int count)
{
    gq_memory_disk *self = self_of (disk);
    bool broken = fails (self);
    assert (self->open < self->count);
    gq_memory_file *file = &self->files[self->open];
    uint64_t left = broken ? self->partial_bytes : UINT64_MAX;
    for (int i = 0; i < count; i++) {
        size_t size = parts[i].iov_len < left ? parts[i].iov_len : (size_t)left;
        gq_status status = append_bytes (self, file, parts[i].iov_base, size);
        if (status != GQ_OK)
            return broken ? GQ_IO : status;
        left -= size;
    }
    return broken ? GQ_IO : GQ_OK;
}

static gq_status
memory_cut (gq_disk *disk, uint64_t size)
{
    gq_memory_disk *self = self_of (disk);
    if (fails (self))
        return GQ_IO;
    assert (self->open < self->count);
    gq_memory_file *file = &self->files[self->open];
    assert (size <= file->live.size);
    lower (&file->same, (size_t)size);
    return resize (&file->live, (size_t)size) ? GQ_OK : GQ_IO;
}

static gq_status
memory_sync (gq_disk *disk)
{
    gq_memory_disk *self = self_of (disk);
    if (fails (self))
        return GQ_IO;
    assert (self->open < self->count);
    gq_memory_file *file = &self->files[self->open];
    if (!copy (&file->durable, &file->live, file->same, file->live.size))
        return GQ_IO;
    file->same = file->live.size;
    for (size_t i = 0; i < self->count && self->name_pending; i++)
        self->files[i].stays = self->files[i].here;
    self->name_pending = false;
    self->syncs++;
    return GQ_OK;
}

static gq_status
memory_remove (gq_disk *disk, const char *name)
{
    gq_memory_disk *self = self_of (disk);
    if (fails (self))
        return GQ_IO;
    gq_memory_file *file = find (self, name);
    if (file == NULL || !file->here)
        return GQ_NOTFOUND;
    file->here = false;
    return GQ_OK;
}

static void
memory_close (gq_disk **disk_p)
{
    gq_memory_disk *self = self_of (*disk_p);
    if (self == NULL)
        return;
    assert (self->maps == 0);
    for (size_t i = 0; i < self->count; i++) {
        free (self->files[i].live.at);
        free (self->files[i].durable.at);
    }
    free (self->files);
    free (self);
    *disk_p = NULL;
}

static const gq_disk_ops memory_ops = {.list = memory_list,
                                       .map = memory_map,
                                       .unmap = memory_unmap,
                                       .open = memory_open,
                                       .append = memory_append,
                                       .cut = memory_cut,
                                       .sync = memory_sync,
                                       .remove = memory_remove,
                                       .close = memory_close};

gq_memory_disk *
gq_memory_disk_new (void)
{
    gq_memory_disk *self = calloc (1, sizeof *self);
    if (self == NULL)
        return NULL;
    self->base.ops = &memory_ops;
    self->open = SIZE_MAX;
    gq_memory_disk_repair (self);
    return self;
}

void
gq_memory_disk_repair (gq_memory_disk *self)
{
    self->room_bytes = UINT64_MAX;
    self->fail_at_call = 0;
    self->partial_bytes = 0;
    self->failed = false;
    self->after_fault = 0;
}

void
gq_memory_disk_kill (gq_memory_disk *self)
{
    self->open = SIZE_MAX;
    self->name_pending = false;
}

/* After a loss of power, what is there is what stays. */
static void
settle (gq_memory_file *file, bool here, size_t size)
{
    file->live.size = file->durable.size = file->same = size;
    file->here = file->stays = here;
}

void
gq_memory_disk_crash (gq_memory_disk *self)
{
    gq_memory_disk_kill (self);
    for (size_t i = 0; i < self->count; i++) {
        gq_memory_file *file = &self->files[i];
        /* Not larger than it once was: out of memory cannot be. */
        bool copied = copy (&file->live, &file->durable, file->same, file->durable.size);
        assert (copied);
        (void)copied;
        settle (file, file->stays, file->stays ? file->durable.size : 0);
    }
}

/* splitmix64 (Steele, Lea, Flood 2014): any seed will do. */
static uint64_t
next_random (uint64_t *state)
{
    uint64_t z = (*state += UINT64_C (0x9e3779b97f4a7c15));
    z = (z ^ z >> 30) * UINT64_C (0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C (0x94d049bb133111eb);
    return z ^ z >> 31;
}

/* One file's data after the power failed; true when all that was promised could be allocated. */
static bool
crash_data (gq_memory_file *file, uint64_t *seed)
{
    bool written = (next_random (seed) & 1) != 0;
    bool zeroed = (next_random (seed) & 3) == 0; /* the size reached the disk, the data did not */
    uint64_t choice = next_random (seed);
    if (!written)
        return copy (&file->live, &file->durable, file->same, file->durable.size);
    size_t size = file->live.size;
    size_t kept = file->same + (size_t)(choice % (size - file->same + 1));
    if (zeroed && size > kept)
        memset (file->live.at + kept, 0, size - kept);
    else
        file->live.size = kept;
    return copy (&file->durable, &file->live, file->same, file->live.size);
}

void
gq_memory_disk_crash_anywhere (gq_memory_disk *self, uint64_t *seed)
{
    gq_memory_disk_kill (self);
    for (size_t i = 0; i < self->count; i++) {
        gq_memory_file *file = &self->files[i];
        bool named = (next_random (seed) & 1) != 0 ? file->here : file->stays;
        bool copied = crash_data (file, seed);
        assert (copied);
        (void)copied;
        settle (file, named, named ? file->live.size : 0);
    }
}

uint8_t *
gq_memory_disk_bytes (gq_memory_disk *self, const char *name, size_t *size)
{
    gq_memory_file *file = find (self, name);
    if (file == NULL || !file->here)
        return NULL;
    *size = file->live.size;
    file->same = 0; /* the caller may change any of them */
    return file->live.at;
}

gq_status
gq_memory_disk_put (gq_memory_disk *self, const char *name, const void *bytes, size_t size)
{
    gq_memory_file *file = obtain (self, name);
    if (file == NULL || !resize (&file->live, size))
        return GQ_MEMORY;
    if (size > 0)
        memcpy (file->live.at, bytes, size);
    if (!copy (&file->durable, &file->live, 0, size))
        return GQ_MEMORY;
    file->same = size;
    file->here = file->stays = true;
    return GQ_OK;
}
