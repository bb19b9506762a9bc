/*
 * What the reader and the writer of safetensors share; nobody else includes this.
 */
#ifndef GQ_SAFETENSORS_INTERNAL_H
#define GQ_SAFETENSORS_INTERNAL_H

#include <stdbool.h>

#include "safetensors.h"

/* The little-endian length in front of the header. */
#define GQ_PREFIX_BYTES 8
#define GQ_METADATA_KEY "__metadata__"

/* "F32"; NULL for GQ_DTYPE_OTHER and values that are no gq_dtype. */
const char *gq_dtype_word (gq_dtype dtype);

/* Elements and bytes of shape[rank]; false when one of them overflows, or for GQ_DTYPE_OTHER. */
bool gq_dtype_measure (gq_dtype dtype, const uint64_t *shape, uint32_t rank, uint64_t *elements,
                       uint64_t *bytes);

#endif
