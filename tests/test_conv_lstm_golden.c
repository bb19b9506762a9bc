/*
 * The pixel net against PyTorch's outputs and gradients (tests/data/golden).  The derivatives of
 * the loss by logits and values are computed here, so that nothing but the net is on trial.
 */
#include "actors/net.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "safetensors.h"

static void *
grab (size_t count, size_t size)
{
    void *memory = calloc (count > 0 ? count : 1, size);
    cr_assert_not_null (memory, "out of memory");
    return memory;
}

static gq_net *
make_net (gq_net_config config)
{
    gq_net *net = NULL;
    gq_error error = {""};
    cr_assert_eq (gq_net_conv_lstm.create (&net, &config, &error), GQ_OK, "%s", error.text);
    return net;
}

typedef struct golden {
    gq_safetensors *file;
    gq_net *net;
    size_t steps, actions, pixels;
    float *weights;
} golden;

static uint64_t
golden_size (const golden *gold, const char *name, uint32_t axis)
{
    const gq_tensor *tensor = gq_safetensors_find (gold->file, name);
    cr_assert_not_null (tensor, "the file has no %s", name);
    cr_assert_lt (axis, tensor->rank);
    return tensor->shape[axis];
}

static void
golden_copy (const golden *gold, const char *name, gq_dtype dtype, uint64_t count, void *out)
{
    gq_error error = {""};
    cr_assert_eq (gq_safetensors_copy (gold->file, name, dtype, count, out, &error), GQ_OK, "%s",
                  error.text);
}

static double
golden_number (const golden *gold, const char *key)
{
    const char *text = gq_safetensors_meta (gold->file, key);
    cr_assert_not_null (text, "the file's metadata has no %s", key);
    return strtod (text, NULL);
}

static golden
open_golden (const char *path)
{
    golden gold = {0};
    gq_error error = {""};
    cr_assert_eq (gq_safetensors_read (&gold.file, path, &error), GQ_OK, "%s", error.text);
    gq_net_config config = {.observation_rank = 3};
    for (uint32_t i = 0; i < 3; i++)
        config.observation_shape[i] = golden_size (&gold, "obs", i + 1);
    config.rollout_max = (uint32_t)golden_size (&gold, "obs", 0);
    config.action_count = (uint32_t)golden_size (&gold, "pi.weight", 0);
    config.hidden = (uint32_t)golden_size (&gold, "pi.weight", 1);
    config.filters = (uint32_t)golden_size (&gold, "conv1.weight", 0);
    gold.net = make_net (config);
    gold.steps = config.rollout_max, gold.actions = config.action_count;
    gold.pixels = (size_t)gq_safetensors_find (gold.file, "obs")->element_count / gold.steps;
    gold.weights = grab ((size_t)gold.net->element_count, sizeof *gold.weights);
    float *next = gold.weights;
    for (size_t i = 0; i < gold.net->tensor_count; i++) {
        const gq_tensor_shape *shape = &gold.net->tensors[i];
        const gq_tensor *tensor = gq_safetensors_find (gold.file, shape->name);
        cr_assert_not_null (tensor, "PyTorch's state_dict has no %s", shape->name);
        cr_assert_eq (tensor->rank, shape->rank, "%s", shape->name);
        for (uint32_t axis = 0; axis < shape->rank; axis++)
            cr_assert_eq (tensor->shape[axis], shape->shape[axis], "%s", shape->name);
        golden_copy (&gold, shape->name, GQ_DTYPE_F32, tensor->element_count, next);
        next += tensor->element_count;
    }
    cr_assert_eq ((size_t)(next - gold.weights), gold.net->element_count);
    return gold;
}

static void
close_golden (golden *gold)
{
    free (gold->weights);
    gold->net->ops->destroy (&gold->net);
    gq_safetensors_free (&gold->file);
}

/* golden/README.md: hold float32 to 1e-5 + 1e-4 relative. */
static void
check_golden (const golden *gold, const char *name, const float *got, size_t count)
{
    double *expected = grab (count, sizeof *expected);
    golden_copy (gold, name, GQ_DTYPE_F64, count, expected);
    for (size_t i = 0; i < count; i++)
        cr_expect_float_eq ((double)got[i], expected[i], 1e-5 + 1e-4 * fabs (expected[i]),
                            "%s[%zu]: %.9g, PyTorch %.9g", name, i, (double)got[i], expected[i]);
    free (expected);
}

/*
 * Derivatives of  -log p(a) advantage + value_weight * 0.5 (V - R)^2 - entropy_weight * entropy:
 *     d_logit[k] = (p[k] - [k = a]) advantage + entropy_weight * p[k] (log p[k] + entropy)
 */
