/*
 * What an actor computes: randomness, returns and advantages, the loss' derivatives, the dense net,
 * and rollouts of them.
 */
#include <cblas.h>
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "actors/rollout.h"

enum { STEPS = 9, ACTIONS = 3 };

/* ---- randomness ---- */

Test (actor, generator_is_xoshiro256_starstar_seeded_by_splitmix64)
{
    /* Splitmix64 of 1234567: the test vector of rosettacode.org/wiki/Pseudo-random_numbers/
     * Splitmix64.  xoshiro256** from 1, 2, 3, 4: that of the rand_xoshiro crate. */
    static const uint64_t seeded[4] = {6457827717110365317u, 3203168211198807973u,
                                       9817491932198370423u, 4593380528125082431u};
    static const uint64_t drawn[4] = {11520u, 0u, 1509978240u, 1215971899390074240u};
    gq_random random;

    gq_random_seed (&random, 1234567);
    cr_assert_arr_eq (random.state, seeded, sizeof seeded);
    random = (gq_random){.state = {1, 2, 3, 4}};
    for (int i = 0; i < 4; i++)
        cr_assert_eq (gq_random_next (&random), drawn[i]);
}

Test (actor, normal_numbers_have_mean_0_and_deviation_1)
{
    enum { COUNT = 100000 };
    gq_random random;
    double sum = 0, square = 0;

    gq_random_seed (&random, 5);
    for (int i = 0; i < COUNT; i++) {
        double x = gq_random_normal (&random);
        cr_assert (isfinite (x));
        sum += x;
        square += x * x;
    }
    /* Five standard errors: 1 / sqrt n of the mean, sqrt (2 / n) of the variance. */
    cr_assert_float_eq (sum / COUNT, 0, 5 / sqrt (COUNT));
    cr_assert_float_eq (square / COUNT, 1, 5 * sqrt (2.0 / COUNT));
}

Test (actor, streams_of_neighbouring_seeds_do_not_meet)
{
    enum { SIDE = 32 };
    uint64_t seen[SIDE * SIDE];

    for (size_t i = 0; i < SIDE * SIDE; i++) {
        seen[i] = gq_random_stream (i / SIDE, i % SIDE);
        for (size_t j = 0; j < i; j++)
            cr_assert_neq (seen[i], seen[j], "(%zu, %zu) and (%zu, %zu)", i / SIDE, i % SIDE,
                           j / SIDE, j % SIDE);
    }
}

/* ---- loss ---- */

typedef struct sample {
    float logits[STEPS * ACTIONS], values[STEPS], rewards[STEPS], beyond[STEPS];
    int32_t actions[STEPS];
    uint8_t cut[STEPS];
    gq_a3c_steps steps;
} sample;

/* Random steps with two cuts: a termination after step 2, a truncation after step 5. */
static void
make_sample (sample *s, uint64_t seed)
{
    gq_random random;

    printf ("seed %llu\n", (unsigned long long)seed);
    gq_random_seed (&random, seed);
    *s = (sample){0};
    for (int i = 0; i < STEPS * ACTIONS; i++)
        s->logits[i] = (float)gq_random_normal (&random);
    for (int t = 0; t < STEPS; t++) {
        s->values[t] = (float)gq_random_normal (&random);
        s->rewards[t] = (float)gq_random_normal (&random);
        s->beyond[t] = 1e6f; /* read where it must not be, it would show */
        s->actions[t] = (int32_t)(gq_random_next (&random) % ACTIONS);
    }
    s->cut[2] = 1, s->beyond[2] = 0;
    s->cut[5] = 1, s->beyond[5] = 1.5f;
    s->beyond[STEPS - 1] = -0.7f;
    s->steps = (gq_a3c_steps){.step_count = STEPS,
                              .env_count = 1,
                              .action_count = ACTIONS,
                              .logits = s->logits,
                              .values = s->values,
                              .actions = s->actions,
                              .rewards = s->rewards,
                              .cut = s->cut,
                              .beyond = s->beyond};
}

Test (actor, returns_and_advantages_equal_their_sums_written_out)
{
    sample s;
    double returns[STEPS], advantages[STEPS];
    gq_a3c_config config = {.gamma = 0.9, .lambda = 0.7};

    make_sample (&s, 11);
    gq_a3c_returns (&config, &s.steps, returns, advantages);
    for (int t = 0; t < STEPS; t++) {
        double discounted = 0, sum = 0, gamma_k = 1, both_k = 1;
        for (int k = t; k < STEPS; k++) {
            bool last = s.cut[k] || k == STEPS - 1;
            double next = (double)(last ? s.beyond[k] : s.values[k + 1]);
            discounted += gamma_k * (double)s.rewards[k];
            sum += both_k * ((double)s.rewards[k] + 0.9 * next - (double)s.values[k]);
            gamma_k *= 0.9;
            both_k *= 0.9 * 0.7;
            if (last) {
                discounted += gamma_k * next;
                break;
            }
        }
        /* Doubles in another order: some 1e-16 a step. */
        cr_assert_float_eq (returns[t], discounted, 1e-13, "t %d", t);
        cr_assert_float_eq (advantages[t], sum, 1e-13, "t %d", t);
    }
}

