/*
 * The pixel net: four convolutions, an LSTM cell, a policy and a value head.  Step 0 of a
 * gradient's path.  It must never keep weights beyond a rollout, nor let a gradient cross an
 * episode's end.
 *
 *     observation (C, height, width)
 *     conv1..conv4   3x3, stride 2, padding 1, ELU       -> features in PyTorch's order (F, y, x)
 *     lstm           PyTorch's LSTMCell, gates i f g o   -> h (H)
 *     pi, v          linear                              -> logits (A), value
 *
 * (Mnih et al. 2016, arXiv:1602.01783, in the form of OpenAI's universe-starter-agent.)
 */
#include "net.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "activation.h"
#include "blas.h"
#include "conv.h"
#include "layout.h"
#include "lstm.h"

#define LAYERS          4
#define FILTERS_DEFAULT 32
/* Far beyond use (Atari frames are 3 x 210 x 160), and every product of sizes stays below 2^63. */
#define CHANNELS_MAX 1024
#define PIXELS_MAX   4096 /* a side */
#define UNITS_MAX    16384
#define ROLLOUT_MAX  65536 /* rows: steps of all environments */
/* Rows whose convolutions are differentiated together: bounds the scratch of long rollouts. */
#define BLOCK_MAX 32

/* Order of net->tensors: the convolutions' weight and bias pairs, then these. */
enum {
    WEIGHT_IH = 2 * LAYERS,
    WEIGHT_HH,
    BIAS_IH,
    BIAS_HH,
    PI_WEIGHT,
    PI_BIAS,
    V_WEIGHT,
    V_BIAS,
    TENSORS
};

typedef struct conv_lstm {
    gq_net base;
    gq_tensor_shape tensors[TENSORS];
    size_t offset[TENSORS];   /* of each tensor in the flat vector */
    size_t actions, filters;  /* A, F */
    size_t features, hidden;  /* P F of the last convolution, H */
    size_t envs, rows_max;    /* K, T K */
    size_t count;             /* rows kept: K a step */
    const float *packed_from; /* weights that the kernels were reordered from; NULL: stale */
    float *store;             /* every float array below, and the convolutions', lies in it */
    bool *ends;               /* [T K]: the state was replaced after this row */
    gq_conv convs[LAYERS];
    gq_conv_scratch scratch;
    gq_lstm lstm; /* row T K is peek's */
    float *last;  /* [max (K, 1), P F]: what the last convolution puts out */
} conv_lstm;

/* Reorder the kernels unless these weights' are there.  begin and backward make them stale, so that
 * weights which change in place between rollouts are seen. */
static void
pack (conv_lstm *net, const float *weights)
{
    if (net->packed_from == weights)
        return;
    for (size_t l = 0; l < LAYERS; l++)
        gq_conv_pack (&net->convs[l], weights + net->offset[2 * l]);
    net->packed_from = weights;
}

/* Observations to the features of `count` <= K rows from `slot` on. */
static void
convs_forward (conv_lstm *net, size_t slot, size_t count, const float *weights,
               const float *observations)
{
    const gq_conv *conv = net->convs;
    const size_t row = gq_conv_row (conv);
    for (size_t i = 0; i < count; i++) {
        float *image = conv->input + (slot + i) * conv->padded + gq_conv_inside (conv);
        for (size_t c = 0; c < conv->channels; c++)
            for (size_t y = 0; y < conv->height; y++)
                for (size_t x = 0; x < conv->width; x++)
                    image[y * row + x * conv->channels + c] = *observations++;
    }
    for (size_t l = 0; l + 1 < LAYERS; l++) {
        const gq_conv *next = &net->convs[l + 1];
        gq_conv_forward (&net->convs[l], &net->scratch, slot, count,
                         weights + net->offset[2 * l + 1],
                         next->input + slot * next->padded + gq_conv_inside (next),
                         gq_conv_row (next), next->padded);
    }
    conv = &net->convs[LAYERS - 1];
    gq_conv_forward (conv, &net->scratch, slot, count, weights + net->offset[2 * LAYERS - 1],
                     net->last, conv->out_width * net->filters, net->features);
    const float *last = net->last;
    for (size_t i = 0; i < count; i++) {
        float *x = net->lstm.x + (slot + i) * net->features;
        for (size_t place = 0; place < conv->places; place++)
            for (size_t f = 0; f < net->filters; f++)
                x[f * conv->places + place] = *last++;
    }
}

