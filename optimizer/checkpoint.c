/*
 * Checkpoint writer.  A checkpoint is made of the core's own memory: nothing is copied before it is
 * in the file, so the optimizer waits for the write.
 */
#include "checkpoint.h"

#include <errno.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checkpoint_internal.h"
#include "hex.h"
#include "ledger_json.h"
#include "rule_json.h"
#include "safetensors.h"

/* Entries of __metadata__: the fixed ones, scalars, settings of rule and host. */
#define META_MAX      (32 + GQ_SCALARS_MAX + GQ_SETTINGS_MAX + 8)
#define META_TEXT_MAX 128

/* Everything that a file is made of, while it is being made. */
typedef struct draft {
    gq_tensor *tensors;
    size_t tensor_count;
    char (*names)[GQ_CHECKPOINT_NAME_MAX];
    gq_meta meta[META_MAX];
    char keys[META_MAX][META_TEXT_MAX];
    char values[META_MAX][META_TEXT_MAX];
    size_t meta_count;
    char *layout;
    char *ledger;
    char *retired; /* NULL: no rule has retired */
} draft;

static void
add_meta (draft *self, const char *key, const char *value)
{
    if (self->meta_count == META_MAX)
        return;
    size_t i = self->meta_count++;
    snprintf (self->keys[i], META_TEXT_MAX, "%s", key);
    snprintf (self->values[i], META_TEXT_MAX, "%s", value);
    self->meta[i] = (gq_meta){.key = self->keys[i], .value = self->values[i]};
}

static void
add_number (draft *self, const char *key, uint64_t value)
{
    char text[32];
    snprintf (text, sizeof text, "%llu", (unsigned long long)value);
    add_meta (self, key, text);
}

/* The parameters of the layout, taken from `vector`, under `prefix` ("" or "exp_avg."). */
static void
add_vector (draft *self, const gq_layout *layout, const float *vector, const char *prefix)
{
    for (size_t i = 0; i < layout->tensor_count; i++) {
        const gq_tensor_shape *shape = &layout->tensors[i];
        uint64_t elements = gq_tensor_elements (shape);
        size_t k = self->tensor_count++;
        snprintf (self->names[k], sizeof self->names[k], "%s%s", prefix, shape->name);
        self->tensors[k] = (gq_tensor){.name = self->names[k],
                                       .dtype = GQ_DTYPE_F32,
                                       .rank = shape->rank,
                                       .element_count = elements,
                                       .data = vector,
                                       .bytes = elements * sizeof *vector};
        memcpy (self->tensors[k].shape, shape->shape, sizeof shape->shape);
        vector += elements;
    }
}

static void
describe_rule (draft *self, gq_rule *rule)
{
    const gq_optimizer *plugin = gq_rule_plugin (rule);
    char key[META_TEXT_MAX];
    char value[64];
    const char *name;
    add_meta (self, "optimizer", plugin->name);
    add_number (self, "optimizer_steps", gq_rule_steps (rule));
    for (size_t i = 0; i < gq_rule_scalar_count (rule); i++) {
        snprintf (key, sizeof key, "scalar.%s", plugin->scalars[i]);
        snprintf (value, sizeof value, "%.17g", gq_rule_scalars (rule)[i]);
        add_meta (self, key, value);
    }
    for (size_t i = 0; gq_rule_setting (rule, i, &name, value); i++) {
        snprintf (key, sizeof key, "set.%s", name);
        add_meta (self, key, value);
    }
}

/* 17 digits name every double apart. */
static void
add_double (draft *self, const char *key, double value)
{
    char text[32];
    snprintf (text, sizeof text, "%.17g", value);
    add_meta (self, key, text);
}

/* Where the journal stands, the step being aggregated, and what damping remembers. */
static void
describe_progress (draft *self, const gq_core *core)
{
    add_number (self, "lsn", core->journal != NULL ? core->journal->lsn : 0);
    add_number (self, "chain", core->journal != NULL ? core->journal->chain : 0);
    add_number (self, "held", core->held);
    add_double (self, "held_weight", core->held_weight);
    add_double (self, "staleness_sum", core->staleness_sum);
    add_number (self, "staleness_count", core->staleness_count);
}

static void
draft_free (draft *self)
{
    free (self->tensors);
    free (self->names);
    free (self->layout);
    free (self->ledger);
    free (self->retired);
}

/* An object as text, and released.  NULL: out of memory. */
static char *
text_of (json_t *object)
{
    char *text = object == NULL ? NULL : json_dumps (object, JSON_COMPACT);
    json_decref (object);
    return text;
}

