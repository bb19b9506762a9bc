/*
 * Parameter layout: which tensors stand where in the flat vector, and a digest of that, which
 * travels in every header so that a gradient for another model is refused with a reason.
 */
#include "layout.h"

#include <stdlib.h>
#include <string.h>

#define XXH_STATIC_LINKING_ONLY /* XXH64_state_t on the stack */
#include <xxhash.h>

uint64_t
gq_tensor_elements (const gq_tensor_shape *tensor)
{
    uint64_t elements = 1;
    for (uint32_t i = 0; i < tensor->rank; i++)
        elements *= tensor->shape[i];
    return elements;
}

/* Name, rank and shape within bounds; *elements: the product, without overflow. */
static gq_status
check_tensor (const gq_tensor_shape *tensor, uint64_t *elements, gq_error *error)
{
    size_t length = strnlen (tensor->name, GQ_NAME_MAX);
    if (length == 0 || length == GQ_NAME_MAX)
        return gq_fail (error, GQ_INVALID, "layout: a tensor's name must have 1 to %d bytes",
                        GQ_NAME_MAX - 1);
    /* JSON carries names, safetensors keys them beside its own "__metadata__". */
    json_t *text = json_string (tensor->name);
    bool usable = text != NULL && strcmp (tensor->name, "__metadata__") != 0;
    json_decref (text);
    if (!usable)
        return gq_fail (error, GQ_INVALID,
                        "layout: a tensor's name must be UTF-8 and not __metadata__");
    if (tensor->rank > GQ_RANK_MAX)
        return gq_fail (error, GQ_INVALID,
                        "layout: tensor %s has %u dimensions, at most %d are "
                        "allowed",
                        tensor->name, tensor->rank, GQ_RANK_MAX);
    *elements = 1;
    for (uint32_t i = 0; i < tensor->rank; i++) {
        if (tensor->shape[i] == 0 || tensor->shape[i] > GQ_PARAMETERS_MAX / *elements)
            return gq_fail (error, GQ_INVALID,
                            "layout: tensor %s has no elements or more than "
                            "%llu",
                            tensor->name, (unsigned long long)GQ_PARAMETERS_MAX);
        *elements *= tensor->shape[i];
    }
    return GQ_OK;
}

static int
compare_names (const void *a, const void *b)
{
    const gq_tensor_shape *const *left = a;
    const gq_tensor_shape *const *right = b;
    return strcmp ((*left)->name, (*right)->name);
}

static gq_status
check_unique (const gq_tensor_shape *tensors, size_t count, gq_error *error)
{
    const gq_tensor_shape **sorted = malloc (count * sizeof *sorted);
    if (sorted == NULL)
        return gq_fail (error, GQ_MEMORY, "layout: out of memory");
    for (size_t i = 0; i < count; i++)
        sorted[i] = &tensors[i];
    qsort (sorted, count, sizeof *sorted, compare_names);
    gq_status status = GQ_OK;
    for (size_t i = 1; i < count && status == GQ_OK; i++)
        if (strcmp (sorted[i - 1]->name, sorted[i]->name) == 0)
            status =
                gq_fail (error, GQ_INVALID, "layout: two tensors are called %s", sorted[i]->name);
    free (sorted);
    return status;
}

/*
 * Canonical text, hashed as it is made: for each tensor its name, a NUL, its rank and then its
 * dimensions, each as an unsigned 64-bit little-endian number.
 */
static uint64_t
digest_of (const gq_tensor_shape *tensors, size_t count)
{
    XXH64_state_t state;
    XXH64_reset (&state, 0);
    for (size_t i = 0; i < count; i++) {
        const gq_tensor_shape *tensor = &tensors[i];
        uint64_t rank = tensor->rank;
        XXH64_update (&state, tensor->name, strlen (tensor->name) + 1);
        XXH64_update (&state, &rank, sizeof rank);
        XXH64_update (&state, tensor->shape, rank * sizeof tensor->shape[0]);
    }
    return XXH64_digest (&state);
}

