/*
 * The job --gradients: loss and gradients of a recorded rollout, to compare with another
 * implementation's.  Step 0 of a gradient's path.
 *
 * Must never compute anything itself: net and loss are the ones that training uses, or the
 * comparison would prove nothing about them.
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "jobs.h"

/* A rollout in a file longer than this is a mistake: rollouts hold 4,096 steps at most. */
#define STEPS_MAX 65536

typedef struct work {
    gq_safetensors *file;
    gq_net *net;
    gq_a3c_config loss;
    size_t steps, actions, inputs;               /* T, A, I */
    float *observations;                         /* (T, I) */
    float *logits, *d_logits;                    /* (T, A) */
    float *values, *d_values, *rewards, *beyond; /* (T) */
    int32_t *chosen;                             /* (T) */
    uint8_t *done;                               /* (T) */
    double *returns, *advantages;                /* (T) */
    float *weights, *gradient;                   /* [element_count] */
    float bootstrap;
} work;

static void
clear (work *w)
{
    void *arrays[] = {w->observations, w->logits,  w->d_logits, w->values, w->d_values,
                      w->rewards,      w->beyond,  w->chosen,   w->done,   w->returns,
                      w->advantages,   w->weights, w->gradient};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++)
        free (arrays[i]);
    if (w->net != NULL)
        w->net->ops->destroy (&w->net);
    gq_safetensors_free (&w->file);
}

/* A number of __metadata__ in [0, most]. */
static gq_status
read_number (const gq_safetensors *file, const char *key, double most, double *value,
             gq_error *error)
{
    const char *text = gq_safetensors_meta (file, key);
    char *end = NULL;

    if (text == NULL)
        return gq_fail (error, GQ_NOTFOUND, "__metadata__ has no '%s'", key);
    *value = strtod (text, &end);
    if (end == text || *end != '\0' || !(*value >= 0 && *value <= most))
        return gq_fail (error, GQ_INVALID, "__metadata__ '%s' is '%.40s': not a number in 0 .. %g",
                        key, text, most);
    return GQ_OK;
}

static gq_status
read_loss (work *w, gq_error *error)
{
    const char *reduction = gq_safetensors_meta (w->file, "reduction");
    gq_status status = read_number (w->file, "gamma", 1, &w->loss.gamma, error);

    if (status == GQ_OK)
        status = read_number (w->file, "lambda", 1, &w->loss.lambda, error);
    if (status == GQ_OK)
        status = read_number (w->file, "value_weight", 1e6, &w->loss.value_weight, error);
    if (status == GQ_OK)
        status = read_number (w->file, "entropy_weight", 1e6, &w->loss.entropy_weight, error);
    if (status != GQ_OK)
        return status;
    if (reduction == NULL || (strcmp (reduction, "mean") != 0 && strcmp (reduction, "sum") != 0))
        return gq_fail (error, GQ_INVALID, "__metadata__ 'reduction' must be 'mean' or 'sum'");
    w->loss.mean = strcmp (reduction, "mean") == 0;
    return GQ_OK;
}

/* Create the net that the shapes of obs and of the parameters describe. */
static gq_status
make_net (work *w, const gq_net_ops *ops, gq_error *error)
{
    const gq_tensor *obs = gq_safetensors_find (w->file, "obs");
    gq_net_config config = {0};

    if (obs == NULL)
        return gq_fail (error, GQ_NOTFOUND, "the file has no tensor 'obs'");
    if (obs->rank < 2 || obs->element_count == 0 || obs->shape[0] > STEPS_MAX)
        return gq_fail (error, GQ_INVALID,
                        "'obs' must be (steps, ...) with 1 to %d steps of at least one number",
                        STEPS_MAX);
    w->steps = obs->shape[0];
    w->inputs = obs->element_count / obs->shape[0];
    config.rollout_max = (uint32_t)obs->shape[0];
    config.observation_rank = obs->rank - 1;
    memcpy (config.observation_shape, obs->shape + 1, (obs->rank - 1) * sizeof obs->shape[0]);
    gq_status status = gq_net_sizes (&config, ops, w->file, error);
    if (status == GQ_OK)
        status = ops->create (&w->net, &config, error);
    w->actions = config.action_count;
    return status;
}

