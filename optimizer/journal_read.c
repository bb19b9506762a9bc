/*
 * Journal reader.  Trusts no byte: a record counts when its place, number, chain and CRC are right.
 *
 * A process that dies while appending leaves one unfinished record at the very end.  That, and only
 * that, may be cut.  Anything else that is wrong is damage, and reading stops there.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "frame.h"
#include "journal.h"
#include "journal_format.h"

typedef struct reader {
    gq_disk *disk;
    const uint8_t *run;
    uint64_t after_lsn;
    uint32_t after_chain;
    gq_record_handler *handler;
    void *context;
    gq_journal_end *end;
    gq_error *error;
} reader;

/* The record at bytes[offset]; false when it is not whole and right in itself. */
static bool
record_at (const uint8_t *bytes, uint64_t size, uint64_t offset, gq_record_header *header)
{
    if (size - offset < sizeof *header)
        return false;
    memcpy (header, bytes + offset, sizeof *header);
    if (header->magic != GQ_RECORD_MAGIC || header->payload_bytes > size - offset - sizeof *header)
        return false;
    uint32_t crc = gq_crc32c (header, offsetof (gq_record_header, crc));
    crc = gq_crc32c_more (crc, bytes + offset + sizeof *header, header->payload_bytes);
    return crc == header->crc;
}

uint64_t
gq_segment_first_lsn (const char *name)
{
    const char *digits = name + strlen (GQ_SEGMENT_PREFIX);
    if (strncmp (name, GQ_SEGMENT_PREFIX, strlen (GQ_SEGMENT_PREFIX)) != 0 ||
        strlen (digits) != GQ_SEGMENT_DIGITS || strspn (digits, "0123456789") != GQ_SEGMENT_DIGITS)
        return 0;
    return strtoull (digits, NULL, 10);
}

gq_status
gq_segment_list (gq_disk *disk, char ***names, size_t *count)
{
    size_t all;
    *count = 0;
    gq_status status = disk->ops->list (disk, GQ_SEGMENT_PREFIX, names, &all);
    for (size_t i = 0; status == GQ_OK && i < all; i++)
        if (gq_segment_first_lsn ((*names)[i]) != 0)
            (*names)[(*count)++] = (*names)[i];
    return status;
}

static uint64_t
padded (uint64_t size)
{
    return (size + GQ_RECORD_ALIGN - 1) / GQ_RECORD_ALIGN * GQ_RECORD_ALIGN;
}

/* Is there a right record behind `offset`?  Then what stands there is damage, not the end.  Only
 * numbers that can follow `lsn` count, and only they cost a checksum: a payload may hold bytes of
 * an older journal. */
static bool
record_behind (const uint8_t *bytes, uint64_t size, uint64_t offset, uint64_t lsn)
{
    gq_record_header header;
    for (uint64_t at = padded (offset + 1); at < size && size - at >= sizeof header;
         at += GQ_RECORD_ALIGN) {
        memcpy (&header, bytes + at, sizeof header);
        if (header.magic == GQ_RECORD_MAGIC && header.lsn > lsn &&
            header.lsn - lsn <= 1 + (at - offset) / sizeof header &&
            record_at (bytes, size, at, &header))
            return true;
    }
    return false;
}

static gq_status
damaged (const reader *self, const char *name, uint64_t offset, const char *reason)
{
    return gq_fail (self->error, GQ_MALFORMED,
                    "journal damaged: %s at offset %" PRIu64 ": %s.  Records up to lsn %" PRIu64
                    " are good; gradq-replay shows what can be saved",
                    name, offset, reason, self->end->lsn);
}

/* Does the segment's header fit what came before?  *torn: it was never finished.  A process that
 * dies leaves a short one; a loss of power, one of the full size and nothing right in it. */
static gq_status
check_segment (const reader *self, const char *name, const uint8_t *bytes, size_t size, bool last,
               bool *torn)
{
    gq_segment_header header;
    uint64_t named = gq_segment_first_lsn (name);
    bool first = self->end->segment[0] == '\0';
    /* By its name, for it counts even when the rest was never finished. */
    if (first && named > self->after_lsn + 1)
        return damaged (self, name, 0, "records before this segment are missing");
    if (!first && named != self->end->lsn + 1)
        return damaged (self, name, 0, "it does not follow the segment before it");
    *torn = size < sizeof header;
    if (*torn)
        return last ? GQ_OK
                    : damaged (self, name, 0, "the segment has no header, and segments follow");
    memcpy (&header, bytes, sizeof header);
    if (header.magic != GQ_SEGMENT_MAGIC ||
        header.crc != gq_crc32c (&header, offsetof (gq_segment_header, crc))) {
        *torn = last && !record_behind (bytes, size, 0, named - 1);
        return *torn ? GQ_OK : damaged (self, name, 0, "the segment's header is wrong");
    }
    if (header.version != GQ_SEGMENT_VERSION)
        return damaged (self, name, 0, "the segment is of another version of gradq");
    if (memcmp (header.run, self->run, GQ_RUN_ID_BYTES) != 0)
        return gq_fail (self->error, GQ_RUN, "%s belongs to another run's journal", name);
    if (header.first_lsn != named)
        return damaged (self, name, 0, "its name does not fit its header");
    if (first && named == self->after_lsn + 1 && header.chain != self->after_chain)
        return damaged (self, name, 0,
                        "it does not follow the record that the checkpoint was made after");
    if (first) {
        self->end->lsn = named - 1;
        self->end->chain = header.chain;
    }
    if (header.chain != self->end->chain)
        return damaged (self, name, 0, "it does not follow the segment before it");
    return GQ_OK;
}

