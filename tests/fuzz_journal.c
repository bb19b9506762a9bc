/*
 * Fuzzer of the journal reader, which meets whatever a broken disk or a wrong copy left.
 *
 * For any segments: reading touches nothing beyond them, hands on records in order only, and either
 * refuses with a sentence or ends where a new record can be appended and read back behind all that
 * was read.  Random bytes do not pass a checksum, so each input is tried a second time with the
 * checksums, numbers and chain made right, as far as its sizes allow.
 *
 * Input: after_lsn, then for each of up to four segments its first number and its size in units of
 * 3 bytes, fewer than four ended by a 0; then their bytes, one behind the other.
 */
#include "fuzz_testing.h"

#include <inttypes.h>

#include "frame.h"
#include "memory_disk.h"
#include "optimizer/journal.h"
#include "optimizer/journal_format.h"

#define SEGMENTS_MAX  4
#define SIZE_UNIT     3 /* sizes that are no multiple of 8 too */
#define SEGMENT_BYTES 200

static const uint8_t run_id[GQ_RUN_ID_BYTES] = "run of the fuzz";

typedef struct reading {
    uint64_t lsn;
    uint32_t crc; /* of all that was handed on */
} reading;

static gq_status
handle (void *context, const gq_record *record, gq_error *error)
{
    reading *self = context;
    (void)error;
    REQUIRE (record->lsn == self->lsn + 1);
    REQUIRE ((uintptr_t)record->payload % GQ_RECORD_ALIGN == 0);
    REQUIRE (gq_segment_first_lsn (record->segment) <= record->lsn);
    self->lsn = record->lsn;
    self->crc = gq_crc32c_more (self->crc, &record->kind, sizeof record->kind);
    self->crc = gq_crc32c_more (self->crc, record->payload, record->payload_bytes);
    return GQ_OK;
}

static gq_status
read_all (gq_disk *disk, uint64_t after_lsn, uint32_t after_chain, reading *all,
          gq_journal_end *end)
{
    gq_error error = {.text = ""};
    *all = (reading){.lsn = after_lsn};
    const gq_status status =
        gq_journal_read (disk, run_id, after_lsn, after_chain, handle, all, end, &error);
    REQUIRE (status == GQ_OK || status == GQ_MALFORMED || status == GQ_RUN);
    REQUIRE (status == GQ_OK ? all->lsn == end->lsn : error.text[0] != '\0');
    return status;
}

static void
check (gq_memory_disk *memory, uint64_t after_lsn, uint32_t after_chain)
{
    gq_disk *disk = &memory->base;
    gq_journal_end end, end_again;
    reading all, again;
    gq_journal journal;
    static const uint8_t payload[] = "a new record";
    const struct iovec part = {.iov_base = (void *)(uintptr_t)payload, .iov_len = sizeof payload};

    const gq_status status = read_all (disk, after_lsn, after_chain, &all, &end);
    REQUIRE (memory->maps == 0);
    if (status != GQ_OK)
        return;
    REQUIRE (gq_journal_start (&journal, disk, run_id, &end, SEGMENT_BYTES, NULL) == GQ_OK);
    REQUIRE (gq_journal_append (&journal, GQ_RECORD_GRANT, &part, 1) == GQ_OK);
    REQUIRE (read_all (disk, after_lsn, after_chain, &again, &end_again) == GQ_OK);
    REQUIRE (again.lsn == all.lsn + 1 && !end_again.torn);
    REQUIRE (end_again.chain == journal.chain && end_again.size == journal.size);
    const uint32_t kind = GQ_RECORD_GRANT;
    all.crc = gq_crc32c_more (all.crc, &kind, sizeof kind);
    REQUIRE (again.crc == gq_crc32c_more (all.crc, payload, sizeof payload));
}

/* One segment made right in place, from a number and a chain that move on. */
static void
make_right (uint8_t *bytes, size_t size, uint64_t *lsn, uint32_t *chain)
{
    gq_segment_header segment;
    gq_record_header record;
    if (size < sizeof segment)
        return;
    memcpy (&segment, bytes, sizeof segment);
    segment.magic = GQ_SEGMENT_MAGIC;
    segment.version = GQ_SEGMENT_VERSION;
    memcpy (segment.run, run_id, sizeof segment.run);
    segment.first_lsn = *lsn + 1;
    segment.chain = *chain;
    segment.crc = gq_crc32c (&segment, offsetof (gq_segment_header, crc));
    memcpy (bytes, &segment, sizeof segment);
    for (size_t at = sizeof segment; at < size && size - at >= sizeof record;) {
        memcpy (&record, bytes + at, sizeof record);
        record.magic = GQ_RECORD_MAGIC;
        record.lsn = ++*lsn;
        record.chain = *chain;
        record.payload_bytes &= 63;
        if (record.payload_bytes > size - at - sizeof record)
            return; /* unfinished it stays */
        record.crc = gq_crc32c (&record, offsetof (gq_record_header, crc));
        record.crc = gq_crc32c_more (record.crc, bytes + at + sizeof record, record.payload_bytes);
        *chain = record.crc;
        memcpy (bytes + at, &record, sizeof record);
        at += sizeof record + (record.payload_bytes + 7) / 8 * 8;
    }
}

/* A disk with the input's segments; with `right`, all made to follow one another. */
static void
try (const uint8_t *data, size_t size, int right)
{
    uint64_t firsts[SEGMENTS_MAX], lsn = 0;
    size_t sizes[SEGMENTS_MAX], count = 0;
    uint32_t chain = 0, after_chain = 0;
    gq_memory_disk *memory = gq_memory_disk_new ();
    REQUIRE (memory != NULL);
    const uint64_t after_lsn = *data++;
    size--;
    while (count < SEGMENTS_MAX && size >= 2 && data[0] != 0) {
        firsts[count] = data[0];
        sizes[count++] = (size_t)data[1] * SIZE_UNIT;
        data += 2;
        size -= 2;
    }
    if (count < SEGMENTS_MAX && size > 0) { /* the 0 that ended them */
        data++;
        size--;
    }
    if (right && count > 0)
        lsn = firsts[0] - 1;
    for (size_t i = 0; i < count; i++) {
        char name[64];
        size_t bytes_size = sizes[i] < size ? sizes[i] : size;
        uint8_t *bytes = malloc (bytes_size + 1);
        REQUIRE (bytes != NULL);
        memcpy (bytes, data, bytes_size);
        data += bytes_size;
        size -= bytes_size;
        if (right) {
            firsts[i] = lsn + 1;
            make_right (bytes, bytes_size, &lsn, &chain);
            after_chain = lsn == after_lsn ? chain : after_chain;
        }
        snprintf (name, sizeof name, GQ_SEGMENT_PREFIX "%0*" PRIu64, GQ_SEGMENT_DIGITS, firsts[i]);
        REQUIRE (gq_memory_disk_put (memory, name, bytes, bytes_size) == GQ_OK);
        free (bytes);
    }
    check (memory, after_lsn, after_chain);
    gq_disk *disk = &memory->base;
    disk->ops->close (&disk);
}

int
LLVMFuzzerTestOneInput (const uint8_t *data, size_t size)
{
    if (size < 1)
        return 0;
    try (data, size, 0);
    try (data, size, 1);
    return 0;
}
