/*
 * The dense net: separate policy and value nets of two tanh layers each.  Step 0 of a gradient's
 * path.
 *
 *     pi = W (tanh (W2 (tanh (W1 x + b1)) + b2)) + b      and v likewise, with one output
 *
 * Parameters carry PyTorch's state_dict names, shapes (out, in) and order, so weights travel both
 * ways.  Must never write to the weights it is handed, and never allocate after creation.
 */
#include <assert.h>
#include <cblas.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "activation.h"
#include "net.h"

#define LAYERS       3
#define TENSOR_COUNT (2 * 2 * LAYERS)

/* One of the two nets: layer i maps sizes[i] to sizes[i + 1]. */
typedef struct dense_branch {
    size_t sizes[LAYERS + 1];
    size_t weight[LAYERS], bias[LAYERS]; /* offsets into the flat vector */
    float *hidden[LAYERS - 1];           /* (T K + 1, H): after tanh; the last row is peek's */
} dense_branch;

typedef struct dense_net {
    gq_net net;
    size_t inputs; /* I */
    size_t envs;   /* K */
    size_t kept;   /* rows since begin: K a step */
    const gq_activation *activation;
    float *observations;         /* (T K, I) */
    float *d_hidden[LAYERS - 1]; /* (T K, H): derivatives by what goes into the tanh */
    float *store;                /* all of the above in one piece */
    dense_branch policy, value;
} dense_net;

/* y[rows] = W (rows, columns) x[columns] + b[rows] */
static void
affine (const float *weight, const float *bias, const float *x, size_t rows, size_t columns,
        float *y)
{
    memcpy (y, bias, rows * sizeof *y);
    cblas_sgemv (CblasRowMajor, CblasNoTrans, (int)rows, (int)columns, 1, weight, (int)columns, x,
                 1, 1, y, 1);
}

/* output[outputs] of one observation[I]; hidden activations go into row `row`. */
static void
forward (const dense_net *self, const dense_branch *branch, const float *weights,
         const float *observation, size_t row, float *output)
{
    const float *x = observation;

    for (int i = 0; i < LAYERS; i++) {
        size_t rows = branch->sizes[i + 1], columns = branch->sizes[i];
        float *y = i < LAYERS - 1 ? branch->hidden[i] + row * rows : output;
        affine (weights + branch->weight[i], weights + branch->bias[i], x, rows, columns, y);
        if (i < LAYERS - 1)
            self->activation->tanh (rows, y);
        x = y;
    }
}

/* d[i] *= 1 - h[i]^2: through the tanh, from its output. */
static void
through_tanh (const float *restrict h, float *restrict d, size_t count)
{
    for (size_t i = 0; i < count; i++)
        d[i] *= 1 - h[i] * h[i];
}

/* sums[columns] = sum over rows of d (rows, columns) */
static void
sum_rows (const float *restrict d, size_t rows, size_t columns, float *restrict sums)
{
    memset (sums, 0, columns * sizeof *sums);
    for (size_t t = 0; t < rows; t++)
        for (size_t i = 0; i < columns; i++)
            sums[i] += d[t * columns + i];
}

/* Gradient of one branch from d_output (T K, outputs): down the layers, W' = d^T x, b' = sum d,
 * d_below = (d W) * (1 - h^2). */
static void
backward (const dense_net *self, const dense_branch *branch, const float *weights,
          const float *d_output, float *gradient)
{
    int steps = (int)self->kept;
    const float *d = d_output;

    for (int i = LAYERS; i-- > 0;) {
        int rows = (int)branch->sizes[i + 1], columns = (int)branch->sizes[i];
        const float *x = i > 0 ? branch->hidden[i - 1] : self->observations;
        cblas_sgemm (CblasRowMajor, CblasTrans, CblasNoTrans, rows, columns, steps, 1, d, rows, x,
                     columns, 0, gradient + branch->weight[i], columns);
        sum_rows (d, self->kept, branch->sizes[i + 1], gradient + branch->bias[i]);
        if (i > 0) {
            float *below = self->d_hidden[i - 1];
            cblas_sgemm (CblasRowMajor, CblasNoTrans, CblasNoTrans, steps, columns, rows, 1, d,
                         rows, weights + branch->weight[i], columns, 0, below, columns);
            through_tanh (x, below, self->kept * branch->sizes[i]);
            d = below;
        }
    }
}