Test (actor, lambda_1_gives_return_minus_value)
{
    sample s;
    double returns[STEPS], advantages[STEPS];
    gq_a3c_config config = {.gamma = 0.99, .lambda = 1};

    make_sample (&s, 12);
    gq_a3c_returns (&config, &s.steps, returns, advantages);
    for (int t = 0; t < STEPS; t++)
        cr_assert_float_eq (advantages[t], returns[t] - (double)s.values[t], 1e-13);
}

static void
check_derivatives (bool mean)
{
    sample s;
    double returns[STEPS], advantages[STEPS];
    float d_logits[STEPS * ACTIONS], d_values[STEPS], unused[STEPS * ACTIONS];
    gq_a3c_config config = {
        .gamma = 0.95, .lambda = 0.8, .value_weight = 0.6, .entropy_weight = 0.3, .mean = mean};
    const float h = 0x1p-10f;

    make_sample (&s, 13);
    gq_a3c_returns (&config, &s.steps, returns, advantages);
    gq_a3c_differentiate (&config, &s.steps, returns, advantages, d_logits, d_values);
    for (int i = 0; i < STEPS * ACTIONS + STEPS; i++) {
        bool is_logit = i < STEPS * ACTIONS;
        float *x = is_logit ? &s.logits[i] : &s.values[i - STEPS * ACTIONS];
        float kept = *x;
        double d = (double)(is_logit ? d_logits[i] : d_values[i - STEPS * ACTIONS]);
        *x = kept + h;
        double width = (double)*x;
        double up =
            gq_a3c_differentiate (&config, &s.steps, returns, advantages, unused, unused).total;
        *x = kept - h;
        width -= (double)*x;
        double down =
            gq_a3c_differentiate (&config, &s.steps, returns, advantages, unused, unused).total;
        *x = kept;
        /* Central differences: error h^2 / 6 times a third derivative of order 1, about 2e-7. */
        cr_assert_float_eq ((up - down) / width, d, 3e-6, "input %d: %g, numerically %g", i, d,
                            (up - down) / width);
    }
}

Test (actor, derivatives_of_the_summed_loss_equal_central_differences)
{
    check_derivatives (false);
}

Test (actor, derivatives_of_the_mean_loss_equal_central_differences)
{
    check_derivatives (true);
}

Test (actor, huge_logits_give_finite_derivatives)
{
    sample s;
    double returns[STEPS], advantages[STEPS];
    float d_logits[STEPS * ACTIONS], d_values[STEPS];
    gq_a3c_config config = {
        .gamma = 0.95, .lambda = 1, .value_weight = 0.5, .entropy_weight = 0.01};

    make_sample (&s, 14);
    for (int i = 0; i < STEPS * ACTIONS; i++)
        s.logits[i] *= 1e4f;
    gq_a3c_returns (&config, &s.steps, returns, advantages);
    gq_a3c_loss loss =
        gq_a3c_differentiate (&config, &s.steps, returns, advantages, d_logits, d_values);
    cr_assert (isfinite (loss.total));
    for (int i = 0; i < STEPS * ACTIONS; i++)
        cr_assert (isfinite (d_logits[i]));
}

Test (actor, actions_are_drawn_with_the_softmax_probabilities)
{
    enum { COUNT = 100000 };
    const float logits[3] = {logf (1), logf (2), logf (5)};
    int drawn[3] = {0};
    gq_random random;

    gq_random_seed (&random, 15);
    for (int i = 0; i < COUNT; i++)
        drawn[gq_a3c_sample (logits, 3, &random)]++;
    for (int a = 0; a < 3; a++) {
        double p = exp ((double)logits[a]) / 8;
        cr_assert_float_eq (drawn[a] / (double)COUNT, p, 5 * sqrt (p * (1 - p) / COUNT));
    }
    cr_assert_eq (gq_a3c_greedy (logits, 3), 2);
    cr_assert_eq (gq_a3c_greedy ((const float[3]){1, 1, 0}, 3), 0);
}