/* Records of one segment, from behind its header. */
static gq_status
read_records (reader *self, const char *name, const uint8_t *bytes, uint64_t size, bool last)
{
    gq_journal_end *end = self->end;
    while (end->size < size) {
        gq_record_header header;
        if (!record_at (bytes, size, end->size, &header)) {
            if (!last)
                return damaged (self, name, end->size,
                                "a record is not whole, and segments follow");
            if (record_behind (bytes, size, end->size, end->lsn))
                return damaged (self, name, end->size, "a record is wrong, and right ones follow");
            end->torn = true;
            end->torn_bytes = size - end->size;
            return GQ_OK;
        }
        if (header.lsn != end->lsn + 1 || header.chain != end->chain)
            return damaged (self, name, end->size, "the record does not follow the one before it");
        const gq_record record = {.lsn = header.lsn,
                                  .kind = header.kind,
                                  .payload = bytes + end->size + sizeof header,
                                  .payload_bytes = header.payload_bytes,
                                  .segment = name,
                                  .offset = end->size,
                                  .crc = header.crc};
        gq_status status = header.lsn <= self->after_lsn
                               ? GQ_OK
                               : self->handler (self->context, &record, self->error);
        if (status != GQ_OK)
            return status;
        if (header.lsn == self->after_lsn && header.crc != self->after_chain)
            return damaged (self, name, end->size,
                            "this is not the record that the checkpoint was made after");
        end->lsn = header.lsn;
        end->chain = header.crc;
        /* A last padding that is cut short does no harm: the next append starts behind it. */
        end->size += sizeof header + padded (header.payload_bytes);
    }
    return GQ_OK;
}

static gq_status
read_segment (reader *self, const char *name, bool last)
{
    const uint8_t *bytes;
    size_t size;
    bool torn = false;
    gq_status status = self->disk->ops->map (self->disk, name, &bytes, &size);
    if (status != GQ_OK)
        return gq_fail (self->error, status, "cannot read %s of the journal: %s", name,
                        gq_status_text (status));
    status = check_segment (self, name, bytes, size, last, &torn);
    if (status == GQ_OK) {
        gq_journal_end *end = self->end;
        snprintf (end->segment, sizeof end->segment, "%s", name);
        end->size = torn ? 0 : sizeof (gq_segment_header);
        end->torn = torn;
        end->torn_bytes = torn ? size : 0;
        if (!torn)
            status = read_records (self, name, bytes, size, last);
    }
    self->disk->ops->unmap (self->disk, bytes, size);
    return status;
}

/* Index of the segment that record after_lsn + 1 may stand in: the last that begins no later. */
static size_t
first_segment (char **names, size_t count, uint64_t after_lsn)
{
    size_t first = 0;
    for (size_t i = 1; i < count; i++)
        if (gq_segment_first_lsn (names[i]) <= after_lsn + 1)
            first = i;
    return first;
}

gq_status
gq_journal_read (gq_disk *disk, const uint8_t run[GQ_RUN_ID_BYTES], uint64_t after_lsn,
                 uint32_t after_chain, gq_record_handler *handler, void *context,
                 gq_journal_end *end, gq_error *error)
{
    char **names;
    size_t count;
    reader self = {.disk = disk,
                   .run = run,
                   .after_lsn = after_lsn,
                   .after_chain = after_chain,
                   .handler = handler,
                   .context = context,
                   .end = end,
                   .error = error};
    memset (end, 0, sizeof *end);
    gq_status status = gq_segment_list (disk, &names, &count);
    if (status != GQ_OK)
        return gq_fail (error, status, "cannot list the journal: %s", gq_status_text (status));
    for (size_t i = first_segment (names, count, after_lsn); i < count && status == GQ_OK; i++)
        status = read_segment (&self, names[i], i + 1 == count);
    free (names);
    /* A checkpoint reaches the disk before it counts, the journal only when it is synced: after a
     * loss of power the checkpoint may be ahead.  It covers all that is missing. */
    if (status == GQ_OK && end->lsn <= after_lsn && (count == 0 || end->lsn < after_lsn))
        *end = (gq_journal_end){.lsn = after_lsn, .chain = after_chain};
    return status;
}