/* From d_x to the gradients of all kernels, and added to those of their biases. */
static void
convs_backward (conv_lstm *net, float *gradient)
{
    gq_conv *convs = net->convs, *last = &convs[LAYERS - 1];
    for (size_t l = 0; l < LAYERS; l++)
        memset (convs[l].d_kernels, 0, net->filters * convs[l].patch * sizeof (float));
    for (size_t first = 0; first < net->count; first += BLOCK_MAX) {
        size_t count = net->count - first < BLOCK_MAX ? net->count - first : BLOCK_MAX;
        for (size_t i = 0; i < count; i++) {
            float *d_rows = last->d_output + i * net->features, *d_x = net->scratch.rows;
            net->scratch.loops->elu_backward (net->features,
                                              net->lstm.x + (first + i) * net->features,
                                              net->lstm.d_x + (first + i) * net->features, d_x);
            for (size_t place = 0; place < last->places; place++)
                for (size_t f = 0; f < net->filters; f++)
                    d_rows[place * net->filters + f] = d_x[f * last->places + place];
        }
        for (size_t l = LAYERS; l-- > 0;)
            gq_conv_backward (&convs[l], &net->scratch, first, count,
                              gradient + net->offset[2 * l + 1],
                              l > 0 ? convs[l - 1].d_output : NULL);
    }
    for (size_t l = 0; l < LAYERS; l++)
        gq_conv_unpack (&convs[l], gradient + net->offset[2 * l]);
}

static gq_lstm_weights
lstm_weights (const conv_lstm *net, const float *weights)
{
    return (gq_lstm_weights){.ih = weights + net->offset[WEIGHT_IH],
                             .hh = weights + net->offset[WEIGHT_HH],
                             .bias_ih = weights + net->offset[BIAS_IH],
                             .bias_hh = weights + net->offset[BIAS_HH]};
}

/* The forward pass of environments first .. first + count - 1 into the rows from `slot` on, from
 * their current states, which stay. */
static void
forward (conv_lstm *net, size_t slot, size_t first, size_t count, const float *weights,
         const float *observations, float *values)
{
    pack (net, weights);
    convs_forward (net, slot, count, weights, observations);
    gq_lstm_weights cell = lstm_weights (net, weights);
    gq_lstm_forward (&net->lstm, slot, first, count, &cell);
    for (size_t i = 0; i < count; i++)
        values[i] = weights[net->offset[V_BIAS]];
    gq_multiply_vector (CblasNoTrans, count, net->hidden, net->lstm.h_out + slot * net->hidden,
                        weights + net->offset[V_WEIGHT], values);
}

static void
conv_lstm_begin (gq_net *base)
{
    conv_lstm *net = (conv_lstm *)base;
    net->count = 0;
    net->packed_from = NULL;
}

static void
conv_lstm_step (gq_net *base, const float *weights, const float *observations, float *logits,
                float *values)
{
    conv_lstm *net = (conv_lstm *)base;
    const size_t slot = net->count, envs = net->envs;
    assert (slot < net->rows_max);
    forward (net, slot, 0, envs, weights, observations, values);
    for (size_t k = 0; k < envs; k++)
        memcpy (logits + k * net->actions, weights + net->offset[PI_BIAS],
                net->actions * sizeof *logits);
    gq_multiply_rows (envs, net->actions, net->hidden, net->lstm.h_out + slot * net->hidden,
                      weights + net->offset[PI_WEIGHT], logits);
    gq_lstm_advance (&net->lstm, slot);
    memset (net->ends + slot, 0, envs * sizeof *net->ends);
    net->count += envs;
}