static void
begin (gq_net *net)
{
    ((dense_net *)net)->kept = 0;
}

static void
step (gq_net *net, const float *weights, const float *observations, float *logits, float *values)
{
    dense_net *self = (dense_net *)net;
    const float *x = self->observations + self->kept * self->inputs;

    assert (self->kept < net->config.rollout_max * self->envs);
    memcpy (self->observations + self->kept * self->inputs, observations,
            self->envs * self->inputs * sizeof *observations);
    for (size_t k = 0; k < self->envs; k++, x += self->inputs, self->kept++) {
        forward (self, &self->policy, weights, x, self->kept,
                 logits + k * net->config.action_count);
        forward (self, &self->value, weights, x, self->kept, &values[k]);
    }
}

static float
peek (gq_net *net, const float *weights, uint32_t k, const float *observation)
{
    dense_net *self = (dense_net *)net;
    float value;

    (void)k; /* no state of its own */
    forward (self, &self->value, weights, observation, net->config.rollout_max * self->envs,
             &value);
    return value;
}

static void
reset (gq_net *net, uint32_t k)
{
    (void)net, (void)k; /* no recurrent state */
}

static void
backward_both (gq_net *net, const float *weights, const float *d_logits, const float *d_values,
               float *gradient)
{
    dense_net *self = (dense_net *)net;

    if (self->kept == 0) { /* BLAS leaves C alone when a dimension is 0 */
        memset (gradient, 0, net->element_count * sizeof *gradient);
        return;
    }
    backward (self, &self->policy, weights, d_logits, gradient);
    backward (self, &self->value, weights, d_values, gradient);
}

/* PyTorch's nn.Linear: weight and bias uniform in +-1 / sqrt (fan in). */
static void
initialise_branch (const dense_branch *branch, gq_random *random, float *weights)
{
    for (int i = 0; i < LAYERS; i++) {
        double bound = 1 / sqrt ((double)branch->sizes[i]);
        size_t weight_count = branch->sizes[i] * branch->sizes[i + 1];
        for (size_t j = 0; j < weight_count; j++)
            weights[branch->weight[i] + j] = (float)(bound * (2 * gq_random_uniform (random) - 1));
        for (size_t j = 0; j < branch->sizes[i + 1]; j++)
            weights[branch->bias[i] + j] = (float)(bound * (2 * gq_random_uniform (random) - 1));
    }
}

static void
initialise (const gq_net *net, uint64_t seed, float *weights)
{
    const dense_net *self = (const dense_net *)net;
    gq_random random;

    gq_random_seed (&random, seed);
    initialise_branch (&self->policy, &random, weights);
    initialise_branch (&self->value, &random, weights);
}

/* Name the tensors of one branch and give them their offsets from net->element_count on. */
static void
lay_out (gq_net *net, dense_branch *branch, const char *prefix, size_t inputs, size_t outputs)
{
    size_t hidden = net->config.hidden;
    size_t sizes[LAYERS + 1] = {inputs, hidden, hidden, outputs};

    memcpy (branch->sizes, sizes, sizeof sizes);
    for (int i = 0; i < LAYERS; i++) {
        char layer[8];
        snprintf (layer, sizeof layer, i < LAYERS - 1 ? "%s%d" : "%s", prefix, i + 1);
        gq_tensor_shape *weight = &net->tensors[net->tensor_count++];
        snprintf (weight->name, sizeof weight->name, "%s.weight", layer);
        weight->rank = 2, weight->shape[0] = sizes[i + 1], weight->shape[1] = sizes[i];
        gq_tensor_shape *bias = &net->tensors[net->tensor_count++];
        snprintf (bias->name, sizeof bias->name, "%s.bias", layer);
        bias->rank = 1, bias->shape[0] = sizes[i + 1];
        branch->weight[i] = net->element_count;
        branch->bias[i] = branch->weight[i] + sizes[i] * sizes[i + 1];
        net->element_count = branch->bias[i] + sizes[i + 1];
    }
}