/* Memory for all that the file holds.  GQ_OK, GQ_MEMORY. */
static gq_status
draft_begin (draft *self, const gq_core *core)
{
    size_t vectors = 1 + gq_rule_slot_count (core->rule) + (core->held > 0 ? 1 : 0);
    bool retired = core->retired.name[0] != '\0';
    if (retired)
        vectors += core->retired.slot_count;
    self->tensors = calloc (core->layout.tensor_count * vectors, sizeof *self->tensors);
    self->names = calloc (core->layout.tensor_count * vectors, sizeof *self->names);
    self->layout = text_of (gq_layout_to_json (&core->layout));
    self->ledger = text_of (gq_ledger_to_json (&core->ledger));
    self->retired = retired ? text_of (gq_rule_state_to_json (&core->retired)) : NULL;
    bool whole = self->tensors != NULL && self->names != NULL && self->layout != NULL &&
                 self->ledger != NULL && (!retired || self->retired != NULL);
    return whole ? GQ_OK : GQ_MEMORY;
}

static void
add_all_vectors (draft *self, gq_core *core)
{
    const gq_rule_state *retired = &core->retired;
    char prefix[GQ_CHECKPOINT_NAME_MAX - GQ_NAME_MAX];
    add_vector (self, &core->layout, gq_buffers_current (core->buffers), "");
    for (size_t i = 0; i < gq_rule_slot_count (core->rule); i++) {
        snprintf (prefix, sizeof prefix, "%s.", gq_rule_plugin (core->rule)->slots[i]);
        add_vector (self, &core->layout, gq_rule_slot (core->rule, i), prefix);
    }
    if (core->held > 0)
        add_vector (self, &core->layout, core->sum, GQ_HELD_NAME ".");
    for (size_t i = 0; i < retired->slot_count; i++) {
        gq_checkpoint_retired_prefix (prefix, retired, i);
        add_vector (self, &core->layout, retired->slots[i], prefix);
    }
}

static gq_status
draft_fill (draft *self, gq_core *core)
{
    if (draft_begin (self, core) != GQ_OK)
        return GQ_MEMORY;
    add_all_vectors (self, core);
    char run[2 * GQ_RUN_ID_BYTES + 1];
    char hash[32];
    gq_hex_encode (core->run, GQ_RUN_ID_BYTES, run);
    snprintf (hash, sizeof hash, "%016llx",
              (unsigned long long)gq_checkpoint_hash (self->tensors, self->tensor_count));
    add_meta (self, "format", GQ_CHECKPOINT_FORMAT);
    add_meta (self, "run", run);
    add_number (self, "term", core->term);
    add_number (self, "version", core->version);
    add_number (self, "applied", core->applied);
    add_meta (self, "data_xxh64", hash);
    describe_rule (self, core->rule);
    describe_progress (self, core);
    self->meta[self->meta_count++] = (gq_meta){.key = "layout", .value = self->layout};
    self->meta[self->meta_count++] = (gq_meta){.key = "ledger", .value = self->ledger};
    if (core->life != NULL)
        self->meta[self->meta_count++] = (gq_meta){.key = "life", .value = core->life};
    if (self->retired != NULL)
        self->meta[self->meta_count++] = (gq_meta){.key = GQ_RETIRED_NAME, .value = self->retired};
    uint64_t meta_hash =
        gq_checkpoint_meta_hash (self->meta, self->meta_count, self->tensors, self->tensor_count);
    snprintf (hash, sizeof hash, "%016llx", (unsigned long long)meta_hash);
    add_meta (self, GQ_CHECKPOINT_META_HASH, hash);
    return GQ_OK;
}

/* A file of a higher version than the one just written was too damaged to resume from: counting it
 * could delete the only sound one. */
static void
delete_old (const char *directory, uint64_t version, uint64_t kept)
{
    uint64_t *versions;
    size_t count = gq_checkpoint_list (directory, &versions);
    char path[PATH_MAX];
    uint64_t seen = 0;
    for (size_t i = 0; i < count; i++)
        if (versions[i] <= version && ++seen > kept &&
            gq_checkpoint_path (path, directory, versions[i]))
            unlink (path);
    free (versions);
}

gq_status
gq_checkpoint_write (gq_core *core, const char *directory, uint64_t kept, char *path,
                     gq_error *error)
{
    char local[PATH_MAX];
    if (path == NULL)
        path = local;
    /* Finite gradients can still overflow; the last good checkpoint is then worth keeping. */
    if (!gq_all_finite (gq_buffers_current (core->buffers), core->layout.element_count))
        return gq_fail (
            error, GQ_NONFINITE,
            "the weights hold NaN or infinity at version %llu; stop, lower the learning "
            "rate or set clip_norm, and go on from the last checkpoint",
            (unsigned long long)core->version);
    if (mkdir (directory, 0755) != 0 && errno != EEXIST)
        return gq_fail (error, GQ_IO, "cannot create %s: %s", directory, strerror (errno));
    if (!gq_checkpoint_path (path, directory, core->version))
        return gq_fail (error, GQ_IO, "the run directory's name is too long");
    draft *self = calloc (1, sizeof *self);
    if (self == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory");
    gq_status status = draft_fill (self, core);
    if (status != GQ_OK)
        gq_fail (error, status, "out of memory");
    else
        status = gq_safetensors_write (path, self->tensors, self->tensor_count, self->meta,
                                       self->meta_count, error);
    draft_free (self);
    free (self);
    if (status == GQ_OK)
        delete_old (directory, core->version, kept);
    return status;
}
