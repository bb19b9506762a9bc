/*
 * What the suites of the journal share: records whose every byte follows from their number, a
 * handler that knows them, and journals made of them on a disk in memory.  Never fails quietly:
 * each helper asserts.
 */
#ifndef GQ_JOURNAL_TESTING_H
#define GQ_JOURNAL_TESTING_H

#include <criterion/criterion.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "memory_disk.h"
#include "optimizer/journal.h"
#include "optimizer/journal_format.h"

/* Asserts, but says so only on failure: Criterion sends each assertion that holds through a pipe,
 * which is too slow for millions of them. */
#define REQUIRE(claim, ...)                           \
    do {                                              \
        if (!(claim))                                 \
            cr_assert_fail (#claim ": " __VA_ARGS__); \
    } while (0)

#define RECORDS_MAX       64
#define PAYLOAD_BYTES_MAX 40
/* Two or three of our records in a segment. */
#define SEGMENT_BYTES 192

static const uint8_t run_id[GQ_RUN_ID_BYTES] = "run of the test";

/* An empty payload, every remainder by 8, and more than one cache line with the header. */
static inline size_t
payload_bytes (uint64_t lsn)
{
    static const size_t sizes[] = {24, 0, 7, 33, 8, 1, PAYLOAD_BYTES_MAX, 18, 5, 36, 11};
    return sizes[lsn % (sizeof sizes / sizeof sizes[0])];
}

static inline uint8_t
payload_byte (uint64_t lsn, size_t i)
{
    return (uint8_t)(lsn * 31 + i * 7 + 1);
}

static inline gq_record_kind
record_kind (uint64_t lsn)
{
    return (gq_record_kind)(GQ_RECORD_TERM + lsn % 4);
}

/* Bytes of a record, its padding included. */
static inline uint64_t
record_bytes (uint64_t lsn)
{
    return sizeof (gq_record_header) + (payload_bytes (lsn) + 7) / 8 * 8;
}

/* The record after the last one, its payload in as many parts as the number says. */
static inline gq_status
append_next (gq_journal *journal)
{
    const uint64_t lsn = journal->lsn + 1;
    const int count = 1 + (int)(lsn % GQ_RECORD_PARTS_MAX);
    const size_t size = payload_bytes (lsn);
    uint8_t payload[PAYLOAD_BYTES_MAX];
    struct iovec parts[GQ_RECORD_PARTS_MAX];
    for (size_t i = 0; i < size; i++)
        payload[i] = payload_byte (lsn, i);
    for (int i = 0; i < count; i++) {
        const size_t from = size * (size_t)i / (size_t)count;
        const size_t to = size * (size_t)(i + 1) / (size_t)count;
        parts[i] = (struct iovec){.iov_base = payload + from, .iov_len = to - from};
    }
    return gq_journal_append (journal, record_kind (lsn), parts, count);
}

static inline void
append_to (gq_journal *journal, uint64_t lsn)
{
    while (journal->lsn < lsn) {
        const gq_status status = append_next (journal);
        REQUIRE (status == GQ_OK, "%s", gq_status_name (status));
    }
}

/* What a reading saw: the records after `lsn`, up to `lsn` in the end. */
typedef struct seen {
    uint64_t lsn;
    uint64_t stop_at; /* answer GQ_CLOSED at this one */
} seen;

static inline gq_status
see (void *context, const gq_record *record, gq_error *error)
{
    seen *self = context;
    (void)error;
    if (record->lsn == self->stop_at)
        return GQ_CLOSED;
    self->lsn++;
    REQUIRE (record->lsn == self->lsn, "%" PRIu64 " after %" PRIu64, record->lsn, self->lsn - 1);
    REQUIRE (record->kind == (uint32_t)record_kind (record->lsn), "%u", record->kind);
    REQUIRE (record->payload_bytes == payload_bytes (record->lsn), "%" PRIu64, record->lsn);
    REQUIRE ((uintptr_t)record->payload % GQ_RECORD_ALIGN == 0, "%" PRIu64, record->lsn);
    for (size_t i = 0; i < record->payload_bytes; i++)
        REQUIRE (record->payload[i] == payload_byte (record->lsn, i), "byte %zu of %" PRIu64, i,
                 record->lsn);
    return GQ_OK;
}

/* Read what follows (after_lsn, after_chain).  *end and *error are the reading's. */
static inline gq_status
read_after (gq_disk *disk, uint64_t after_lsn, uint32_t after_chain, gq_journal_end *end,
            gq_error *error)
{
    seen all = {.lsn = after_lsn};
    gq_error own;
    error = error == NULL ? &own : error;
    error->text[0] = '\0';
    const gq_status status =
        gq_journal_read (disk, run_id, after_lsn, after_chain, see, &all, end, error);
    if (status == GQ_OK)
        REQUIRE (all.lsn == end->lsn, "saw %" PRIu64 ", ended at %" PRIu64, all.lsn, end->lsn);
    else
        REQUIRE (error->text[0] != '\0', "%s without a sentence", gq_status_name (status));
    return status;
}

static inline gq_status
read_all (gq_disk *disk, gq_journal_end *end, gq_error *error)
{
    return read_after (disk, 0, 0, end, error);
}

/* What a new process does: read everything and go on behind it.  Answers where it ended. */
static inline gq_journal_end
reopen_after (gq_journal *journal, gq_disk *disk, uint64_t after_lsn, uint32_t after_chain)
{
    gq_journal_end end;
    gq_error error;
    gq_status status = read_after (disk, after_lsn, after_chain, &end, &error);
    REQUIRE (status == GQ_OK, "%s", error.text);
    status = gq_journal_start (journal, disk, run_id, &end, SEGMENT_BYTES, &error);
    REQUIRE (status == GQ_OK, "%s", error.text);
    return end;
}

static inline gq_journal_end
reopen (gq_journal *journal, gq_disk *disk)
{
    return reopen_after (journal, disk, 0, 0);
}

/* A journal of `lsn` records on a new disk.  Destroyed by disk_close. */
static inline gq_memory_disk *
journal_of (gq_journal *journal, uint64_t lsn)
{
    gq_memory_disk *memory = gq_memory_disk_new ();
    cr_assert_not_null (memory);
    reopen (journal, &memory->base);
    append_to (journal, lsn);
    return memory;
}

static inline void
disk_close (gq_memory_disk *memory)
{
    gq_disk *disk = &memory->base;
    disk->ops->close (&disk);
    cr_assert_null (disk);
}

/* Where a record stands, by the rules of the format alone. */
typedef struct place {
    char segment[64];
    size_t number;   /* of the segment, from 0 */
    uint64_t offset; /* of the header */
    uint64_t end;    /* behind the payload */
    uint64_t padded; /* behind the padding */
} place;

/* Fills places[1 .. lsn]; answers how many segments there are. */
static inline size_t
places_of (place *places, uint64_t lsn)
{
    size_t segments = 0;
    uint64_t at = SEGMENT_BYTES;
    for (uint64_t i = 1; i <= lsn; i++) {
        if (at >= SEGMENT_BYTES) {
            at = sizeof (gq_segment_header);
            segments++;
            snprintf (places[i].segment, sizeof places[i].segment, "segment-%016" PRIu64, i);
        } else {
            memcpy (places[i].segment, places[i - 1].segment, sizeof places[i].segment);
        }
        places[i].number = segments - 1;
        places[i].offset = at;
        places[i].end = at + sizeof (gq_record_header) + payload_bytes (i);
        places[i].padded = at += record_bytes (i);
    }
    return segments;
}

/* splitmix64 (Steele, Lea, Flood 2014): any seed will do. */
static inline uint64_t
random_next (uint64_t *state)
{
    uint64_t z = (*state += UINT64_C (0x9e3779b97f4a7c15));
    z = (z ^ z >> 30) * UINT64_C (0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C (0x94d049bb133111eb);
    return z ^ z >> 31;
}

#endif
