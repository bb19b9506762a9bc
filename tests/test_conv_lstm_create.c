/*
 * What a new pixel net is: its sizes, its tensors, its first weights, and what it refuses to be.
 */
#include "actors/net.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

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

static const gq_net_config tiny = {.observation_rank = 3,
                                   .observation_shape = {2, 12, 9},
                                   .action_count = 3,
                                   .hidden = 4,
                                   .rollout_max = 8,
                                   .filters = 3};

static bool
same_bits (const float *a, const float *b, size_t count)
{
    return memcmp (a, b, count * sizeof *a) == 0;
}

Test (conv_lstm_create, tensors_stand_in_state_dict_order)
{
    static const char *const names[] = {
        "conv1.weight",   "conv1.bias",     "conv2.weight", "conv2.bias",
        "conv3.weight",   "conv3.bias",     "conv4.weight", "conv4.bias",
        "lstm.weight_ih", "lstm.weight_hh", "lstm.bias_ih", "lstm.bias_hh",
        "pi.weight",      "pi.bias",        "v.weight",     "v.bias"};
    gq_net *net = make_net (tiny);
    cr_assert_eq (net->tensor_count, sizeof names / sizeof names[0]);
    for (size_t i = 0; i < net->tensor_count; i++)
        cr_expect_str_eq (net->tensors[i].name, names[i]);
    net->ops->destroy (&net);
}

/* docs of the net: 42 -> 21 -> 11 -> 6 -> 3, 288 features; one more bias vector than the 587,943
 * parameters of the agent it follows, because PyTorch's cell has two. */
Test (conv_lstm_create, default_filters_give_the_published_size)
{
    gq_net_config config = {.observation_rank = 3,
                            .observation_shape = {1, 42, 42},
                            .action_count = 6,
                            .hidden = 256,
                            .rollout_max = 1};
    gq_net *net = make_net (config);
    cr_expect_eq (net->config.filters, 32);
    cr_expect_eq (net->element_count, 587943 + 4 * 256);
    net->ops->destroy (&net);
}

static void
check_bound (const float *values, size_t count, double bound)
{
    double most = 0.0;
    for (size_t i = 0; i < count; i++)
        most = fmax (most, fabs ((double)values[i]));
    /* Of 54 and more uniform draws, one lies in the upper tenth with probability 1 - 0.9^54. */
    cr_expect (most <= bound * (1.0 + 1e-6) && most >= 0.9 * bound, "%.9g, bound %.9g", most,
               bound);
}

Test (conv_lstm_create, initial_weights_have_the_documented_scales_and_follow_the_seed)
{
    gq_net *net = make_net (tiny);
    const size_t count = (size_t)net->element_count;
    float *weights = grab (count, sizeof (float)), *again = grab (count, sizeof (float));
    net->ops->initialise (net, 11, weights);
    net->ops->initialise (net, 12, again);
    cr_expect_not (same_bits (weights, again, count), "seeds 11 and 12 agree");
    net->ops->initialise (net, 11, again);
    cr_expect (same_bits (weights, again, count), "seed 11 twice differs");
    const float *next = weights;
    for (size_t i = 0; i < net->tensor_count; i++) {
        const gq_tensor_shape *tensor = &net->tensors[i];
        size_t rows = (size_t)tensor->shape[0], columns = 1;
        for (uint32_t axis = 1; axis < tensor->rank; axis++)
            columns *= (size_t)tensor->shape[axis];
        if (tensor->rank == 4)
            check_bound (next, rows * columns, sqrt (6.0 / (double)(columns + 9 * rows)));
        else if (strncmp (tensor->name, "lstm.weight", 11) == 0)
            check_bound (next, rows * columns, 0.5); /* 1 / sqrt (4) */
        else
            for (size_t row = 0; row < rows; row++) {
                double squares = 0.0, length = tensor->name[0] == 'p' ? 0.01 : 1.0;
                for (size_t e = row * columns; e < (row + 1) * columns; e++)
                    squares += (double)next[e] * (double)next[e];
                if (tensor->rank == 1)
                    length = 0.0; /* a bias */
                cr_expect_float_eq (sqrt (squares), length, 1e-6 * length + 1e-12, "%s",
                                    tensor->name);
            }
        next += rows * columns;
    }
    free (weights), free (again);
    net->ops->destroy (&net);
}

Test (conv_lstm_create, sizes_that_do_not_suit_are_refused_with_a_sentence)
{
    gq_net_config bad[9];
    for (size_t i = 0; i < 9; i++)
        bad[i] = tiny;
    bad[0].observation_rank = 1;
    bad[1].observation_shape[0] = 0;
    bad[2].observation_shape[1] = 5000;
    bad[3].action_count = 0;
    bad[4].hidden = 0;
    bad[5].filters = UINT32_MAX;
    bad[6].rollout_max = 0;
    bad[7].rollout_max = UINT32_MAX;
    /* Each within its bound, but 2^31 parameters are not enough. */
    bad[8].observation_shape[1] = bad[8].observation_shape[2] = 4096;
    bad[8].hidden = 16384;
    for (size_t i = 0; i < 9; i++) {
        gq_net *net = NULL;
        gq_error error = {""};
        cr_expect_eq (gq_net_conv_lstm.create (&net, &bad[i], &error), GQ_INVALID, "case %zu", i);
        cr_expect_null (net);
        cr_expect (strlen (error.text) > 20, "case %zu: '%s'", i, error.text);
        cr_expect_eq (gq_net_conv_lstm.create (&net, &bad[i], NULL), GQ_INVALID, "case %zu", i);
    }
}

/* AddressSanitizer ends the process on an allocation of this size instead of answering NULL. */
#ifndef __SANITIZE_ADDRESS__
Test (conv_lstm_create, a_rollout_too_long_for_the_memory_is_refused)
{
    gq_net_config config = tiny;
    config.observation_shape[0] = 1024;
    config.observation_shape[1] = config.observation_shape[2] = 4096;
    config.filters = 1, config.hidden = 1, config.rollout_max = 65536; /* 4.5 PB */
    gq_net *net = NULL;
    gq_error error = {""};
    cr_expect_eq (gq_net_conv_lstm.create (&net, &config, &error), GQ_MEMORY);
    cr_expect_null (net);
}
#endif

Test (conv_lstm_create, destroy_accepts_null)
{
    gq_net *net = NULL;
    gq_net_conv_lstm.destroy (&net);
    cr_expect_null (net);
}