static void
destroy (gq_net **net_p)
{
    dense_net *self = (dense_net *)*net_p;

    if (self == NULL)
        return;
    free (self->net.tensors);
    free (self->store);
    free (self);
    *net_p = NULL;
}

/* Carve all activations out of one allocation.  false: out of memory. */
static bool
allocate (dense_net *self)
{
    size_t steps = self->net.config.rollout_max * self->envs, hidden = self->net.config.hidden;
    size_t layer = (steps + 1) * hidden;
    dense_branch *branches[2] = {&self->policy, &self->value};

    self->store = calloc (steps * self->inputs + 3 * (LAYERS - 1) * layer, sizeof *self->store);
    if (self->store == NULL)
        return false;
    float *next = self->store;
    self->observations = next, next += steps * self->inputs;
    for (int i = 0; i < LAYERS - 1; i++) {
        for (int b = 0; b < 2; b++)
            branches[b]->hidden[i] = next, next += layer;
        self->d_hidden[i] = next, next += layer;
    }
    return true;
}

static gq_status
create (gq_net **net_p, const gq_net_config *config, gq_error *error)
{
    uint64_t inputs = 1;

    *net_p = NULL;
    for (uint32_t i = 0; i < config->observation_rank; i++)
        if (config->observation_shape[i] == 0 ||
            (inputs *= config->observation_shape[i]) > GQ_PARAMETERS_MAX)
            return gq_fail (error, GQ_INVALID,
                            "the dense net cannot take this observation: "
                            "dimension %u makes it empty or too large",
                            i);
    /* Bounded before they are multiplied; the sum of all is then within 64 bits. */
    uint64_t hidden = config->hidden, actions = config->action_count;
    if (hidden == 0 || hidden > 65536 || actions == 0 || actions > 65536 ||
        2 * hidden * (inputs + hidden + actions) > GQ_PARAMETERS_MAX)
        return gq_fail (error, GQ_INVALID,
                        "a dense net of %llu inputs, %llu hidden units and %llu actions is empty "
                        "or exceeds %llu parameters; lower --hidden",
                        (unsigned long long)inputs, (unsigned long long)hidden,
                        (unsigned long long)actions, (unsigned long long)GQ_PARAMETERS_MAX);
    dense_net *self = calloc (1, sizeof *self);
    if (self == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory for the dense net");
    self->net.ops = &gq_net_dense;
    self->net.config = *config;
    self->inputs = inputs;
    self->envs = config->env_count > 0 ? config->env_count : 1;
    self->activation = gq_activation_pick ();
    self->net.tensors = calloc (TENSOR_COUNT, sizeof *self->net.tensors);
    *net_p = &self->net;
    if (self->net.tensors == NULL || !allocate (self)) {
        destroy (net_p);
        return gq_fail (error, GQ_MEMORY, "out of memory for the dense net");
    }
    lay_out (&self->net, &self->policy, "pi", inputs, actions);
    lay_out (&self->net, &self->value, "v", inputs, 1);
    return GQ_OK;
}

const gq_net_ops gq_net_dense = {
    .name = "dense",
    .create = create,
    .destroy = destroy,
    .initialise = initialise,
    .begin = begin,
    .step = step,
    .peek = peek,
    .reset = reset,
    .backward = backward_both,
    .set_state = NULL,
};