Test (actor, nan_logits_still_give_an_action_in_range)
{
    const float logits[3] = {NAN, NAN, NAN};
    gq_random random;

    gq_random_seed (&random, 16);
    cr_assert_lt (gq_a3c_sample (logits, 3, &random), 3u);
    cr_assert_lt (gq_a3c_greedy (logits, 3), 3u);
}

/* ---- the dense net ---- */

enum { INPUTS = 5, HIDDEN = 7 };

static gq_net *
make_dense (uint32_t rollout_max)
{
    gq_net_config config = {.observation_rank = 1,
                            .observation_shape = {INPUTS},
                            .action_count = ACTIONS,
                            .hidden = HIDDEN,
                            .rollout_max = rollout_max};
    gq_net *net = NULL;
    gq_error error = {""};

    openblas_set_num_threads (1);
    cr_assert_eq (gq_net_dense.create (&net, &config, &error), GQ_OK, "%s", error.text);
    return net;
}

/* One of the two nets in double, from the flat vector of its parameters; returns what follows. */
static const double *
twin_branch (const double *w, const double *x, size_t outputs, double *output)
{
    const size_t sizes[4] = {INPUTS, HIDDEN, HIDDEN, outputs};
    double layer[2][HIDDEN];

    for (int i = 0; i < 3; i++) {
        const double *bias = w + sizes[i] * sizes[i + 1];
        double *y = i < 2 ? layer[i] : output;
        for (size_t row = 0; row < sizes[i + 1]; row++) {
            y[row] = bias[row];
            for (size_t column = 0; column < sizes[i]; column++)
                y[row] += w[row * sizes[i] + column] * x[column];
            if (i < 2)
                y[row] = tanh (y[row]);
        }
        x = y;
        w = bias + sizes[i + 1];
    }
    return w;
}

/* sum over T of d_logits . logits + d_values * value: its gradient is what backward gives. */
static double
twin_objective (const double *w, const double *observations, const float *d_logits,
                const float *d_values)
{
    double sum = 0;

    for (int t = 0; t < STEPS; t++) {
        double logits[ACTIONS], value;
        const double *rest = twin_branch (w, observations + t * INPUTS, ACTIONS, logits);
        twin_branch (rest, observations + t * INPUTS, 1, &value);
        for (int a = 0; a < ACTIONS; a++)
            sum += (double)d_logits[t * ACTIONS + a] * logits[a];
        sum += (double)d_values[t] * value;
    }
    return sum;
}

Test (actor, dense_net_and_its_gradient_equal_a_naive_twin_in_double)
{
    gq_net *net = make_dense (STEPS);
    size_t count = net->element_count;
    float *weights = calloc (count, sizeof *weights), *gradient = calloc (count, sizeof *gradient);
    double *twin = calloc (count, sizeof *twin), observations[STEPS * INPUTS];
    float d_logits[STEPS * ACTIONS], d_values[STEPS];
    gq_random random;

    cr_assert (weights && gradient && twin);
    printf ("seed 21\n");
    gq_random_seed (&random, 21);
    for (size_t i = 0; i < count; i++)
        twin[i] = (double)(weights[i] = (float)(0.7 * gq_random_normal (&random)));
    for (int round = 0; round < 2; round++) { /* begin must forget the first rollout */
        net->ops->begin (net);
        for (int t = 0; t < STEPS; t++) {
            float x[INPUTS], logits[ACTIONS], value;
            double twin_logits[ACTIONS], twin_value;
            for (int i = 0; i < INPUTS; i++)
                observations[t * INPUTS + i] = (double)(x[i] = (float)gq_random_normal (&random));
            for (int a = 0; a < ACTIONS; a++)
                d_logits[t * ACTIONS + a] = (float)gq_random_normal (&random);
            d_values[t] = (float)gq_random_normal (&random);
            net->ops->step (net, weights, x, logits, &value);
            const double *rest =
                twin_branch (twin, observations + t * INPUTS, ACTIONS, twin_logits);
            twin_branch (rest, observations + t * INPUTS, 1, &twin_value);
            /* Sums of 7 float32 products of order 1, twice: some 1e-6. */
            for (int a = 0; a < ACTIONS; a++)
                cr_assert_float_eq ((double)logits[a], twin_logits[a], 5e-6);
            cr_assert_float_eq ((double)value, twin_value, 5e-6);
            cr_assert_eq (net->ops->peek (net, weights, 0, x), value, "peek differs from step");
        }
        net->ops->backward (net, weights, d_logits, d_values, gradient);
    }
    for (size_t i = 0; i < count; i++) {
        const double h = 1e-5; /* error: h^2 of truncation, 1e-16 / h of rounding: 1e-10 */
        double kept = twin[i];
        twin[i] = kept + h;
        double up = twin_objective (twin, observations, d_logits, d_values);
        twin[i] = kept - h;
        double numeric = (up - twin_objective (twin, observations, d_logits, d_values)) / (2 * h);
        twin[i] = kept;
        cr_assert_float_eq ((double)gradient[i], numeric, 2e-5 + 1e-5 * fabs (numeric),
                            "element %zu: %g, numerically %g", i, (double)gradient[i], numeric);
    }
    free (weights), free (gradient), free (twin);
    net->ops->destroy (&net);
}

