/*
 * RMSProp, as torch.optim.RMSprop (epsilon outside the root) and as the A3C paper and TensorFlow
 * (epsilon inside) compute it.  Step 5 of a gradient's path: one step of the weights.
 *
 *     v <- alpha v + (1 - alpha) g g                      Tieleman and Hinton, 2012, lecture 6.5
 *     outside:  d = g / (sqrt (v) + eps)
 *     inside:   d = g / sqrt (v + eps)                    Mnih et al., 2016, arXiv:1602.01783
 *     w <- w - lr d,   or with momentum   b <- momentum b + d,  w <- w - lr b
 *
 * Never touches momentum_buffer while momentum is 0: the slot then costs address space, no memory.
 */
#include "gradq/optimizer.h"

#include <float.h>
#include <math.h>

/* alpha stays below 1 also as float32: at 1 no gradient would ever enter v. */
#define BELOW_ONE 0x1.fffffep-1
/* Keeps every constant far inside the range of float32. */
#define LARGEST 1e4

enum { LR, ALPHA, EPS, EPSILON, MOMENTUM };
enum { EPSILON_INSIDE, EPSILON_OUTSIDE };
static const gq_setting settings[] = {
    [LR] = {"lr", 1e-2, 0, LARGEST, NULL, "learning rate"},
    [ALPHA] = {"alpha", 0.99, 0, BELOW_ONE, NULL, "decay of the mean of squared gradients"},
    /* not 0: a parameter that never had a gradient would be 0 / 0 */
    [EPS] = {"eps", 1e-8, FLT_MIN, LARGEST, NULL, "added to the denominator"},
    [EPSILON] = {"epsilon", EPSILON_OUTSIDE, EPSILON_INSIDE, EPSILON_OUTSIDE, "inside|outside",
                 "eps under the square root (A3C, TensorFlow) or beside it (PyTorch)"},
    [MOMENTUM] = {"momentum", 0, 0, 1, NULL, "decay of the sum of steps; 0: none"},
    {.name = NULL}};

enum { SQUARE_AVG, MOMENTUM_BUFFER };
static const char *const slot_names[] = {"square_avg", "momentum_buffer", NULL};
static const char *const scalar_names[] = {NULL};

/* What begin hands to the kernel. */
enum { C_LR, C_ALPHA, C_ALPHA_REST, C_EPS_INSIDE, C_EPS_OUTSIDE, C_MOMENTUM };

static void
begin (const gq_step *step)
{
    const double *values = step->settings;
    int inside = values[EPSILON] == EPSILON_INSIDE;

    float *constants = step->constants;
    constants[C_LR] = (float)(values[LR] * step->lr_factor);
    constants[C_ALPHA] = (float)values[ALPHA];
    constants[C_ALPHA_REST] = (float)(1 - values[ALPHA]);
    /* One formula serves both: adding 0 to a number that is not negative is exact. */
    constants[C_EPS_INSIDE] = inside ? (float)values[EPS] : 0;
    constants[C_EPS_OUTSIDE] = inside ? 0 : (float)values[EPS];
    constants[C_MOMENTUM] = (float)values[MOMENTUM];
}

/* Without momentum its buffer is left alone: it takes no time, and no memory if it never had. */
static uint32_t
idle (const double *values)
{
    return values[MOMENTUM] == 0 ? 1u << MOMENTUM_BUFFER : 0;
}

static GQ_KERNEL void
kernel (GQ_APPLY_PARAMETERS)
{
    const float lr = constants[C_LR], momentum = constants[C_MOMENTUM];
    const float alpha = constants[C_ALPHA], alpha_rest = constants[C_ALPHA_REST];
    const float inside = constants[C_EPS_INSIDE], outside = constants[C_EPS_OUTSIDE];
    const float *restrict square_avg = before[SQUARE_AVG];
    float *restrict square_after = after[SQUARE_AVG];
    const float *restrict momentum_buffer = before[MOMENTUM_BUFFER];
    float *restrict momentum_after = after[MOMENTUM_BUFFER];

    if (momentum == 0) {
        for (size_t i = 0; i < n; i++) {
            float g = gradient[i] * scale;
            float v = alpha * square_avg[i] + alpha_rest * (g * g);
            square_after[i] = v;
            next[i] = weights[i] - lr * (g / (sqrtf (v + inside) + outside));
        }
        return;
    }
    for (size_t i = 0; i < n; i++) {
        float g = gradient[i] * scale;
        float v = alpha * square_avg[i] + alpha_rest * (g * g);
        float b = momentum * momentum_buffer[i] + g / (sqrtf (v + inside) + outside);
        square_after[i] = v;
        momentum_after[i] = b;
        next[i] = weights[i] - lr * b;
    }
}

GQ_APPLY_VARIANTS (kernel)

__attribute__ ((visibility ("default"))) const gq_optimizer gq_optimizer_plugin = {
    .abi = GQ_OPTIMIZER_ABI,
    .size = sizeof (gq_optimizer),
    .name = "rmsprop",
    .help = "RMSProp; epsilon inside the root as in A3C, or outside as in PyTorch",
    .slots = slot_names,
    .scalars = scalar_names,
    .settings = settings,
    .begin = begin,
    .apply = GQ_APPLY_TABLE (kernel),
    .idle = idle,
};