static float
conv_lstm_peek (gq_net *base, const float *weights, uint32_t k, const float *observation)
{
    conv_lstm *net = (conv_lstm *)base;
    float value;
    assert (k < net->envs);
    forward (net, net->rows_max, k, 1, weights, observation, &value);
    return value;
}

static void
conv_lstm_set_state (gq_net *base, const float *h, const float *c)
{
    conv_lstm *net = (conv_lstm *)base;
    const size_t floats = net->envs * net->hidden;
    memcpy (net->lstm.h, h, floats * sizeof *net->lstm.h);
    memcpy (net->lstm.c, c, floats * sizeof *net->lstm.c);
    for (size_t k = 0; k < net->envs && net->count > 0; k++)
        net->ends[net->count - 1 - k] = true;
}

static void
conv_lstm_reset (gq_net *base, uint32_t k)
{
    conv_lstm *net = (conv_lstm *)base;
    assert (k < net->envs);
    memset (net->lstm.h + k * net->hidden, 0, net->hidden * sizeof *net->lstm.h);
    memset (net->lstm.c + k * net->hidden, 0, net->hidden * sizeof *net->lstm.c);
    if (net->count > 0)
        net->ends[net->count - net->envs + k] = true;
}

static void
conv_lstm_backward (gq_net *base, const float *weights, const float *d_logits,
                    const float *d_values, float *gradient)
{
    conv_lstm *net = (conv_lstm *)base;
    gq_lstm *lstm = &net->lstm;
    const size_t count = net->count, hidden = net->hidden, actions = net->actions;
    if (count == 0) {
        memset (gradient, 0, base->element_count * sizeof *gradient);
        return;
    }
    /* Biases are added to step by step; everything else is overwritten as a whole. */
    for (size_t i = 0; i < TENSORS; i++)
        if (net->tensors[i].rank == 1)
            memset (gradient + net->offset[i], 0, net->tensors[i].shape[0] * sizeof *gradient);
    pack (net, weights);
    gq_multiply (CblasNoTrans, CblasNoTrans, count, hidden, actions, d_logits,
                 weights + net->offset[PI_WEIGHT], 0.0f, lstm->d_h);
    gq_multiply (CblasNoTrans, CblasNoTrans, count, hidden, 1, d_values,
                 weights + net->offset[V_WEIGHT], 1.0f, lstm->d_h);
    gq_multiply (CblasTrans, CblasNoTrans, actions, hidden, count, d_logits, lstm->h_out, 0.0f,
                 gradient + net->offset[PI_WEIGHT]);
    gq_multiply (CblasTrans, CblasNoTrans, 1, hidden, count, d_values, lstm->h_out, 0.0f,
                 gradient + net->offset[V_WEIGHT]);
    for (size_t t = 0; t < count; t++) {
        net->scratch.loops->add (actions, d_logits + t * actions, gradient + net->offset[PI_BIAS]);
        gradient[net->offset[V_BIAS]] += d_values[t];
    }
    gq_lstm_weights cell = lstm_weights (net, weights);
    gq_lstm_gradients d_cell = {.ih = gradient + net->offset[WEIGHT_IH],
                                .hh = gradient + net->offset[WEIGHT_HH],
                                .bias_ih = gradient + net->offset[BIAS_IH],
                                .bias_hh = gradient + net->offset[BIAS_HH]};
    gq_lstm_backward (lstm, count / net->envs, net->ends, &cell, &d_cell);
    convs_backward (net, gradient);
    net->packed_from = NULL;
}

static void
fill_uniform (gq_random *random, size_t n, double bound, float *out)
{
    for (size_t i = 0; i < n; i++)
        out[i] = (float)((2.0 * gq_random_uniform (random) - 1.0) * bound);
}

/* Rows of normal numbers, each scaled to Euclidean length `length`: "normalised columns" of the
 * transposed matrix in OpenAI's agent. */
static void
fill_normalised (gq_random *random, size_t rows, size_t columns, double length, float *out)
{
    for (size_t row = 0; row < rows; row++, out += columns) {
        double squares = 0.0;
        for (size_t i = 0; i < columns; i++) {
            out[i] = (float)gq_random_normal (random);
            squares += (double)out[i] * (double)out[i];
        }
        for (size_t i = 0; i < columns && squares > 0.0; i++)
            out[i] = (float)((double)out[i] * length / sqrt (squares));
    }
}

