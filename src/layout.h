/*
 * Parameter layout: an ordered list of named float32 tensors in one flat vector, and its digest.
 */
#ifndef GQ_LAYOUT_H
#define GQ_LAYOUT_H

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

#include "gradq/gradq.h"

typedef struct gq_layout {
    gq_tensor_shape *tensors; /* [tensor_count], owned */
    size_t tensor_count;
    uint64_t element_count; /* sum over tensors of the product of the shape */
    uint64_t digest;        /* XXH64, seed 0, of the canonical text: docs/PROTOCOL.md */
} gq_layout;

/* Elements of one tensor: the product of its shape, 1 for rank 0. */
uint64_t gq_tensor_elements (const gq_tensor_shape *tensor);

/*
 * Copy tensors[count], check names (UTF-8, not empty, unique), ranks, sizes against GQ_*_MAX, and
 * digest.
 * GQ_OK: *layout is filled, gq_layout_clear it.  GQ_INVALID with *error, GQ_MEMORY.
 */
GQ_CHECK gq_status gq_layout_init (gq_layout *layout, const gq_tensor_shape *tensors, size_t count,
                                   gq_error *error);
void gq_layout_clear (gq_layout *layout);

/* As [{"name": ..., "shape": [...]}, ...]; NULL: out of memory. */
json_t *gq_layout_to_json (const gq_layout *layout);
GQ_CHECK gq_status gq_layout_from_json (gq_layout *layout, const json_t *json, gq_error *error);

#endif