gq_status
gq_layout_init (gq_layout *layout, const gq_tensor_shape *tensors, size_t count, gq_error *error)
{
    if (count == 0 || count > GQ_TENSORS_MAX)
        return gq_fail (error, GQ_INVALID, "layout: %zu tensors given, 1 to %d are allowed", count,
                        GQ_TENSORS_MAX);
    uint64_t total = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t elements = 0;
        gq_status status = check_tensor (&tensors[i], &elements, error);
        if (status != GQ_OK)
            return status;
        total += elements;
    }
    if (total > GQ_PARAMETERS_MAX)
        return gq_fail (error, GQ_INVALID, "layout: %llu elements in all, at most %llu are allowed",
                        (unsigned long long)total, (unsigned long long)GQ_PARAMETERS_MAX);
    gq_status status = check_unique (tensors, count, error);
    if (status != GQ_OK)
        return status;
    gq_tensor_shape *copy = calloc (count, sizeof *copy);
    if (copy == NULL)
        return gq_fail (error, GQ_MEMORY, "layout: out of memory");
    memcpy (copy, tensors, count * sizeof *copy);
    *layout = (gq_layout){.tensors = copy,
                          .tensor_count = count,
                          .element_count = total,
                          .digest = digest_of (copy, count)};
    return GQ_OK;
}

void
gq_layout_clear (gq_layout *layout)
{
    free (layout->tensors);
    *layout = (gq_layout){0};
}

json_t *
gq_layout_to_json (const gq_layout *layout)
{
    json_t *list = json_array ();
    for (size_t i = 0; i < layout->tensor_count; i++) {
        const gq_tensor_shape *tensor = &layout->tensors[i];
        json_t *shape = json_array ();
        for (uint32_t k = 0; k < tensor->rank; k++)
            json_array_append_new (shape, json_integer ((json_int_t)tensor->shape[k]));
        json_t *entry = json_pack ("{s:s, s:o}", "name", tensor->name, "shape", shape);
        if (entry == NULL || json_array_append_new (list, entry) != 0) {
            json_decref (list);
            return NULL;
        }
    }
    return list;
}

/* One {"name": ..., "shape": [...]}. */
static gq_status
tensor_from_json (gq_tensor_shape *tensor, const json_t *json, gq_error *error)
{
    const char *name = json_string_value (json_object_get (json, "name"));
    const json_t *shape = json_object_get (json, "shape");
    if (name == NULL || !json_is_array (shape))
        return gq_fail (error, GQ_INVALID,
                        "layout: each tensor needs a \"name\" string and a \"shape\" array");
    size_t length = strlen (name);
    if (length >= GQ_NAME_MAX)
        return gq_fail (error, GQ_INVALID, "layout: tensor name of %zu bytes, at most %d", length,
                        GQ_NAME_MAX - 1);
    if (json_array_size (shape) > GQ_RANK_MAX)
        return gq_fail (error, GQ_INVALID, "layout: tensor %s has %zu dimensions, at most %d", name,
                        json_array_size (shape), GQ_RANK_MAX);
    memcpy (tensor->name, name, length + 1);
    tensor->rank = (uint32_t)json_array_size (shape);
    for (uint32_t i = 0; i < tensor->rank; i++) {
        const json_t *size = json_array_get (shape, i);
        if (!json_is_integer (size) || json_integer_value (size) < 1)
            return gq_fail (error, GQ_INVALID, "layout: tensor %s: a shape holds integers >= 1",
                            name);
        tensor->shape[i] = (uint64_t)json_integer_value (size);
    }
    return GQ_OK;
}

gq_status
gq_layout_from_json (gq_layout *layout, const json_t *json, gq_error *error)
{
    size_t count = json_array_size (json); /* 0 for anything but an array */
    if (count == 0 || count > GQ_TENSORS_MAX)
        return gq_fail (error, GQ_INVALID, "layout: an array of 1 to %d tensors is needed",
                        GQ_TENSORS_MAX);
    gq_tensor_shape *tensors = calloc (count, sizeof *tensors);
    if (tensors == NULL)
        return gq_fail (error, GQ_MEMORY, "layout: out of memory");
    gq_status status = GQ_OK;
    for (size_t i = 0; i < count && status == GQ_OK; i++)
        status = tensor_from_json (&tensors[i], json_array_get (json, i), error);
    if (status == GQ_OK)
        status = gq_layout_init (layout, tensors, count, error);
    free (tensors);
    return status;
}