/*
 * Convolutions: uniform +-sqrt (6 / (fan_in + fan_out)), fans 9 C and 9 F (Glorot & Bengio 2010).
 * LSTM weights: uniform +-1 / sqrt (H), as PyTorch's LSTMCell; its biases zero, so that the two of
 * them are one parameter told twice and start alike.  Heads: rows of length 0.01 (policy: near
 * uniform at first) and 1 (value).  All biases zero.
 */
static void
conv_lstm_initialise (const gq_net *base, uint64_t seed, float *weights)
{
    const conv_lstm *net = (const conv_lstm *)base;
    gq_random random;
    gq_random_seed (&random, seed);
    memset (weights, 0, base->element_count * sizeof *weights);
    for (size_t l = 0; l < LAYERS; l++) {
        size_t patch = net->convs[l].patch;
        double fans = (double)patch + (double)(GQ_CONV_TAPS * net->filters);
        fill_uniform (&random, net->filters * patch, sqrt (6.0 / fans),
                      weights + net->offset[2 * l]);
    }
    double bound = 1.0 / sqrt ((double)net->hidden);
    fill_uniform (&random, 4 * net->hidden * net->features, bound,
                  weights + net->offset[WEIGHT_IH]);
    fill_uniform (&random, 4 * net->hidden * net->hidden, bound, weights + net->offset[WEIGHT_HH]);
    fill_normalised (&random, net->actions, net->hidden, 0.01, weights + net->offset[PI_WEIGHT]);
    fill_normalised (&random, 1, net->hidden, 1.0, weights + net->offset[V_WEIGHT]);
}

/* Name the next tensor of the flat vector; a zero ends its shape. */
static void
name_tensor (conv_lstm *net, size_t index, const char *name, const uint64_t shape[4])
{
    gq_tensor_shape *tensor = &net->tensors[index];
    snprintf (tensor->name, sizeof tensor->name, "%s", name);
    while (tensor->rank < 4 && shape[tensor->rank] > 0) {
        tensor->shape[tensor->rank] = shape[tensor->rank];
        tensor->rank++;
    }
    net->offset[index] = (size_t)net->base.element_count;
    net->base.element_count += gq_tensor_elements (tensor);
}

static void
name_tensors (conv_lstm *net)
{
    const uint64_t f = net->filters, h = net->hidden, a = net->actions;
    for (size_t l = 0; l < LAYERS; l++) {
        char name[32];
        snprintf (name, sizeof name, "conv%zu.weight", l + 1);
        name_tensor (net, 2 * l, name, (uint64_t[4]){f, net->convs[l].channels, 3, 3});
        snprintf (name, sizeof name, "conv%zu.bias", l + 1);
        name_tensor (net, 2 * l + 1, name, (uint64_t[4]){f});
    }
    name_tensor (net, WEIGHT_IH, "lstm.weight_ih", (uint64_t[4]){4 * h, net->features});
    name_tensor (net, WEIGHT_HH, "lstm.weight_hh", (uint64_t[4]){4 * h, h});
    name_tensor (net, BIAS_IH, "lstm.bias_ih", (uint64_t[4]){4 * h});
    name_tensor (net, BIAS_HH, "lstm.bias_hh", (uint64_t[4]){4 * h});
    name_tensor (net, PI_WEIGHT, "pi.weight", (uint64_t[4]){a, h});
    name_tensor (net, PI_BIAS, "pi.bias", (uint64_t[4]){a});
    name_tensor (net, V_WEIGHT, "v.weight", (uint64_t[4]){1, h});
    name_tensor (net, V_BIAS, "v.bias", (uint64_t[4]){1});
    net->base.tensors = net->tensors;
    net->base.tensor_count = TENSORS;
}

/* The next `count` floats of the store; a NULL store only measures.  Each array starts on a cache
 * line. */
