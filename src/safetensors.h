/*
 * Reader and writer of the safetensors format (https://github.com/huggingface/safetensors#format).
 * The reader trusts no byte of the file.
 */
#ifndef GQ_SAFETENSORS_H
#define GQ_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "gradq/limits.h"
#include "gradq/status.h"

typedef enum gq_dtype {
    GQ_DTYPE_F32,
    GQ_DTYPE_F64,
    GQ_DTYPE_I32,
    GQ_DTYPE_I64,
    GQ_DTYPE_U8,
    GQ_DTYPE_OTHER /* a known type that gradq does not compute with: F16, BF16, I8, ... */
} gq_dtype;

/* A named array, row-major.  In a file that was read, data points into the file's memory and may
 * be unaligned: copy it out with memcpy or one of the getters. */
typedef struct gq_tensor {
    const char *name;
    gq_dtype dtype;
    uint32_t rank;
    uint64_t shape[GQ_RANK_MAX];
    uint64_t element_count;
    const void *data;
    uint64_t bytes;
} gq_tensor;

typedef struct gq_meta {
    const char *key;
    const char *value;
} gq_meta;

typedef struct gq_safetensors gq_safetensors;

/*
 * Read a whole file; the file is the caller's until gq_safetensors_free.
 * GQ_OK; GQ_NOTFOUND, GQ_IO, GQ_MALFORMED, GQ_MEMORY with *error naming the path, the place and
 * what is wrong.
 */
GQ_CHECK gq_status gq_safetensors_read (gq_safetensors **file_p, const char *path, gq_error *error);

/* The same from bytes[size], borrowed as long as the result lives.  For tests and the fuzzer. */
GQ_CHECK gq_status gq_safetensors_parse (gq_safetensors **file_p, const void *bytes, size_t size,
                                         gq_error *error);

void gq_safetensors_free (gq_safetensors **file_p);

size_t gq_safetensors_count (const gq_safetensors *file);
/* In order of their data in the file. */
const gq_tensor *gq_safetensors_at (const gq_safetensors *file, size_t index);
/* NULL when there is none of that name. */
const gq_tensor *gq_safetensors_find (const gq_safetensors *file, const char *name);
/* NULL when __metadata__ has no such key. */
const char *gq_safetensors_meta (const gq_safetensors *file, const char *key);
size_t gq_safetensors_meta_count (const gq_safetensors *file);
gq_meta gq_safetensors_meta_at (const gq_safetensors *file, size_t index);

/*
 * Copy tensor `name`, which must be of `dtype` and hold element_count elements, to `out`.
 * GQ_OK, GQ_NOTFOUND, GQ_INVALID (type or size) with *error.
 */
GQ_CHECK gq_status gq_safetensors_copy (const gq_safetensors *file, const char *name,
                                        gq_dtype dtype, uint64_t element_count, void *out,
                                        gq_error *error);

/*
 * Write tensors[count] (data may have any alignment) and meta[meta_count] to `path`, so that a
 * crash leaves the old file or the new one: temp file beside it, fsync, rename, fsync directory.
 * Data starts 64-byte aligned.  dtype OTHER is GQ_INVALID.
 * GQ_OK; GQ_IO, GQ_INVALID, GQ_MEMORY with *error, and no file changed.
 */
GQ_CHECK gq_status gq_safetensors_write (const char *path, const gq_tensor *tensors, size_t count,
                                         const gq_meta *meta, size_t meta_count, gq_error *error);

#endif