static gq_status
allocate (work *w, gq_error *error)
{
    size_t steps = w->steps, parameters = w->net->element_count;

    w->observations = calloc (steps * w->inputs, sizeof *w->observations);
    w->logits = calloc (steps * w->actions, sizeof *w->logits);
    w->d_logits = calloc (steps * w->actions, sizeof *w->d_logits);
    w->values = calloc (steps, sizeof *w->values);
    w->d_values = calloc (steps, sizeof *w->d_values);
    w->rewards = calloc (steps, sizeof *w->rewards);
    w->beyond = calloc (steps, sizeof *w->beyond);
    w->chosen = calloc (steps, sizeof *w->chosen);
    w->done = calloc (steps, sizeof *w->done);
    w->returns = calloc (steps, sizeof *w->returns);
    w->advantages = calloc (steps, sizeof *w->advantages);
    w->weights = calloc (parameters, sizeof *w->weights);
    w->gradient = calloc (parameters, sizeof *w->gradient);
    if (w->observations && w->logits && w->d_logits && w->values && w->d_values && w->rewards &&
        w->beyond && w->chosen && w->done && w->returns && w->advantages && w->weights &&
        w->gradient)
        return GQ_OK;
    return gq_fail (error, GQ_MEMORY, "out of memory for a rollout of %zu steps", steps);
}

