/*
 * The pixel net against a naive twin in double, written from the formulas with no trick of the real
 * one, and against its own contract.  test_conv_lstm_golden.c holds it to PyTorch,
 * test_conv_lstm_create.c looks at its sizes and first weights.
 */
#include "actors/net.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
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

/* Small enough for a twin without mercy; sides odd and even, so that both kinds of edge occur. */
static const gq_net_config tiny = {.observation_rank = 3,
                                   .observation_shape = {2, 12, 9},
                                   .action_count = 3,
                                   .hidden = 4,
                                   .rollout_max = 8,
                                   .filters = 3};
enum { TINY_PIXELS = 2 * 12 * 9 };

static float *
normal_floats (gq_random *random, size_t count, double deviation)
{
    float *values = grab (count, sizeof *values);
    for (size_t i = 0; i < count; i++)
        values[i] = (float)(deviation * gq_random_normal (random));
    return values;
}

/* Weights, biases too, large enough that every gate and both sides of the ELU are in use. */
static float *
lively_weights (const gq_net *net, gq_random *random)
{
    return normal_floats (random, (size_t)net->element_count, 0.4);
}

static gq_random
seeded (uint64_t seed)
{
    gq_random random;
    gq_random_seed (&random, seed);
    printf ("seed %llu\n", (unsigned long long)seed);
    return random;
}

static bool
same_bits (const float *a, const float *b, size_t count)
{
    return memcmp (a, b, count * sizeof *a) == 0;
}

typedef struct twin_state {
    double h[4], c[4];
} twin_state;

/* 3x3, stride 2, padding 1, ELU on (channels, height, width); advances *w over weight and bias. */
static void
twin_conv (const double **w, size_t channels, size_t height, size_t width, size_t filters,
           const double *in, double *out)
{
    const double *weight = *w, *bias = weight + filters * channels * 9;
    for (size_t f = 0; f < filters; f++)
        for (size_t y = 0; y < (height + 1) / 2; y++)
            for (size_t x = 0; x < (width + 1) / 2; x++) {
                double sum = bias[f];
                for (size_t tap = 0; tap < channels * 9; tap++) {
                    size_t c = tap / 9, row = 2 * y + tap % 9 / 3, column = 2 * x + tap % 3;
                    if (row >= 1 && row <= height && column >= 1 && column <= width)
                        sum += weight[f * channels * 9 + tap] *
                               in[(c * height + row - 1) * width + column - 1];
                }
                *out++ = sum > 0.0 ? sum : expm1 (sum);
            }
    *w = bias + filters;
}

/* One step of the tiny net: outputs[0..2] logits, outputs[3] value. */
static void
twin_step (const double *w, const float *observation, twin_state *state, double *outputs)
{
    double in[TINY_PIXELS], out[TINY_PIXELS], z[16];
    size_t channels = 2, height = 12, width = 9;
    for (size_t i = 0; i < TINY_PIXELS; i++)
        in[i] = (double)observation[i];
    for (int l = 0; l < 4; l++) {
        twin_conv (&w, channels, height, width, 3, in, out);
        channels = 3, height = (height + 1) / 2, width = (width + 1) / 2;
        memcpy (in, out, sizeof in);
    }
    const size_t features = channels * height * width;
    const double *ih = w, *hh = ih + 16 * features, *b_ih = hh + 16 * 4, *b_hh = b_ih + 16;
    for (size_t r = 0; r < 16; r++) {
        z[r] = b_ih[r] + b_hh[r];
        for (size_t i = 0; i < features; i++)
            z[r] += ih[r * features + i] * in[i];
        for (size_t i = 0; i < 4; i++)
            z[r] += hh[r * 4 + i] * state->h[i];
    }
    for (size_t u = 0; u < 4; u++) {
        double i = 1.0 / (1.0 + exp (-z[u])), f = 1.0 / (1.0 + exp (-z[4 + u]));
        double g = tanh (z[8 + u]), o = 1.0 / (1.0 + exp (-z[12 + u]));
        state->c[u] = f * state->c[u] + i * g;
        state->h[u] = o * tanh (state->c[u]);
    }
    const double *pi = b_hh + 16, *v = pi + 3 * 4 + 3;
    for (size_t a = 0; a < 4; a++) {
        outputs[a] = a < 3 ? pi[12 + a] : v[4];
        for (size_t i = 0; i < 4; i++)
            outputs[a] += (a < 3 ? pi[a * 4 + i] : v[i]) * state->h[i];
    }
}

