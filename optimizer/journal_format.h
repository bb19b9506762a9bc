/*
 * Bytes of the journal, shared by its writer and its reader.  docs/PROTOCOL.md has the same tables.
 */
#ifndef GQ_JOURNAL_FORMAT_H
#define GQ_JOURNAL_FORMAT_H

#include <stddef.h>
#include <stdint.h>

#include "disk.h"
#include "gradq/protocol.h"

#define GQ_SEGMENT_PREFIX  "segment-"
#define GQ_SEGMENT_DIGITS  16          /* of first_lsn, decimal, so that names sort as numbers do */
#define GQ_SEGMENT_MAGIC   0x314a5147u /* "GQJ1" */
#define GQ_SEGMENT_VERSION 1
#define GQ_RECORD_MAGIC    0x31435247u /* "GRC1" */
/* Records are padded with zeros to this, so that float32 payloads can be used where they lie. */
#define GQ_RECORD_ALIGN 8

typedef struct gq_segment_header {
    uint32_t magic;
    uint32_t version;
    uint8_t run[GQ_RUN_ID_BYTES];
    uint64_t first_lsn; /* of the first record in this segment */
    uint32_t chain;     /* CRC of the record before it, 0 for the very first */
    uint8_t zero[24];
    uint32_t crc; /* CRC32C of all before */
} gq_segment_header;
_Static_assert(sizeof (gq_segment_header) == 64, "segment header");

typedef struct gq_record_header {
    uint32_t magic;
    uint32_t kind;
    uint64_t lsn;
    uint64_t payload_bytes;
    uint32_t chain; /* CRC of the record before this one */
    uint32_t crc;   /* CRC32C of the header up to here, and the payload */
} gq_record_header;
_Static_assert(sizeof (gq_record_header) == 32, "record header");

/* The number of the first record in a segment of this name; 0: not exactly a segment's name. */
uint64_t gq_segment_first_lsn (const char *name);

/*
 * The names of all segments, in order; *names is one block to free.  Other files are left out: a
 * copy or a backup beside the segments is none of the journal.  GQ_OK, or what the disk answered.
 */
GQ_CHECK gq_status gq_segment_list (gq_disk *disk, char ***names, size_t *count);

#endif