static void
golden_derivatives (const golden *gold, float *d_logits, float *d_values)
{
    const size_t steps = gold->steps, actions = gold->actions;
    double *logits = grab (steps * actions, sizeof *logits),
           *values = grab (steps, sizeof (double));
    double *returns = grab (steps, sizeof (double)), *advantages = grab (steps, sizeof (double));
    int32_t *chosen = grab (steps, sizeof *chosen);
    golden_copy (gold, "logits", GQ_DTYPE_F64, steps * actions, logits);
    golden_copy (gold, "values", GQ_DTYPE_F64, steps, values);
    golden_copy (gold, "returns", GQ_DTYPE_F64, steps, returns);
    golden_copy (gold, "advantages", GQ_DTYPE_F64, steps, advantages);
    golden_copy (gold, "actions", GQ_DTYPE_I32, steps, chosen);
    const char *reduction = gq_safetensors_meta (gold->file, "reduction");
    cr_assert_not_null (reduction);
    const double share = strcmp (reduction, "mean") == 0 ? 1.0 / (double)steps : 1.0;
    const double value_weight = golden_number (gold, "value_weight");
    const double entropy_weight = golden_number (gold, "entropy_weight");
    for (size_t t = 0; t < steps; t++) {
        const double *row = logits + t * actions;
        double sum = 0.0, entropy = 0.0;
        for (size_t k = 0; k < actions; k++)
            sum += exp (row[k]);
        for (size_t k = 0; k < actions; k++)
            entropy -= exp (row[k]) / sum * (row[k] - log (sum));
        for (size_t k = 0; k < actions; k++) {
            double p = exp (row[k]) / sum, is_chosen = (size_t)chosen[t] == k ? 1.0 : 0.0;
            d_logits[t * actions + k] =
                (float)(share * ((p - is_chosen) * advantages[t] +
                                 entropy_weight * p * (row[k] - log (sum) + entropy)));
        }
        d_values[t] = (float)(share * value_weight * (values[t] - returns[t]));
    }
    free (logits), free (values), free (returns), free (advantages), free (chosen);
}

static void
golden_forward (golden *gold, float *logits, float *values)
{
    gq_net *net = gold->net;
    float *observations = grab (gold->steps * gold->pixels, sizeof *observations);
    float *h = grab (net->config.hidden, sizeof *h), *c = grab (net->config.hidden, sizeof *c);
    uint8_t *done = grab (gold->steps, 1);
    golden_copy (gold, "obs", GQ_DTYPE_F32, gold->steps * gold->pixels, observations);
    golden_copy (gold, "h0", GQ_DTYPE_F32, net->config.hidden, h);
    golden_copy (gold, "c0", GQ_DTYPE_F32, net->config.hidden, c);
    golden_copy (gold, "done", GQ_DTYPE_U8, gold->steps, done);
    net->ops->set_state (net, h, c);
    net->ops->begin (net);
    for (size_t t = 0; t < gold->steps; t++) {
        net->ops->step (net, gold->weights, observations + t * gold->pixels,
                        logits + t * gold->actions, values + t);
        if (done[t])
            net->ops->reset (net, 0);
    }
    free (observations), free (h), free (c), free (done);
}

static void
check_golden_file (const char *path)
{
    golden gold = open_golden (path);
    gq_net *net = gold.net;
    const size_t outputs = gold.steps * gold.actions;
    float *logits = grab (outputs, sizeof *logits), *values = grab (gold.steps, sizeof *values);
    float *d_logits = grab (outputs, sizeof *logits), *d_values = grab (gold.steps, sizeof *values);
    float *gradient = grab ((size_t)net->element_count, sizeof *gradient);
    golden_forward (&gold, logits, values);
    check_golden (&gold, "logits", logits, outputs);
    check_golden (&gold, "values", values, gold.steps);
    golden_derivatives (&gold, d_logits, d_values);
    net->ops->backward (net, gold.weights, d_logits, d_values, gradient);
    const float *next = gradient;
    for (size_t i = 0; i < net->tensor_count; i++) {
        char name[GQ_NAME_MAX + 8];
        snprintf (name, sizeof name, "grad.%s", net->tensors[i].name);
        const gq_tensor *tensor = gq_safetensors_find (gold.file, name);
        cr_assert_not_null (tensor, "the file has no %s", name);
        check_golden (&gold, name, next, (size_t)tensor->element_count);
        next += tensor->element_count;
    }
    free (logits), free (values), free (d_logits), free (d_values), free (gradient);
    close_golden (&gold);
}

Test (conv_lstm_golden, outputs_and_gradients_equal_pytorch)
{
    check_golden_file ("tests/data/golden/a3c_conv_lstm.safetensors");
}

Test (conv_lstm_golden, outputs_and_gradients_equal_pytorch_with_gae)
{
    check_golden_file ("tests/data/golden/a3c_conv_lstm_gae.safetensors");
}