/* A rollout of the tiny net and the derivatives of its loss, which is their product with the
 * outputs: a linear loss tests the net and nothing else. */
typedef struct rollout {
    size_t count;        /* steps */
    size_t reset_after;  /* index of a step, or count for none */
    float *observations; /* [count, TINY_PIXELS] */
    float *d_logits;     /* [count, 3] */
    float *d_values;     /* [count] */
} rollout;

static rollout
make_rollout (gq_random *random, size_t count, size_t reset_after)
{
    return (rollout){.count = count,
                     .reset_after = reset_after,
                     .observations = normal_floats (random, count * TINY_PIXELS, 1.0),
                     .d_logits = normal_floats (random, count * 3, 1.0),
                     .d_values = normal_floats (random, count, 1.0)};
}

static void
free_rollout (rollout *run)
{
    free (run->observations);
    free (run->d_logits);
    free (run->d_values);
}

static double
twin_loss (const double *weights, const rollout *run, twin_state *state)
{
    double loss = 0.0, outputs[4];
    for (size_t t = 0; t < run->count; t++) {
        twin_step (weights, run->observations + t * TINY_PIXELS, state, outputs);
        for (size_t a = 0; a < 3; a++)
            loss += (double)run->d_logits[t * 3 + a] * outputs[a];
        loss += (double)run->d_values[t] * outputs[3];
        if (t == run->reset_after)
            *state = (twin_state){{0}, {0}};
    }
    return loss;
}

/* begin, steps with the reset, backward; the loss from the net's own outputs. */
static double
net_loss (gq_net *net, const float *weights, const rollout *run, float *gradient)
{
    double loss = 0.0;
    net->ops->begin (net);
    for (size_t t = 0; t < run->count; t++) {
        float logits[3], value;
        net->ops->step (net, weights, run->observations + t * TINY_PIXELS, logits, &value);
        for (size_t a = 0; a < 3; a++)
            loss += (double)run->d_logits[t * 3 + a] * (double)logits[a];
        loss += (double)run->d_values[t] * (double)value;
        if (t == run->reset_after)
            net->ops->reset (net, 0);
    }
    net->ops->backward (net, weights, run->d_logits, run->d_values, gradient);
    return loss;
}

/* Every element of the gradient against a central difference of the twin from `start`. */
static void
check_against_twin (const gq_net *net, const float *weights, const rollout *run, twin_state start,
                    double loss, const float *gradient)
{
    const size_t count = (size_t)net->element_count;
    double *twin = grab (count, sizeof *twin);
    for (size_t i = 0; i < count; i++)
        twin[i] = (double)weights[i];
    twin_state state = start;
    double expected = twin_loss (twin, run, &state);
    cr_expect_float_eq (loss, expected, 1e-5 * (1.0 + fabs (expected)), "loss %.9g, twin %.9g",
                        loss, expected);
    for (size_t i = 0; i < count; i++) {
        /* 1e-5: truncation (step^2) and rounding (1e-16 / step) both stay below 1e-9. */
        const double step = 1e-5, here = twin[i];
        state = start, twin[i] = here + step;
        double above = twin_loss (twin, run, &state);
        state = start, twin[i] = here - step;
        double below = twin_loss (twin, run, &state);
        twin[i] = here;
        double numeric = (above - below) / (2.0 * step), got = (double)gradient[i];
        cr_expect_float_eq (got, numeric, 1e-5 + 1e-4 * fabs (numeric),
                            "element %zu: %.9g, twin %.9g", i, got, numeric);
    }
    free (twin);
}

