/*
 * What the suites of checkpoints share: an optimizer that writes, one that reads, and a directory
 * between them.  Never fails quietly.
 */
#ifndef GQ_CHECKPOINT_TESTING_H
#define GQ_CHECKPOINT_TESTING_H

#include "rule_testing.h"
#include "support.h"

#include <inttypes.h>
#include <limits.h>

#include "log.h"
#include "optimizer/checkpoint.h"
#include "optimizer/checkpoint_internal.h"
#include "safetensors.h"

enum { N = 7, KEPT = 3 };

static const gq_tensor_shape shapes[] = {{.name = "pi.weight", .rank = 2, .shape = {2, 3}},
                                         {.name = "pi.bias", .rank = 0}};
static const gq_core_config plain = {.aggregate = 1, .max_staleness = UINT64_MAX};
static char directory[64];

/* One optimizer: the rule and the state that it works on. */
typedef struct machine {
    gq_core core;
    gq_rule *rule;
} machine;
static machine writer, reader;

static inline void
machine_begin (machine *self, const char *rule)
{
    self->rule = load (rule, "auto", NO_SETS);
    gq_core_init (&self->core, &plain, self->rule);
}

static inline void
machine_end (machine *self)
{
    gq_core_clear (&self->core);
    gq_rule_free (&self->rule);
}

static inline void
machine_set_layout (machine *self, const gq_tensor_shape *tensors, size_t count)
{
    gq_layout layout;
    cr_assert_eq (gq_layout_init (&layout, tensors, count, NULL), GQ_OK);
    cr_assert_eq (gq_core_set_layout (&self->core, &layout), GQ_OK);
}

/* One step on a gradient that the version determines. */
static inline void
machine_step (machine *self)
{
    float gradient[N];
    uint64_t seed = self->core.version;
    for (size_t i = 0; i < N; i++)
        gradient[i] = ldexpf ((float)(int32_t)support_random (&seed), -31);
    gq_rule_step (self->rule, gq_buffers_current (self->core.buffers),
                  gq_buffers_next (self->core.buffers), gradient, 1);
    gq_buffers_turn (self->core.buffers);
    self->core.version++;
    self->core.applied += 2;
}

/* Weights that no decimal text would keep, and some steps on them. */
static inline void
writer_begin (const char *rule, uint64_t steps)
{
    const float weights[N] = {-0.0f, 1e-45f, 0.1f, -1e30f, 3.0f, FLT_MIN / 2, 1.0f / 3};
    gq_error error;
    /* Damage is logged, thousands of times here. */
    cr_assert_eq (gq_log_open ("test", "/dev/null", GQ_LOG_ERROR, &error), GQ_OK);
    support_directory (directory);
    machine_begin (&writer, rule);
    machine_set_layout (&writer, shapes, 2);
    gq_core_set_weights (&writer.core, weights, 0, 0);
    for (uint64_t i = 0; i < steps; i++)
        machine_step (&writer);
}

static inline void
finish (void)
{
    machine_end (&writer);
    support_remove (directory);
}

static inline void
write_kept (uint64_t kept, char *path)
{
    gq_error error = {""};
    cr_assert_eq (gq_checkpoint_write (&writer.core, directory, kept, path, &error), GQ_OK, "%s",
                  error.text);
}

/* What a checkpoint is loaded for: a rule by its name and the writer's settings, which in a run the
 * life says. */
static inline gq_status
prepare (void *context, gq_core *core, const char *life, gq_error *error)
{
    (void)life;
    (void)error;
    reader.rule = load (context, "auto", NO_SETS);
    gq_core_init (core, &writer.core.config, reader.rule);
    return GQ_OK;
}

/* The newest up to a version, into the reader. */
static inline gq_status
resume_until (const char *rule, uint64_t version_max, gq_checkpoint_place *place, gq_error *error)
{
    reader.rule = NULL;
    gq_core_init (&reader.core, &plain, NULL);
    return gq_checkpoint_load (&reader.core, directory, version_max, prepare,
                               (void *)(uintptr_t)rule, place, error);
}

static inline gq_status
resume (const char *rule, gq_error *error)
{
    gq_checkpoint_place place;
    return resume_until (rule, UINT64_MAX, &place, error);
}

/* Write the checkpoint at `path` again with another first weight, or another value of a key, and
 * the hashes that go with it: what a writer that does not look at values would have left. */
static inline void
rewrite (const char *path, const char *key, const char *value, const float *weight)
{
    enum { PLENTY = 64, FIRST_COUNT = 6 };
    gq_tensor tensors[PLENTY];
    gq_meta meta[PLENTY];
    float weights[FIRST_COUNT];
    char hash[20], meta_hash[20];
    gq_safetensors *file;
    gq_error error = {""};
    cr_assert_eq (gq_safetensors_read (&file, path, &error), GQ_OK, "%s", error.text);
    const size_t count = gq_safetensors_count (file), meta_count = gq_safetensors_meta_count (file);
    cr_assert (count >= 1 && count <= PLENTY && meta_count <= PLENTY);
    for (size_t i = 0; i < count; i++)
        tensors[i] = *gq_safetensors_at (file, i);
    cr_assert_eq (tensors[0].bytes, sizeof weights);
    memcpy (weights, tensors[0].data, sizeof weights);
    if (weight != NULL)
        weights[0] = *weight;
    tensors[0].data = weights;
    snprintf (hash, sizeof hash, "%016" PRIx64, gq_checkpoint_hash (tensors, count));
    for (size_t i = 0; i < meta_count; i++) {
        meta[i] = gq_safetensors_meta_at (file, i);
        if (strcmp (meta[i].key, "data_xxh64") == 0)
            meta[i].value = hash;
        else if (strcmp (meta[i].key, GQ_CHECKPOINT_META_HASH) == 0)
            meta[i].value = meta_hash;
        else if (key != NULL && strcmp (meta[i].key, key) == 0)
            meta[i].value = value;
    }
    snprintf (meta_hash, sizeof meta_hash, "%016" PRIx64,
              gq_checkpoint_meta_hash (meta, meta_count, tensors, count));
    cr_assert_eq (gq_safetensors_write (path, tensors, count, meta, meta_count, &error), GQ_OK,
                  "%s", error.text);
    gq_safetensors_free (&file);
}

static inline void
expect_same_bits (const float *a, const float *b, const char *what)
{
    cr_assert_eq (memcmp (a, b, N * sizeof *a), 0, "%s differs", what);
}

static inline void
expect_same_weights (void)
{
    expect_same_bits (gq_buffers_current (writer.core.buffers),
                      gq_buffers_current (reader.core.buffers), "weights");
}

#endif
