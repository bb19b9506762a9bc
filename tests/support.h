/*
 * What the suites of frames, core and checkpoints share: frames with any content, memory that ends
 * at a page nobody may read, directories that vanish again.  Never fails quietly.
 */
#ifndef GQ_SUPPORT_H
#define GQ_SUPPORT_H

#include <criterion/criterion.h>
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "frame.h"
#include "gradq/gradq.h"

/* splitmix64 (Steele, Lea and Flood, 2014). */
static inline uint64_t
support_random (uint64_t *state)
{
    uint64_t z = *state += UINT64_C (0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C (0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C (0x94d049bb133111eb);
    return z ^ z >> 31;
}

/* What a frame of `kind` from actor 0 needs to be sound; a test changes what it is about. */
static inline gq_frame
support_frame (gq_frame_kind kind, uint64_t digest, uint64_t count)
{
    gq_frame frame = {.kind = (uint16_t)kind,
                      .encoding = GQ_ENCODING_F32,
                      .lane = GQ_LANE_INLINE,
                      .epoch = 1,
                      .digest = digest,
                      .sequence = 1,
                      .samples = 1,
                      .count = count,
                      .payload_bytes = count * sizeof (float)};
    if (kind == GQ_KIND_ACK) {
        frame.encoding = GQ_ENCODING_RAW;
        frame.count = 0;
        frame.payload_bytes = GQ_ACK_BYTES;
    }
    return frame;
}

/* The same gradient in bf16: half the bytes. */
static inline gq_frame
support_bf16 (gq_frame frame)
{
    frame.encoding = GQ_ENCODING_BF16;
    frame.payload_bytes = frame.count * 2;
    return frame;
}

/* Header and payload in one block of malloc, yours to free.  *size: of the whole. */
static inline uint8_t *
support_message (const gq_frame *frame, const void *payload, size_t *size)
{
    *size = GQ_FRAME_HEADER_BYTES + (size_t)frame->payload_bytes;
    uint8_t *bytes = malloc (*size);
    cr_assert_not_null (bytes);
    memcpy (bytes + GQ_FRAME_HEADER_BYTES, payload, (size_t)frame->payload_bytes);
    gq_frame_encode (frame, bytes + GQ_FRAME_HEADER_BYTES, bytes);
    return bytes;
}

/* The end of `size` bytes that may be read and written; the byte after them ends the process. */
static inline uint8_t *
support_guarded_end (size_t size)
{
    const size_t page = (size_t)sysconf (_SC_PAGESIZE);
    const size_t whole = (size + page - 1) / page * page;
    uint8_t *at =
        mmap (NULL, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    cr_assert (at != MAP_FAILED);
    cr_assert_eq (mprotect (at + whole, page, PROT_NONE), 0);
    return at + whole;
}

/* A new directory; its name in directory[]. */
static inline void
support_directory (char directory[64])
{
    snprintf (directory, 64, "/tmp/gradq-test-XXXXXX");
    cr_assert_not_null (mkdtemp (directory));
}

/* Its files and itself; it holds no directories. */
static inline void
support_remove (const char *directory)
{
    DIR *entries = opendir (directory);
    cr_assert_not_null (entries);
    for (struct dirent *entry = readdir (entries); entry != NULL; entry = readdir (entries)) {
        char path[4400]; /* PATH_MAX and a name */
        snprintf (path, sizeof path, "%s/%s", directory, entry->d_name);
        if (entry->d_name[0] != '.')
            cr_expect_eq (unlink (path), 0, "%s", path);
    }
    closedir (entries);
    cr_expect_eq (rmdir (directory), 0);
}

/* A whole file; *bytes_p is yours to free. */
static inline size_t
support_read (const char *path, uint8_t **bytes_p)
{
    FILE *file = fopen (path, "rb");
    cr_assert_not_null (file, "%s", path);
    fseek (file, 0, SEEK_END);
    const size_t size = (size_t)ftell (file);
    rewind (file);
    *bytes_p = malloc (size + 1);
    cr_assert_not_null (*bytes_p);
    cr_assert_eq (fread (*bytes_p, 1, size, file), size);
    (*bytes_p)[size] = 0;
    fclose (file);
    return size;
}

static inline void
support_write (const char *path, const void *bytes, size_t size)
{
    FILE *file = fopen (path, "wb");
    cr_assert_not_null (file, "%s", path);
    cr_assert_eq (fwrite (bytes, 1, size, file), size);
    cr_assert_eq (fclose (file), 0);
}

#endif