Test (conv_lstm, gradient_equals_the_twins_numeric_one_across_a_reset)
{
    for (uint64_t seed = 1; seed <= 3; seed++) {
        gq_random random = seeded (seed);
        gq_net *net = make_net (tiny);
        float *weights = lively_weights (net, &random);
        float *gradient = grab ((size_t)net->element_count, sizeof *gradient);
        rollout run = make_rollout (&random, 7, 3);
        twin_state start;
        float *h = normal_floats (&random, 4, 0.5), *c = normal_floats (&random, 4, 0.5);
        for (size_t u = 0; u < 4; u++)
            start.h[u] = (double)h[u], start.c[u] = (double)c[u];
        net->ops->set_state (net, h, c);
        for (size_t i = 0; i < net->element_count; i++)
            gradient[i] = NAN; /* whatever was there must not matter */
        double loss = net_loss (net, weights, &run, gradient);
        check_against_twin (net, weights, &run, start, loss, gradient);
        free_rollout (&run);
        free (h), free (c), free (weights), free (gradient);
        net->ops->destroy (&net);
    }
}

Test (conv_lstm, a_second_rollout_carries_the_state_on_but_no_gradient)
{
    gq_random random = seeded (4);
    gq_net *net = make_net (tiny);
    float *weights = lively_weights (net, &random);
    float *gradient = grab ((size_t)net->element_count, sizeof *gradient);
    rollout first = make_rollout (&random, 5, 5), second = make_rollout (&random, 4, 4);
    double *twin = grab ((size_t)net->element_count, sizeof *twin);
    for (size_t i = 0; i < net->element_count; i++)
        twin[i] = (double)weights[i];
    twin_state state = {{0}, {0}};
    (void)twin_loss (twin, &first, &state);
    (void)net_loss (net, weights, &first, gradient);
    double loss = net_loss (net, weights, &second, gradient);
    /* The twin differentiates with the state held constant. */
    check_against_twin (net, weights, &second, state, loss, gradient);
    free_rollout (&first), free_rollout (&second);
    free (weights), free (gradient), free (twin);
    net->ops->destroy (&net);
}

Test (conv_lstm, peek_gives_the_next_steps_value_and_leaves_all_as_it_was)
{
    gq_random random = seeded (5);
    gq_net *with = make_net (tiny), *without = make_net (tiny);
    const size_t count = (size_t)with->element_count;
    float *weights = lively_weights (with, &random);
    float *gradients[2] = {grab (count, sizeof (float)), grab (count, sizeof (float))};
    rollout run = make_rollout (&random, 8, 8); /* 8: no room is left in the rollout at the end */
    with->ops->begin (with), without->ops->begin (without);
    for (size_t t = 0; t < run.count; t++) {
        const float *observation = run.observations + t * TINY_PIXELS;
        float logits[2][3], values[2];
        (void)with->ops->peek (with, weights, 0, run.observations + (7 - t) * TINY_PIXELS);
        float peeked = with->ops->peek (with, weights, 0, observation);
        with->ops->step (with, weights, observation, logits[0], &values[0]);
        without->ops->step (without, weights, observation, logits[1], &values[1]);
        cr_expect (same_bits (&peeked, &values[1], 1), "step %zu: peek %.9g, value %.9g", t,
                   (double)peeked, (double)values[1]);
        cr_expect (same_bits (logits[0], logits[1], 3), "step %zu", t);
        cr_expect (same_bits (&values[0], &values[1], 1), "step %zu", t);
    }
    (void)with->ops->peek (with, weights, 0, run.observations);
    with->ops->backward (with, weights, run.d_logits, run.d_values, gradients[0]);
    without->ops->backward (without, weights, run.d_logits, run.d_values, gradients[1]);
    cr_expect (same_bits (gradients[0], gradients[1], count), "peek changed the gradient");
    free_rollout (&run);
    free (weights), free (gradients[0]), free (gradients[1]);
    with->ops->destroy (&with), without->ops->destroy (&without);
}