/* The recurrent state at the start, for nets that have one and files that give it. */
static gq_status
read_state (work *w, gq_error *error)
{
    const gq_tensor *h = gq_safetensors_find (w->file, "h0");
    size_t hidden = w->net->config.hidden;

    if (w->net->ops->set_state == NULL || h == NULL)
        return GQ_OK;
    float *state = calloc (2 * hidden, sizeof *state);
    if (state == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory for the recurrent state");
    gq_status status = gq_safetensors_copy (w->file, "h0", GQ_DTYPE_F32, hidden, state, error);
    if (status == GQ_OK)
        status = gq_safetensors_copy (w->file, "c0", GQ_DTYPE_F32, hidden, state + hidden, error);
    if (status == GQ_OK)
        w->net->ops->set_state (w->net, state, state + hidden);
    free (state);
    return status;
}

static gq_status
read_rollout (work *w, gq_error *error)
{
    gq_status status = gq_net_read (w->net, w->file, w->weights, error);

    if (status == GQ_OK)
        status = gq_safetensors_copy (w->file, "obs", GQ_DTYPE_F32, w->steps * w->inputs,
                                      w->observations, error);
    if (status == GQ_OK)
        status = gq_safetensors_copy (w->file, "actions", GQ_DTYPE_I32, w->steps, w->chosen, error);
    if (status == GQ_OK)
        status =
            gq_safetensors_copy (w->file, "rewards", GQ_DTYPE_F32, w->steps, w->rewards, error);
    if (status == GQ_OK)
        status = gq_safetensors_copy (w->file, "done", GQ_DTYPE_U8, w->steps, w->done, error);
    if (status == GQ_OK)
        status = gq_safetensors_copy (w->file, "bootstrap", GQ_DTYPE_F32, 1, &w->bootstrap, error);
    if (status == GQ_OK)
        status = read_state (w, error);
    for (size_t t = 0; status == GQ_OK && t < w->steps; t++)
        if (w->chosen[t] < 0 || (size_t)w->chosen[t] >= w->actions)
            status = gq_fail (error, GQ_INVALID, "actions[%zu] is %" PRId32 ", not in 0 .. %zu", t,
                              w->chosen[t], w->actions - 1);
    return status;
}

static gq_a3c_loss
compute (work *w)
{
    const gq_net_ops *ops = w->net->ops;
    gq_a3c_steps steps = {.step_count = w->steps,
                          .env_count = 1,
                          .action_count = (uint32_t)w->actions,
                          .logits = w->logits,
                          .values = w->values,
                          .actions = w->chosen,
                          .rewards = w->rewards,
                          .cut = w->done,
                          .beyond = w->beyond};

    ops->begin (w->net);
    for (size_t t = 0; t < w->steps; t++) {
        ops->step (w->net, w->weights, w->observations + t * w->inputs, w->logits + t * w->actions,
                   &w->values[t]);
        if (w->done[t])
            ops->reset (w->net, 0);
    }
    /* The file knows terminations only: beyond[t] stays 0 but after the last step. */
    if (!w->done[w->steps - 1])
        w->beyond[w->steps - 1] = w->bootstrap;
    gq_a3c_returns (&w->loss, &steps, w->returns, w->advantages);
    gq_a3c_loss loss = gq_a3c_differentiate (&w->loss, &steps, w->returns, w->advantages,
                                             w->d_logits, w->d_values);
    ops->backward (w->net, w->weights, w->d_logits, w->d_values, w->gradient);
    return loss;
}

static gq_status
write_out (const work *w, const gq_a3c_loss *loss, const char *path, gq_error *error)
{
    double norm = 0;
    for (size_t i = 0; i < w->net->element_count; i++)
        norm += (double)w->gradient[i] * (double)w->gradient[i];
    norm = sqrt (norm);

    const double *numbers[] = {&loss->total, &loss->policy, &loss->value, &loss->entropy, &norm};
    static const char *const names[] = {"loss", "policy_loss", "value_loss", "entropy",
                                        "grad_norm"};
    enum { NUMBERS = sizeof names / sizeof names[0] };
    size_t parameters = w->net->tensor_count;
    gq_tensor *tensors = calloc (parameters + NUMBERS, sizeof *tensors);
    char (*labels)[GQ_NAME_MAX + 8] = calloc (parameters, sizeof *labels);
    gq_status status = GQ_MEMORY;

    if (tensors == NULL || labels == NULL)
        gq_fail (error, GQ_MEMORY, "out of memory for the results");
    else {
        for (size_t i = 0; i < NUMBERS; i++)
            tensors[i] = (gq_tensor){.name = names[i],
                                     .dtype = GQ_DTYPE_F64,
                                     .rank = 1,
                                     .shape = {1},
                                     .element_count = 1,
                                     .data = numbers[i],
                                     .bytes = sizeof (double)};
        const float *next = w->gradient;
        for (size_t i = 0; i < parameters; i++) {
            const gq_tensor_shape *shape = &w->net->tensors[i];
            gq_tensor *tensor = &tensors[NUMBERS + i];
            snprintf (labels[i], sizeof labels[i], "grad.%s", shape->name);
            *tensor = (gq_tensor){.name = labels[i],
                                  .dtype = GQ_DTYPE_F32,
                                  .rank = shape->rank,
                                  .element_count = 1,
                                  .data = next};
            memcpy (tensor->shape, shape->shape, sizeof tensor->shape);
            for (uint32_t axis = 0; axis < shape->rank; axis++)
                tensor->element_count *= shape->shape[axis];
            tensor->bytes = tensor->element_count * sizeof *next;
            next += tensor->element_count;
        }
        status = gq_safetensors_write (path, tensors, NUMBERS + parameters, NULL, 0, error);
    }
    free (labels);
    free (tensors);
    return status;
}

gq_status
gq_job_gradients (const char *net_name, const char *in, const char *out, gq_error *error)
{
    work w = {0};
    gq_error reason = {""};
    gq_status status = gq_safetensors_read (&w.file, in, error);

    if (status != GQ_OK)
        return status; /* names the path itself */
    status = read_loss (&w, &reason);
    if (status == GQ_OK)
        status = make_net (&w, gq_net_named (net_name), &reason);
    if (status == GQ_OK)
        status = allocate (&w, &reason);
    if (status == GQ_OK)
        status = read_rollout (&w, &reason);
    if (status != GQ_OK)
        gq_fail (error, status, "%.200s: %.700s", in, reason.text);
    else {
        gq_a3c_loss loss = compute (&w);
        status = write_out (&w, &loss, out, error);
    }
    clear (&w);
    return status;
}
