/*
 * What the checkpoint writer and reader share.
 */
#ifndef GQ_CHECKPOINT_INTERNAL_H
#define GQ_CHECKPOINT_INTERNAL_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#include "safetensors.h"

#define GQ_CHECKPOINT_FORMAT "gradq-checkpoint-1"

/* Versions of the checkpoints in `directory`, newest first; *versions is the caller's to free. */
size_t gq_checkpoint_list (const char *directory, uint64_t **versions);

/* DIR/checkpoint-VERSION.safetensors; 0 when it is too long. */
int gq_checkpoint_path (char path[PATH_MAX], const char *directory, uint64_t version);

/* XXH64, seed 0, of all tensors' data in the order of the array. */
uint64_t gq_checkpoint_hash (const gq_tensor *tensors, size_t count);

#endif