Test (conv_lstm, after_reset_the_net_answers_like_a_new_one)
{
    gq_random random = seeded (6);
    gq_net *old = make_net (tiny), *new = make_net (tiny);
    float *weights = lively_weights (old, &random), logits[2][3], values[2];
    rollout run = make_rollout (&random, 3, 3);
    old->ops->begin (old), new->ops->begin (new);
    for (size_t t = 0; t < 2; t++)
        old->ops->step (old, weights, run.observations + t * TINY_PIXELS, logits[0], &values[0]);
    old->ops->reset (old, 0);
    old->ops->step (old, weights, run.observations + 2 * TINY_PIXELS, logits[0], &values[0]);
    new->ops->step (new, weights, run.observations + 2 * TINY_PIXELS, logits[1], &values[1]);
    cr_expect (same_bits (logits[0], logits[1], 3));
    cr_expect (same_bits (&values[0], &values[1], 1));
    free_rollout (&run);
    free (weights);
    old->ops->destroy (&old), new->ops->destroy (&new);
}

Test (conv_lstm, weights_changed_in_place_between_rollouts_are_seen)
{
    gq_random random = seeded (7);
    gq_net *net = make_net (tiny), *new = make_net (tiny);
    const size_t count = (size_t)net->element_count;
    float *weights = lively_weights (net, &random), *others = lively_weights (net, &random);
    float *gradients[2] = {grab (count, sizeof (float)), grab (count, sizeof (float))};
    rollout run = make_rollout (&random, 4, 3); /* reset at its end: no state is left over */
    (void)net_loss (net, weights, &run, gradients[0]);
    memcpy (weights, others, count * sizeof *weights);
    float peeked = net->ops->peek (net, weights, 0, run.observations);
    float expected = new->ops->peek (new, others, 0, run.observations);
    cr_expect (same_bits (&peeked, &expected, 1), "after backward");
    (void)net->ops->peek (net, weights, 0, run.observations);
    new->ops->destroy (&new); /* it has seen the others as they were */
    new = make_net (tiny);
    for (size_t i = 0; i < count; i++)
        weights[i] = others[i] = -others[i];
    (void)net_loss (net, weights, &run, gradients[0]);
    (void)net_loss (new, others, &run, gradients[1]);
    cr_expect (same_bits (gradients[0], gradients[1], count), "after begin");
    free_rollout (&run);
    free (weights), free (others), free (gradients[0]), free (gradients[1]);
    net->ops->destroy (&net), new->ops->destroy (&new);
}

Test (conv_lstm, without_steps_the_gradient_is_zero)
{
    gq_net *net = make_net (tiny);
    float *weights = grab ((size_t)net->element_count, sizeof *weights);
    float *gradient = grab ((size_t)net->element_count, sizeof *gradient), none = 0.0f;
    for (size_t i = 0; i < net->element_count; i++)
        gradient[i] = 1.0f;
    net->ops->begin (net);
    net->ops->backward (net, weights, &none, &none, gradient);
    cr_expect (same_bits (gradient, weights, (size_t)net->element_count));
    free (weights), free (gradient);
    net->ops->destroy (&net);
}

/* Full width, so that matrix products and blocks of steps are split unevenly: 71 steps, an episode
 * end after step 34, against its two halves. */
