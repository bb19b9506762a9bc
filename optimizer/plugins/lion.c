/*
 * Lion (Chen et al., 2023, arXiv:2302.06675, algorithm 2): the sign of an interpolated momentum.
 * Step 5 of a gradient's path, and the worked example of docs/PLUGINS.md.
 *
 *     c <- beta1 m + (1 - beta1) g
 *     w <- w (1 - lr weight_decay) - lr sign (c)          sign (0) = 0
 *     m <- beta2 m + (1 - beta2) g
 *
 * Never uses anything in the kernel but float32 + - * / and comparisons: its bits are the same on
 * every CPU.
 */
#include "gradq/optimizer.h"

/* Betas stay below 1 also as float32: at 1 no gradient would ever enter m. */
#define BELOW_ONE 0x1.fffffep-1
/* Keeps every constant far inside the range of float32. */
#define LARGEST 1e4

enum { LR, BETA1, BETA2, WEIGHT_DECAY };
static const gq_setting settings[] = {
    [LR] = {"lr", 1e-4, 0, LARGEST, NULL, "learning rate: the size of every step"},
    [BETA1] = {"beta1", 0.9, 0, BELOW_ONE, NULL, "share of the momentum in the direction"},
    [BETA2] = {"beta2", 0.99, 0, BELOW_ONE, NULL, "decay of the momentum"},
    [WEIGHT_DECAY] = {"weight_decay", 0, 0, LARGEST, NULL, "decay of the weights, times lr"},
    {.name = NULL}};

enum { EXP_AVG };
static const char *const slot_names[] = {"exp_avg", NULL};
static const char *const scalar_names[] = {NULL};

/* What begin hands to the kernel. */
enum { C_LR, C_BETA1, C_BETA1_REST, C_BETA2, C_BETA2_REST, C_KEEP };

static void
begin (const gq_step *step)
{
    const double *values = step->settings;
    double lr = values[LR] * step->lr_factor;

    float *constants = step->constants;
    constants[C_LR] = (float)lr;
    constants[C_BETA1] = (float)values[BETA1];
    constants[C_BETA1_REST] = (float)(1 - values[BETA1]);
    constants[C_BETA2] = (float)values[BETA2];
    constants[C_BETA2_REST] = (float)(1 - values[BETA2]);
    constants[C_KEEP] = (float)(1 - lr * values[WEIGHT_DECAY]);
}

static GQ_KERNEL void
kernel (GQ_APPLY_PARAMETERS)
{
    const float lr = constants[C_LR], keep = constants[C_KEEP];
    const float beta1 = constants[C_BETA1], beta1_rest = constants[C_BETA1_REST];
    const float beta2 = constants[C_BETA2], beta2_rest = constants[C_BETA2_REST];
    const float *restrict exp_avg = before[EXP_AVG];
    float *restrict exp_avg_after = after[EXP_AVG];

    for (size_t i = 0; i < n; i++) {
        float g = gradient[i] * scale;
        float c = beta1 * exp_avg[i] + beta1_rest * g;
        float signed_lr = c > 0 ? lr : c < 0 ? -lr : 0;
        exp_avg_after[i] = beta2 * exp_avg[i] + beta2_rest * g;
        next[i] = weights[i] * keep - signed_lr;
    }
}

GQ_APPLY_VARIANTS (kernel)

__attribute__ ((visibility ("default"))) const gq_optimizer gq_optimizer_plugin = {
    .abi = GQ_OPTIMIZER_ABI,
    .size = sizeof (gq_optimizer),
    .name = "lion",
    .help = "Lion, arXiv:2302.06675: steps of one size, by the sign of the momentum",
    .slots = slot_names,
    .scalars = scalar_names,
    .settings = settings,
    .begin = begin,
    .apply = GQ_APPLY_TABLE (kernel),
};
