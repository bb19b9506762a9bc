/*
 * Adagrad (Duchi, Hazan and Singer, 2011, JMLR 12), as torch.optim.Adagrad computes it without
 * lr_decay; eps=0 initial_accumulator_value=0.1 is TensorFlow's.  Step 5 of a gradient's path.
 *
 *     s <- s + g g
 *     w <- w - lr g / (sqrt (s) + eps)
 *
 * Never divides by zero: eps may be 0 here, and a parameter whose sum is still 0 then stays put.
 */
#include "gradq/optimizer.h"

#include <math.h>
#include <string.h>

/* Keeps every constant far inside the range of float32. */
#define LARGEST 1e4

enum { LR, EPS, INITIAL };
static const gq_setting settings[] = {
    [LR] = {"lr", 1e-2, 0, LARGEST, NULL, "learning rate"},
    [EPS] = {"eps", 1e-10, 0, LARGEST, NULL, "added to the denominator"},
    [INITIAL] = {"initial_accumulator_value", 0, 0, LARGEST, NULL, "sum of squares at the start"},
    {.name = NULL}};

enum { SUM };
static const char *const slot_names[] = {"sum", NULL};
static const char *const scalar_names[] = {NULL};

/* What begin hands to the kernel. */
enum { C_LR, C_EPS };

static double
initial (const double *values, const char *name)
{
    return strcmp (name, "sum") == 0 ? values[INITIAL] : 0;
}

static void
begin (const gq_step *step)
{
    step->constants[C_LR] = (float)(step->settings[LR] * step->lr_factor);
    step->constants[C_EPS] = (float)step->settings[EPS];
}

static GQ_KERNEL void
kernel (GQ_APPLY_PARAMETERS)
{
    const float lr = constants[C_LR], eps = constants[C_EPS];
    const float *restrict sum = before[SUM];
    float *restrict sum_after = after[SUM];

    for (size_t i = 0; i < n; i++) {
        float g = gradient[i] * scale;
        float s = sum[i] + g * g;
        float denominator = sqrtf (s) + eps;
        sum_after[i] = s;
        /* With eps 0, g * g may be 0 because g is, or because it underflows. */
        float direction = denominator > 0 ? g / denominator : 0;
        next[i] = weights[i] - lr * direction;
    }
}

GQ_APPLY_VARIANTS (kernel)

__attribute__ ((visibility ("default"))) const gq_optimizer gq_optimizer_plugin = {
    .abi = GQ_OPTIMIZER_ABI,
    .size = sizeof (gq_optimizer),
    .name = "adagrad",
    .help = "Adagrad, Duchi et al. 2011, as in PyTorch",
    .slots = slot_names,
    .scalars = scalar_names,
    .settings = settings,
    .initial = initial,
    .begin = begin,
    .apply = GQ_APPLY_TABLE (kernel),
};