Test (actor, dense_net_has_pytorchs_names_and_shapes)
{
    static const struct {
        const char *name;
        uint64_t shape[2];
    } expected[] = {{"pi1.weight", {HIDDEN, INPUTS}}, {"pi1.bias", {HIDDEN}},
                    {"pi2.weight", {HIDDEN, HIDDEN}}, {"pi2.bias", {HIDDEN}},
                    {"pi.weight", {ACTIONS, HIDDEN}}, {"pi.bias", {ACTIONS}},
                    {"v1.weight", {HIDDEN, INPUTS}},  {"v1.bias", {HIDDEN}},
                    {"v2.weight", {HIDDEN, HIDDEN}},  {"v2.bias", {HIDDEN}},
                    {"v.weight", {1, HIDDEN}},        {"v.bias", {1}}};
    gq_net *net = make_dense (1);

    cr_assert_eq (net->tensor_count, 12u);
    for (size_t i = 0; i < 12; i++) {
        cr_assert_str_eq (net->tensors[i].name, expected[i].name);
        cr_assert_eq (net->tensors[i].rank, expected[i].shape[1] ? 2 : 1);
        cr_assert_arr_eq (net->tensors[i].shape, expected[i].shape, sizeof expected[i].shape);
    }
    net->ops->destroy (&net);
    cr_assert_null (net);
}

Test (actor, first_weights_follow_from_the_seed_and_stay_within_their_bounds)
{
    gq_net *net = make_dense (1);
    size_t count = net->element_count;
    float *one = calloc (count, sizeof *one), *two = calloc (count, sizeof *two);

    cr_assert (one && two);
    net->ops->initialise (net, 3, one);
    net->ops->initialise (net, 3, two);
    cr_assert_arr_eq (one, two, count * sizeof *one);
    net->ops->initialise (net, 4, two);
    cr_assert_arr_neq (one, two, count * sizeof *one);
    for (size_t i = 0; i < count; i++) /* the widest bound is that of the smallest fan in */
        cr_assert (one[i] != 0 && fabsf (one[i]) <= 1 / sqrtf (INPUTS));
    free (one), free (two);
    net->ops->destroy (&net);
}

Test (actor, nan_weights_show_in_the_dense_gradient)
{
    gq_net *net = make_dense (1);
    size_t count = net->element_count;
    float *weights = calloc (count, sizeof *weights), *gradient = calloc (count, sizeof *gradient);
    float x[INPUTS] = {1, 1, 1, 1, 1}, logits[ACTIONS], value, d_logits[ACTIONS] = {1}, d_value = 1;

    cr_assert (weights && gradient);
    weights[0] = NAN;
    net->ops->begin (net);
    net->ops->step (net, weights, x, logits, &value);
    cr_assert (isnan (logits[0]) && !isnan (value));
    net->ops->backward (net, weights, d_logits, &d_value, gradient);
    cr_assert (isnan (gradient[0]));
    free (weights), free (gradient);
    net->ops->destroy (&net);
}

Test (actor, dense_net_refuses_sizes_it_cannot_have)
{
    static const gq_net_config wrong[] = {{.observation_rank = 1,
                                           .observation_shape = {0},
                                           .action_count = 2,
                                           .hidden = 4,
                                           .rollout_max = 1},
                                          {.observation_rank = 2,
                                           .observation_shape = {UINT64_MAX, 2},
                                           .action_count = 2,
                                           .hidden = 4,
                                           .rollout_max = 1},
                                          {.observation_rank = 1,
                                           .observation_shape = {4},
                                           .action_count = 0,
                                           .hidden = 4,
                                           .rollout_max = 1},
                                          {.observation_rank = 1,
                                           .observation_shape = {4},
                                           .action_count = 2,
                                           .hidden = 0,
                                           .rollout_max = 1},
                                          {.observation_rank = 1,
                                           .observation_shape = {1 << 24},
                                           .action_count = 2,
                                           .hidden = 4096,
                                           .rollout_max = 1}};

    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        gq_net *net = NULL;
        gq_error error = {""};
        cr_assert_eq (gq_net_dense.create (&net, &wrong[i], &error), GQ_INVALID, "case %zu", i);
        cr_assert_null (net);
        cr_assert_neq (error.text[0], '\0');
    }
}