Test (conv_lstm, a_long_rollouts_gradient_is_the_sum_of_its_episodes)
{
    enum { STEPS = 71, FIRST = 35, PIXELS = 42 * 42 };
    gq_random random = seeded (8);
    gq_net_config config = {.observation_rank = 3,
                            .observation_shape = {1, 42, 42},
                            .action_count = 6,
                            .hidden = 16,
                            .rollout_max = STEPS};
    gq_net *net = make_net (config);
    const size_t count = (size_t)net->element_count;
    float *weights = grab (count, sizeof *weights), *gradients[3], logits[6], value;
    float *observations = normal_floats (&random, STEPS * PIXELS, 1.0);
    float *d_logits = normal_floats (&random, STEPS * 6, 1.0);
    float *d_values = normal_floats (&random, STEPS, 1.0);
    const size_t ranges[3][2] = {{0, STEPS}, {0, FIRST}, {FIRST, STEPS}};
    net->ops->initialise (net, 8, weights);
    for (size_t i = 0; i < 3; i++) {
        gradients[i] = grab (count, sizeof (float));
        net->ops->reset (net, 0);
        net->ops->begin (net);
        for (size_t t = ranges[i][0]; t < ranges[i][1]; t++) {
            net->ops->step (net, weights, observations + t * PIXELS, logits, &value);
            if (t == FIRST - 1)
                net->ops->reset (net, 0);
        }
        net->ops->backward (net, weights, d_logits + ranges[i][0] * 6, d_values + ranges[i][0],
                            gradients[i]);
    }
    for (size_t i = 0; i < count; i++) {
        /* Sums of up to 71 * 441 float32 products in another order: 1e-4 of their size, which the
         * halves measure better than their sum. */
        double first = (double)gradients[1][i], second = (double)gradients[2][i];
        cr_expect_float_eq (
            (double)gradients[0][i], first + second, 1e-4 * (fabs (first) + fabs (second)) + 1e-4,
            "element %zu: %.9g, halves %.9g + %.9g", i, (double)gradients[0][i], first, second);
    }
    for (size_t i = 0; i < 3; i++)
        free (gradients[i]);
    free (weights), free (observations), free (d_logits), free (d_values);
    net->ops->destroy (&net);
}

Test (conv_lstm, broken_weights_show_in_logits_and_value)
{
    gq_random random = seeded (9);
    gq_net *net = make_net (tiny);
    rollout run = make_rollout (&random, 1, 1);
    for (size_t i = 0, start = 0; i < net->tensor_count; i++) {
        float *weights = lively_weights (net, &random), logits[3], value;
        size_t size = 1;
        for (uint32_t axis = 0; axis < net->tensors[i].rank; axis++)
            size *= (size_t)net->tensors[i].shape[axis];
        for (size_t e = start; e < start + size; e++)
            weights[e] = NAN;
        net->ops->reset (net, 0);
        net->ops->begin (net);
        net->ops->step (net, weights, run.observations, logits, &value);
        cr_expect (isnan (logits[0]) || isnan (value), "NaN in %s was hidden",
                   net->tensors[i].name);
        start += size;
        free (weights);
    }
    free_rollout (&run);
    net->ops->destroy (&net);
}

Test (conv_lstm, set_state_within_a_rollout_cuts_as_reset_does)
{
    gq_random random = seeded (10);
    gq_net *net = make_net (tiny);
    const size_t count = (size_t)net->element_count;
    const float zero[4] = {0.0f};
    float *weights = lively_weights (net, &random);
    float *gradients[2] = {grab (count, sizeof (float)), grab (count, sizeof (float))};
    rollout run = make_rollout (&random, 5, 2);
    (void)net_loss (net, weights, &run, gradients[0]);
    net->ops->set_state (net, zero, zero);
    net->ops->begin (net);
    for (size_t t = 0; t < run.count; t++) {
        float logits[3], value;
        net->ops->step (net, weights, run.observations + t * TINY_PIXELS, logits, &value);
        if (t == run.reset_after)
            net->ops->set_state (net, zero, zero);
    }
    net->ops->backward (net, weights, run.d_logits, run.d_values, gradients[1]);
    cr_expect (same_bits (gradients[0], gradients[1], count));
    free_rollout (&run);
    free (weights), free (gradients[0]), free (gradients[1]);
    net->ops->destroy (&net);
}
