/*
 * Checkpoint reader: resume a run, or take first weights from any safetensors file.  Nothing of
 * the core changes before a file has passed every check.
 */
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint.h"
#include "checkpoint_internal.h"
#include "ledger_json.h"
#include "log.h"
#include "rule_json.h"

static gq_status
meta_number (const gq_safetensors *file, const char *key, uint64_t *value, gq_error *error)
{
    const char *text = gq_safetensors_meta (file, key);
    char *end = NULL;
    if (text != NULL && *text >= '0' && *text <= '9')
        *value = strtoull (text, &end, 10);
    if (end == NULL || *end != '\0')
        return gq_fail (error, GQ_MALFORMED, "__metadata__ has no number \"%s\"", key);
    return GQ_OK;
}

/* The layout that a checkpoint names. */
static gq_status
layout_from_meta (const gq_safetensors *file, gq_layout *layout, gq_error *error)
{
    const char *text = gq_safetensors_meta (file, "layout");
    json_t *json = text == NULL ? NULL : json_loads (text, 0, NULL);
    gq_status status = json == NULL
                           ? gq_fail (error, GQ_MALFORMED, "__metadata__ has no \"layout\"")
                           : gq_layout_from_json (layout, json, error);
    json_decref (json);
    return status;
}

/* The layout that the tensors of a plain file make, in the order of their data. */
static gq_status
layout_from_tensors (const gq_safetensors *file, gq_layout *layout, gq_error *error)
{
    size_t count = gq_safetensors_count (file);
    gq_tensor_shape *shapes = calloc (count + 1, sizeof *shapes);
    if (shapes == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory");
    gq_status status = GQ_OK;
    for (size_t i = 0; i < count && status == GQ_OK; i++) {
        const gq_tensor *tensor = gq_safetensors_at (file, i);
        if (tensor->dtype != GQ_DTYPE_F32 || strlen (tensor->name) >= GQ_NAME_MAX)
            status = gq_fail (error, GQ_INVALID,
                              "tensor %.80s is not float32, or its name is over %d bytes",
                              tensor->name, GQ_NAME_MAX - 1);
        else
            memcpy (shapes[i].name, tensor->name, strlen (tensor->name) + 1);
        shapes[i].rank = tensor->rank;
        memcpy (shapes[i].shape, tensor->shape, sizeof tensor->shape);
    }
    if (status == GQ_OK)
        status = gq_layout_init (layout, shapes, count, error);
    free (shapes);
    return status;
}

/* Gather `prefix` + each parameter into vector[element_count]. */
static gq_status
gather (const gq_safetensors *file, const gq_layout *layout, const char *prefix, float *vector,
        gq_error *error)
{
    for (size_t i = 0; i < layout->tensor_count; i++) {
        char name[GQ_CHECKPOINT_NAME_MAX];
        uint64_t elements = gq_tensor_elements (&layout->tensors[i]);
        snprintf (name, sizeof name, "%s%s", prefix, layout->tensors[i].name);
        gq_status status = gq_safetensors_copy (file, name, GQ_DTYPE_F32, elements, vector, error);
        if (status != GQ_OK)
            return status;
        vector += elements;
    }
    return GQ_OK;
}

/* Are the parameters there?  Asked before memory for what a layout merely claims is taken. */
static gq_status
find_parameters (const gq_safetensors *file, const gq_layout *layout, gq_error *error)
{
    for (size_t i = 0; i < layout->tensor_count; i++) {
        const gq_tensor_shape *shape = &layout->tensors[i];
        const gq_tensor *tensor = gq_safetensors_find (file, shape->name);
        if (tensor == NULL || tensor->element_count != gq_tensor_elements (shape))
            return gq_fail (error, GQ_MALFORMED, "tensor %.200s is not there, or of another size",
                            shape->name);
    }
    return GQ_OK;
}

/* Is the number that a key holds, in hexadecimal, the hash that we find? */
static gq_status
compare_hash (const gq_safetensors *file, const char *key, uint64_t found, gq_error *error)
{
    const char *hash = gq_safetensors_meta (file, key);
    char text[20];
    snprintf (text, sizeof text, "%016" PRIx64, found);
    if (hash == NULL || strcmp (hash, text) != 0)
        return gq_fail (error, GQ_MALFORMED, "%s is %s, not %.20s: bytes were damaged", key, text,
                        hash == NULL ? "there" : hash);
    return GQ_OK;
}

static bool
has_format (const gq_safetensors *file, const char *name)
{
    const char *format = gq_safetensors_meta (file, "format");
    return format != NULL && strcmp (format, name) == 0;
}

static gq_status
verify (const gq_safetensors *file, gq_error *error)
{
    if (!has_format (file, GQ_CHECKPOINT_FORMAT))
        return gq_fail (error, GQ_MALFORMED, "it is no %s file", GQ_CHECKPOINT_FORMAT);
    size_t count = gq_safetensors_count (file);
    size_t meta_count = gq_safetensors_meta_count (file);
    gq_tensor *tensors = calloc (count + 1, sizeof *tensors);
    gq_meta *meta = calloc (meta_count + 1, sizeof *meta);
    gq_status status = GQ_OK;
    if (tensors == NULL || meta == NULL)
        status = gq_fail (error, GQ_MEMORY, "out of memory");
    for (size_t i = 0; i < count && status == GQ_OK; i++)
        tensors[i] = *gq_safetensors_at (file, i);
    for (size_t i = 0; i < meta_count && status == GQ_OK; i++)
        meta[i] = gq_safetensors_meta_at (file, i);
    if (status == GQ_OK)
        status = compare_hash (file, GQ_CHECKPOINT_META_HASH,
                               gq_checkpoint_meta_hash (meta, meta_count, tensors, count), error);
    if (status == GQ_OK)
        status = compare_hash (file, "data_xxh64", gq_checkpoint_hash (tensors, count), error);
    free (tensors);
    free (meta);
    return status;
}

/* Slots, scalars and steps of the rule, when the file was written by the same one. */
static bool
restore_rule (const gq_safetensors *file, gq_core *core)
{
    gq_rule *rule = core->rule;
    const gq_optimizer *plugin = gq_rule_plugin (rule);
    const char *name = gq_safetensors_meta (file, "optimizer");
    uint64_t steps = 0;
    char key[GQ_NAME_MAX];
    if (name == NULL || strcmp (name, plugin->name) != 0 ||
        meta_number (file, "optimizer_steps", &steps, NULL) != GQ_OK)
        return false;
    for (size_t i = 0; i < gq_rule_slot_count (rule); i++) {
        snprintf (key, sizeof key, "%s.", plugin->slots[i]);
        if (gather (file, &core->layout, key, gq_rule_slot (rule, i), NULL) != GQ_OK)
            return false;
    }
    for (size_t i = 0; i < gq_rule_scalar_count (rule); i++) {
        snprintf (key, sizeof key, "scalar.%s", plugin->scalars[i]);
        const char *text = gq_safetensors_meta (file, key);
        if (text == NULL)
            return false;
        gq_rule_scalars (rule)[i] = strtod (text, NULL);
    }
    gq_rule_set_steps (rule, steps);
    return true;
}

/* The state of the rule before the current one, if the file holds one. */
static gq_status
restore_retired (const gq_safetensors *file, gq_core *core, gq_error *error)
{
    const char *text = gq_safetensors_meta (file, GQ_RETIRED_NAME);
    gq_rule_state *state = &core->retired;
    if (text == NULL)
        return GQ_OK;
    json_t *json = json_loads (text, 0, NULL);
    gq_status status = gq_rule_state_from_json (state, json);
    json_decref (json);
    if (status != GQ_OK)
        gq_fail (error, status, "__metadata__ has no sound \"" GQ_RETIRED_NAME "\"");
    else if (gq_rule_state_allocate (state, core->layout.element_count, GQ_SLIDE) != GQ_OK)
        status = gq_fail (error, GQ_MEMORY, "no memory for the slots of rule %s", state->name);
    for (size_t i = 0; i < state->slot_count && status == GQ_OK; i++) {
        char prefix[GQ_CHECKPOINT_NAME_MAX - GQ_NAME_MAX];
        gq_checkpoint_retired_prefix (prefix, state, i);
        status = gather (file, &core->layout, prefix, state->slots[i], error);
    }
    if (status != GQ_OK)
        gq_rule_state_clear (state);
    return status;
}

/* Layout and weights of an opened file into the core. */
static gq_status
install (gq_core *core, const gq_safetensors *file, gq_layout *layout, uint64_t version,
         uint64_t applied, gq_error *error)
{
    gq_status status = find_parameters (file, layout, error);
    if (status != GQ_OK)
        return status;
    float *vector = malloc (layout->element_count * sizeof *vector);
    status = vector == NULL ? gq_fail (error, GQ_MEMORY, "out of memory")
                            : gather (file, layout, "", vector, error);
    if (status == GQ_OK && !gq_all_finite (vector, layout->element_count))
        status = gq_fail (error, GQ_INVALID, "its weights hold NaN or infinity");
    if (status == GQ_OK)
        status = gq_core_check_layout (core->rule, layout, error);
    if (status == GQ_OK && gq_core_set_layout (core, layout) != GQ_OK)
        status = gq_fail (error, GQ_MEMORY, "no memory for %" PRIu64 " parameters",
                          layout->element_count);
    if (status == GQ_OK)
        gq_core_set_weights (core, vector, version, applied);
    free (vector);
    return status;
}

static gq_status
meta_double (const gq_safetensors *file, const char *key, double *value, gq_error *error)
{
    const char *text = gq_safetensors_meta (file, key);
    char *end = NULL;
    if (text != NULL)
        *value = strtod (text, &end);
    if (end == NULL || end == text || *end != '\0')
        return gq_fail (error, GQ_MALFORMED, "__metadata__ has no number \"%s\"", key);
    return GQ_OK;
}

/* The step being aggregated. */
static gq_status
restore_held (const gq_safetensors *file, gq_core *core, uint64_t held, gq_error *error)
{
    if (held == 0)
        return GQ_OK;
    if (core->sum == NULL || held >= core->config.aggregate)
        return gq_fail (error, GQ_MALFORMED, "it holds a step that its settings do not allow");
    core->held = (uint32_t)held;
    return gather (file, &core->layout, GQ_HELD_NAME ".", core->sum, error);
}

static gq_status
restore_progress (const gq_safetensors *file, gq_core *core, gq_checkpoint_place *place,
                  gq_error *error)
{
    const char *text = gq_safetensors_meta (file, "ledger");
    uint64_t chain = 0;
    uint64_t held = 0;
    gq_status status = meta_number (file, "lsn", &place->lsn, error);
    if (status == GQ_OK)
        status = meta_number (file, "chain", &chain, error);
    if (status == GQ_OK)
        status = meta_number (file, "held", &held, error);
    if (status == GQ_OK)
        status = meta_double (file, "held_weight", &core->held_weight, error);
    if (status == GQ_OK)
        status = meta_double (file, "staleness_sum", &core->staleness_sum, error);
    if (status == GQ_OK)
        status = meta_number (file, "staleness_count", &core->staleness_count, error);
    if (status != GQ_OK)
        return status;
    place->chain = (uint32_t)chain;
    json_t *ledger = text == NULL ? NULL : json_loads (text, 0, NULL);
    status = gq_ledger_from_json (&core->ledger, ledger);
    json_decref (ledger);
    if (status != GQ_OK)
        return gq_fail (error, status, "__metadata__ has no sound \"ledger\"");
    return restore_held (file, core, held, error);
}

/* A verified file into the core. */
static gq_status
load_file (gq_core *core, const gq_safetensors *file, gq_checkpoint_place *place, gq_error *error)
{
    uint64_t version = 0;
    uint64_t applied = 0;
    gq_layout layout = {0};
    gq_status status = meta_number (file, "version", &version, error);
    if (status == GQ_OK)
        status = meta_number (file, "applied", &applied, error);
    if (status == GQ_OK)
        status = layout_from_meta (file, &layout, error);
    if (status == GQ_OK)
        status = install (core, file, &layout, version, applied, error);
    gq_layout_clear (&layout);
    if (status == GQ_OK && !restore_rule (file, core))
        status = gq_fail (error, GQ_MALFORMED,
                          "rule %s no longer has the slots and scalars that the checkpoint holds",
                          gq_rule_plugin (core->rule)->name);
    if (status == GQ_OK)
        status = restore_retired (file, core, error);
    return status == GQ_OK ? restore_progress (file, core, place, error) : status;
}

gq_status
gq_checkpoint_load (gq_core *core, const char *directory, uint64_t version_max,
                    gq_checkpoint_prepare *prepare, void *context, gq_checkpoint_place *place,
                    gq_error *error)
{
    uint64_t *versions;
    size_t count = gq_checkpoint_list (directory, &versions);
    gq_status status = gq_fail (error, GQ_NOTFOUND, "%s holds no checkpoint", directory);
    if (count > 0 && versions[count - 1] > version_max) /* newest first */
        gq_fail (error, GQ_NOTFOUND,
                 "version %" PRIu64 " is no longer kept: the oldest checkpoint in %s is of version "
                 "%" PRIu64 "; --journal keep and --checkpoints-kept keep more",
                 version_max, directory, versions[count - 1]);
    for (size_t i = 0; i < count; i++) {
        char path[PATH_MAX];
        gq_safetensors *file = NULL;
        if (versions[i] > version_max || !gq_checkpoint_path (path, directory, versions[i]))
            continue;
        status = gq_safetensors_read (&file, path, error);
        if (status == GQ_OK)
            status = verify (file, error);
        if (status == GQ_OK) {
            /* Sound bytes: what fails from here on would fail with an older one too. */
            status = prepare (context, core, gq_safetensors_meta (file, "life"), error);
            if (status == GQ_OK)
                status = load_file (core, file, place, error);
            gq_safetensors_free (&file);
            break;
        }
        gq_safetensors_free (&file);
        gq_log (GQ_LOG_ERROR, "checkpoint is damaged; trying the one before it", "path", "s", path,
                "message", "s", error->text, NULL);
        if (status == GQ_MEMORY)
            break;
        status = gq_fail (error, GQ_MALFORMED,
                          "no checkpoint in %s can be read; the log names what is wrong with each",
                          directory);
    }
    free (versions);
    return status;
}

/* Is a state file of the rule that is to go on with it? */
static gq_status
check_state_rule (const gq_safetensors *file, const gq_rule *rule, gq_error *error)
{
    const char *mine = gq_rule_plugin (rule)->name;
    const char *name = gq_safetensors_meta (file, "optimizer");
    if (name == NULL)
        return gq_fail (error, GQ_MALFORMED, "__metadata__ has no \"optimizer\"");
    if (strcmp (name, mine) != 0)
        return gq_fail (error, GQ_INVALID,
                        "it holds the state of rule %.60s, but the rule here is %s; choose "
                        "--optimizer %.60s, or take its weights alone (python3 -m gradq.convert "
                        "--weights-only)",
                        name, mine, name);
    return GQ_OK;
}

/* What another program has left of the rule: no hash vouches for it, so numbers are looked at. */
static gq_status
restore_state (const gq_safetensors *file, gq_core *core, gq_error *error)
{
    gq_rule *rule = core->rule;
    bool finite = true;
    if (!restore_rule (file, core))
        return gq_fail (error, GQ_MALFORMED,
                        "it does not hold every slot and scalar of rule %s, and its steps",
                        gq_rule_plugin (rule)->name);
    for (size_t i = 0; i < gq_rule_slot_count (rule); i++)
        finite = finite && gq_all_finite (gq_rule_slot (rule, i), core->layout.element_count);
    for (size_t i = 0; i < gq_rule_scalar_count (rule); i++)
        finite = finite && isfinite (gq_rule_scalars (rule)[i]);
    return finite ? GQ_OK
                  : gq_fail (error, GQ_INVALID, "its slots or scalars hold NaN or infinity");
}

gq_status
gq_checkpoint_init (gq_core *core, const char *path, gq_error *error)
{
    gq_safetensors *file = NULL;
    gq_layout layout = {0};
    gq_error reason = {""};
    gq_status status = gq_safetensors_read (&file, path, error);
    if (status != GQ_OK)
        return status;
    /* "layout" alone may be anybody's word: only our own formats mean ours. */
    const bool state = has_format (file, GQ_CHECKPOINT_STATE);
    if (state)
        status = check_state_rule (file, core->rule, &reason);
    else if (has_format (file, GQ_CHECKPOINT_FORMAT))
        status = verify (file, &reason);
    else
        status = layout_from_tensors (file, &layout, &reason);
    if (status == GQ_OK && layout.tensor_count == 0)
        status = layout_from_meta (file, &layout, &reason);
    if (status == GQ_OK)
        status = install (core, file, &layout, 0, 0, &reason);
    if (status == GQ_OK && state)
        status = restore_state (file, core, &reason);
    gq_layout_clear (&layout);
    gq_safetensors_free (&file);
    return status == GQ_OK ? GQ_OK
                           : gq_fail (error, status, "--init %s: %.800s", path, reason.text);
}