static float *
carve (float *store, size_t *used, size_t count)
{
    float *array = store == NULL ? NULL : store + *used;
    *used += (count + 15) / 16 * 16;
    return array;
}

static size_t
larger (size_t a, size_t b)
{
    return a > b ? a : b;
}

/* Give every array its place in the store; answers the floats needed. */
static size_t
place_arrays (conv_lstm *net, float *store)
{
    const size_t steps = net->rows_max, hidden = net->hidden, envs = net->envs;
    const size_t block = steps < BLOCK_MAX ? steps : BLOCK_MAX;
    size_t used = 0, patches = 0, rows = 0, padded = 0;
    for (size_t l = 0; l < LAYERS; l++) {
        gq_conv *conv = &net->convs[l];
        conv->input = carve (store, &used, (steps + 1) * conv->padded);
        conv->kernels = carve (store, &used, conv->filters * conv->patch);
        conv->columns = carve (store, &used, conv->filters * conv->patch);
        conv->d_kernels = carve (store, &used, conv->filters * conv->patch);
        conv->d_output = carve (store, &used, block * conv->places * conv->filters);
        patches = larger (patches, conv->batch * conv->places * conv->patch);
        rows = larger (rows, conv->batch * conv->places * conv->filters);
        padded = larger (padded, conv->padded);
    }
    net->scratch.patches = carve (store, &used, patches);
    net->scratch.rows = carve (store, &used, rows);
    net->scratch.d_image = carve (store, &used, padded);
    net->lstm.x = carve (store, &used, (steps + 1) * net->features);
    net->lstm.gates = carve (store, &used, (steps + 1) * 4 * hidden);
    net->lstm.h_in = carve (store, &used, (steps + 1) * hidden);
    net->lstm.c_in = carve (store, &used, (steps + 1) * hidden);
    net->lstm.c_tanh = carve (store, &used, (steps + 1) * hidden);
    net->lstm.h_out = carve (store, &used, (steps + 1) * hidden);
    net->last = carve (store, &used, envs * net->features);
    net->lstm.h = carve (store, &used, envs * hidden);
    net->lstm.c = carve (store, &used, envs * hidden);
    net->lstm.c_new = carve (store, &used, envs * hidden);
    net->lstm.c_back = carve (store, &used, envs * hidden);
    net->lstm.d_gates = carve (store, &used, steps * 4 * hidden);
    net->lstm.d_h = carve (store, &used, steps * hidden);
    net->lstm.d_x = carve (store, &used, steps * net->features);
    return used;
}

static gq_status
check_config (const gq_net_config *config, gq_error *error)
{
    const uint64_t *shape = config->observation_shape;
    if (config->observation_rank != 3)
        return gq_fail (error, GQ_INVALID,
                        "the conv-lstm net needs image observations (channels, height, width), but "
                        "these have %" PRIu32 " dimension(s); use --net dense",
                        config->observation_rank);
    if (shape[0] < 1 || shape[0] > CHANNELS_MAX || shape[1] < 1 || shape[1] > PIXELS_MAX ||
        shape[2] < 1 || shape[2] > PIXELS_MAX)
        return gq_fail (error, GQ_INVALID,
                        "an image of %" PRIu64 " x %" PRIu64 " x %" PRIu64 " (channels, height, "
                        "width) does not suit the conv-lstm net; give 1 to %d channels and 1 to %d "
                        "pixels a side",
                        shape[0], shape[1], shape[2], CHANNELS_MAX, PIXELS_MAX);
    if (config->action_count < 1 || config->action_count > UNITS_MAX || config->hidden < 1 ||
        config->hidden > UNITS_MAX || config->filters > CHANNELS_MAX)
        return gq_fail (error, GQ_INVALID,
                        "%" PRIu32 " actions, %" PRIu32 " hidden units and %" PRIu32 " filters do "
                        "not suit the conv-lstm net; give 1 to %d actions, 1 to %d units and at "
                        "most %d filters",
                        config->action_count, config->hidden, config->filters, UNITS_MAX, UNITS_MAX,
                        CHANNELS_MAX);
    uint64_t envs = config->env_count > 0 ? config->env_count : 1;
    if (config->rollout_max < 1 || config->rollout_max * envs > ROLLOUT_MAX)
        return gq_fail (error, GQ_INVALID,
                        "a rollout of %" PRIu32 " steps of %" PRIu64 " environments; their product "
                        "may be 1 to %d",
                        config->rollout_max, envs, ROLLOUT_MAX);
    return GQ_OK;
}

