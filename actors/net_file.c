/*
 * A net's parameters out of a safetensors file.  Step 0 of a gradient's path.
 *
 * Must never trust the file: shapes are compared before anything is copied.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "jobs.h"

/* shape[axis] of tensor `name`, which must have `rank` axes, each within 32 bits. */
static gq_status
read_size (const gq_safetensors *file, const char *name, uint32_t rank, uint32_t axis,
           uint32_t *size, gq_error *error)
{
    const gq_tensor *tensor = gq_safetensors_find (file, name);

    if (tensor == NULL)
        return gq_fail (error, GQ_NOTFOUND,
                        "the file has no tensor '%s': it is not of this net; try another --net",
                        name);
    if (tensor->rank != rank || tensor->shape[axis] == 0 || tensor->shape[axis] > INT32_MAX)
        return gq_fail (error, GQ_INVALID,
                        "tensor '%s' has %" PRIu32 " dimensions, or one that is 0 or huge; "
                        "expected are %" PRIu32 " dimensions",
                        name, tensor->rank, rank);
    *size = (uint32_t)tensor->shape[axis];
    return GQ_OK;
}

gq_status
gq_net_sizes (gq_net_config *config, const gq_net_ops *ops, const gq_safetensors *file,
              gq_error *error)
{
    gq_status status = read_size (file, "pi.weight", 2, 0, &config->action_count, error);

    if (status == GQ_OK && ops == &gq_net_dense)
        return read_size (file, "pi1.weight", 2, 0, &config->hidden, error);
    if (status == GQ_OK)
        status = read_size (file, "lstm.weight_hh", 2, 1, &config->hidden, error);
    if (status == GQ_OK)
        status = read_size (file, "conv1.weight", 4, 0, &config->filters, error);
    return status;
}

/* "(64, 4)" */
static const char *
shape_text (uint32_t rank, const uint64_t *shape, char *text, size_t size)
{
    size_t used = 0;

    snprintf (text, size, "()");
    for (uint32_t i = 0; i < rank && used < size; i++)
        used += (size_t)snprintf (text + used, size - used, "%s%" PRIu64 "%s", i ? ", " : "(",
                                  shape[i], i + 1 == rank ? ")" : "");
    return text;
}

gq_status
gq_net_read (const gq_net *net, const gq_safetensors *file, float *weights, gq_error *error)
{
    for (size_t i = 0; i < net->tensor_count; i++) {
        const gq_tensor_shape *expected = &net->tensors[i];
        const gq_tensor *found = gq_safetensors_find (file, expected->name);
        char is[200], should[200];

        if (found == NULL)
            return gq_fail (error, GQ_NOTFOUND,
                            "the file has no tensor '%s': it is not of this net; try another --net",
                            expected->name);
        uint64_t count = 1;
        bool same = found->rank == expected->rank;
        for (uint32_t axis = 0; axis < expected->rank; axis++) {
            same = same && found->shape[axis] == expected->shape[axis];
            count *= expected->shape[axis];
        }
        if (!same)
            return gq_fail (error, GQ_INVALID,
                            "tensor '%s' has shape %s where this environment and net need %s",
                            expected->name, shape_text (found->rank, found->shape, is, sizeof is),
                            shape_text (expected->rank, expected->shape, should, sizeof should));
        gq_status status =
            gq_safetensors_copy (file, found->name, GQ_DTYPE_F32, count, weights, error);
        if (status != GQ_OK)
            return status;
        weights += count;
    }
    return GQ_OK;
}
