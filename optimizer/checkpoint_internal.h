/*
 * What the checkpoint writer and reader share.
 */
#ifndef GQ_CHECKPOINT_INTERNAL_H
#define GQ_CHECKPOINT_INTERNAL_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#include "gradq/limits.h"
#include "rule_state.h"
#include "safetensors.h"

#define GQ_CHECKPOINT_FORMAT "gradq-checkpoint-1"
/* What actors/python/gradq/convert.py makes of another program's optimizer: layout, weights, rule,
 * steps, slots and scalars as in a checkpoint, and nothing of a run. */
#define GQ_CHECKPOINT_STATE     "gradq-state-1"
#define GQ_CHECKPOINT_META_HASH "meta_xxh64"
/* Bytes of a tensor's name, NUL included: "retired.<rule>.<slot>.<parameter>" is the longest. */
#define GQ_CHECKPOINT_NAME_MAX (16 + 2 * GQ_RULE_WORD_MAX + GQ_NAME_MAX)

/* Versions of the checkpoints in `directory`, newest first; *versions is the caller's to free. */
size_t gq_checkpoint_list (const char *directory, uint64_t **versions);

/* DIR/checkpoint-VERSION.safetensors; 0 when it is too long. */
int gq_checkpoint_path (char path[PATH_MAX], const char *directory, uint64_t version);

/* "retired.<rule>.<slot>.": what comes before a parameter's name, for this slot of the state. */
void gq_checkpoint_retired_prefix (char prefix[GQ_CHECKPOINT_NAME_MAX - GQ_NAME_MAX],
                                   const gq_rule_state *state, size_t slot);

/* XXH64, seed 0, of all tensors' data in the order of the array. */
uint64_t gq_checkpoint_hash (const gq_tensor *tensors, size_t count);

/*
 * Of what data_xxh64 does not cover: the sum, modulo 2^64, of the XXH64 of every key and value,
 * each with its final NUL, but for GQ_CHECKPOINT_META_HASH itself; plus the XXH64 of all tensors'
 * names in the order of the array, each with its final NUL.
 */
uint64_t gq_checkpoint_meta_hash (const gq_meta *meta, size_t meta_count, const gq_tensor *tensors,
                                  size_t tensor_count);

#endif
