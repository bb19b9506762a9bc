/*
 * Journal writer.  A record is one append; a failed append is cut off again, so that the journal
 * holds whole records only, as long as this process lives.
 */
#include "journal.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "frame.h"
#include "journal_format.h"

static void
segment_name (char name[64], uint64_t first_lsn)
{
    snprintf (name, 64, GQ_SEGMENT_PREFIX "%0*" PRIu64, GQ_SEGMENT_DIGITS, first_lsn);
}

/* Begin the segment that the next record opens. */
static gq_status
begin_segment (gq_journal *self)
{
    char name[64];
    gq_segment_header header = {.magic = GQ_SEGMENT_MAGIC,
                                .version = GQ_SEGMENT_VERSION,
                                .first_lsn = self->lsn + 1,
                                .chain = self->chain};
    memcpy (header.run, self->run, GQ_RUN_ID_BYTES);
    header.crc = gq_crc32c (&header, offsetof (gq_segment_header, crc));
    segment_name (name, header.first_lsn);
    /* What the last segment holds must not come to the disk after what follows it. */
    gq_status status = self->size > 0 ? gq_journal_sync (self) : GQ_OK;
    if (status == GQ_OK)
        status = self->disk->ops->open (self->disk, name, 0);
    if (status != GQ_OK)
        return status;
    const struct iovec part = {.iov_base = &header, .iov_len = sizeof header};
    status = self->disk->ops->append (self->disk, &part, 1);
    /* After a failure the file is there, empty or with a part of the header.  The next append
     * begins it anew; if there is none, the reader takes it for unfinished. */
    self->size = status == GQ_OK ? sizeof header : 0;
    return status;
}

gq_status
gq_journal_start (gq_journal *self, gq_disk *disk, const uint8_t run[GQ_RUN_ID_BYTES],
                  const gq_journal_end *end, uint64_t segment_bytes, gq_error *error)
{
    *self = (gq_journal){
        .disk = disk, .lsn = end->lsn, .chain = end->chain, .segment_bytes = segment_bytes};
    memcpy (self->run, run, GQ_RUN_ID_BYTES);
    /* A last segment without a good record may lack even its header: the next record begins it
     * anew, under the same name. */
    if (end->segment[0] == '\0' || end->size <= sizeof (gq_segment_header))
        return GQ_OK;
    gq_status status = disk->ops->open (disk, end->segment, end->size);
    if (status != GQ_OK)
        return gq_fail (error, status, "cannot go on with %s of the journal: %s", end->segment,
                        gq_status_text (status));
    self->size = end->size;
    /* The process before this one may have died between append and sync: what was read is on the
     * disk for certain only after a sync. */
    self->unsynced = true;
    return GQ_OK;
}

gq_status
gq_journal_append (gq_journal *self, gq_record_kind kind, const struct iovec *parts, int count)
{
    const struct iovec *last = &parts[count - 1];
    const uint32_t crc = self->off ? 0 : gq_crc32c (last->iov_base, last->iov_len);
    return gq_journal_append_summed (self, kind, parts, count, crc);
}

gq_status
gq_journal_append_summed (gq_journal *self, gq_record_kind kind, const struct iovec *parts,
                          int count, uint32_t last_crc)
{
    static const uint8_t zeros[GQ_RECORD_ALIGN];
    assert (count >= 1 && count <= GQ_RECORD_PARTS_MAX);
    gq_status status = GQ_OK;
    if (self->off)
        return GQ_OK;
    if (self->failed)
        return GQ_IO;
    if (self->size == 0 || self->size >= self->segment_bytes)
        status = begin_segment (self);
    if (status != GQ_OK) {
        self->failed = status != GQ_FULL;
        return status;
    }
    gq_record_header header = {.magic = GQ_RECORD_MAGIC,
                               .kind = (uint32_t)kind,
                               .lsn = self->lsn + 1,
                               .chain = self->chain};
    struct iovec all[GQ_RECORD_PARTS_MAX + 2] = {{.iov_base = &header, .iov_len = sizeof header}};
    for (int i = 0; i < count; i++) {
        all[1 + i] = parts[i];
        header.payload_bytes += parts[i].iov_len;
    }
    header.crc = gq_crc32c (&header, offsetof (gq_record_header, crc));
    for (int i = 0; i < count - 1; i++)
        header.crc = gq_crc32c_more (header.crc, parts[i].iov_base, parts[i].iov_len);
    header.crc = gq_crc32c_join (header.crc, last_crc, parts[count - 1].iov_len);
    size_t padding = (size_t)(-header.payload_bytes % GQ_RECORD_ALIGN);
    all[1 + count] = (struct iovec){.iov_base = (void *)(uintptr_t)zeros, .iov_len = padding};
    status = self->disk->ops->append (self->disk, all, count + 2);
    if (status != GQ_OK) {
        /* Cut the part that was written; a disk that failed, or refuses even that, is done for. */
        self->failed = status != GQ_FULL || self->disk->ops->cut (self->disk, self->size) != GQ_OK;
        return self->failed ? GQ_IO : GQ_FULL;
    }
    self->size += sizeof header + header.payload_bytes + padding;
    self->written += sizeof header + header.payload_bytes + padding;
    self->lsn = header.lsn;
    self->chain = header.crc;
    self->unsynced = true;
    return GQ_OK;
}

gq_status
gq_journal_sync (gq_journal *self)
{
    if (self->failed)
        return GQ_IO;
    gq_status status = self->unsynced && !self->off ? self->disk->ops->sync (self->disk) : GQ_OK;
    self->failed = status != GQ_OK;
    if (status == GQ_OK)
        self->unsynced = false;
    return status;
}

void
gq_journal_forget (gq_journal *self, uint64_t covered_lsn)
{
    char **names;
    size_t count;
    if (gq_segment_list (self->disk, &names, &count) != GQ_OK)
        return; /* disk space is not worth an error: the next checkpoint tries again */
    /* A segment ends where the next one begins, so the last one always stays. */
    for (size_t i = 0; i + 1 < count; i++) {
        if (gq_segment_first_lsn (names[i + 1]) - 1 > covered_lsn)
            break;
        (void)!self->disk->ops->remove (self->disk, names[i]);
    }
    free (names);
}

gq_status
gq_journal_cut (gq_disk *disk, const gq_journal_end *end)
{
    char **names;
    size_t count = 0;
    gq_status status = gq_segment_list (disk, &names, &count);
    bool behind = false;
    for (size_t i = 0; status == GQ_OK && i < count; i++) {
        if (behind)
            status = disk->ops->remove (disk, names[i]);
        else if (strcmp (names[i], end->segment) == 0) {
            behind = true;
            status = disk->ops->open (disk, names[i], end->size);
        }
    }
    if (count > 0)
        free (names);
    return status;
}