static void
conv_lstm_destroy (gq_net **net_p)
{
    if (*net_p == NULL)
        return;
    conv_lstm *net = (conv_lstm *)*net_p;
    free (net->store);
    free (net->ends);
    free (net);
    *net_p = NULL;
}

/* Sizes, names and arrays. */
static gq_status
set_up (conv_lstm *net, gq_error *error)
{
    const gq_net_config *config = &net->base.config;
    size_t channels = (size_t)config->observation_shape[0];
    size_t height = (size_t)config->observation_shape[1];
    size_t width = (size_t)config->observation_shape[2];
    net->filters = config->filters, net->hidden = config->hidden;
    net->actions = config->action_count;
    net->envs = config->env_count, net->rows_max = config->rollout_max * net->envs;
    for (size_t l = 0; l < LAYERS; l++) {
        gq_conv *conv = &net->convs[l];
        gq_conv_size (conv, channels, height, width, net->filters,
                      net->rows_max < BLOCK_MAX ? net->rows_max : BLOCK_MAX);
        channels = net->filters, height = conv->out_height, width = conv->out_width;
    }
    net->features = channels * height * width;
    name_tensors (net);
    if (net->base.element_count > GQ_PARAMETERS_MAX)
        return gq_fail (error, GQ_INVALID,
                        "the conv-lstm net would have %" PRIu64 " parameters, at most %" PRIu64
                        " are allowed; shrink the image or the hidden units",
                        net->base.element_count, (uint64_t)GQ_PARAMETERS_MAX);
    net->lstm.features = net->features, net->lstm.hidden = net->hidden;
    net->lstm.envs = net->envs;
    net->lstm.loops = net->scratch.loops = gq_activation_pick ();
    size_t bytes = place_arrays (net, NULL) * sizeof (float);
    /* calloc: the borders must be zero, and pages that a short rollout leaves alone are free. */
    net->store = calloc (1, bytes);
    net->ends = calloc (net->rows_max, sizeof *net->ends);
    if (net->store == NULL || net->ends == NULL)
        return gq_fail (error, GQ_MEMORY,
                        "no memory for the conv-lstm net (%zu bytes); shorten the rollout", bytes);
    place_arrays (net, net->store);
    return GQ_OK;
}

static gq_status
conv_lstm_create (gq_net **net_p, const gq_net_config *config, gq_error *error)
{
    *net_p = NULL;
    gq_status status = check_config (config, error);
    if (status != GQ_OK)
        return status;
    conv_lstm *net = calloc (1, sizeof *net);
    if (net == NULL)
        return gq_fail (error, GQ_MEMORY, "no memory for the conv-lstm net");
    net->base.ops = &gq_net_conv_lstm;
    net->base.config = *config;
    if (config->filters == 0)
        net->base.config.filters = FILTERS_DEFAULT;
    if (config->env_count == 0)
        net->base.config.env_count = 1;
    gq_net *base = &net->base;
    status = set_up (net, error);
    if (status != GQ_OK) {
        conv_lstm_destroy (&base);
        return status;
    }
    gq_blas_begin ();
    *net_p = base;
    return GQ_OK;
}

const gq_net_ops gq_net_conv_lstm = {.name = "conv-lstm",
                                     .create = conv_lstm_create,
                                     .destroy = conv_lstm_destroy,
                                     .initialise = conv_lstm_initialise,
                                     .begin = conv_lstm_begin,
                                     .step = conv_lstm_step,
                                     .peek = conv_lstm_peek,
                                     .reset = conv_lstm_reset,
                                     .backward = conv_lstm_backward,
                                     .set_state = conv_lstm_set_state};
