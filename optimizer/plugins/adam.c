/*
 * Adam (Kingma and Ba, 2015, arXiv:1412.6980, algorithm 1), as torch.optim.Adam and as TensorFlow
 * compute it.  Step 5 of a gradient's path: one step of the weights.
 *
 *     g <- gradient + weight_decay w
 *     m <- beta1 m + (1 - beta1) g            v <- beta2 v + (1 - beta2) g g
 *     torch:       w <- w - lr / (1 - beta1^t) * m / (sqrt (v) / sqrt (1 - beta2^t) + eps)
 *     tensorflow:  w <- w - lr sqrt (1 - beta2^t) / (1 - beta1^t) * m / (sqrt (v) + eps)
 *
 * Never calls pow or any other function of libm whose bits differ between CPUs: the powers of the
 * betas are state, multiplied once a step.
 */
#include "gradq/optimizer.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* Betas stay below 1 also as float32, or the bias correction would divide by zero. */
#define BELOW_ONE 0x1.fffffep-1
/* Keeps every constant finite in float32 with the largest beta: 1e4 / (1 - BELOW_ONE) is 2e11. */
#define LARGEST 1e4

enum { LR, BETA1, BETA2, EPS, EPSILON, WEIGHT_DECAY };
enum { EPSILON_TORCH, EPSILON_TENSORFLOW };
static const gq_setting settings[] = {
    [LR] = {"lr", 1e-3, 0, LARGEST, NULL, "learning rate"},
    [BETA1] = {"beta1", 0.9, 0, BELOW_ONE, NULL, "decay of the mean of gradients"},
    [BETA2] = {"beta2", 0.999, 0, BELOW_ONE, NULL, "decay of the mean of their squares"},
    /* not 0: a parameter that never had a gradient would be 0 / 0 */
    [EPS] = {"eps", 1e-8, FLT_MIN, LARGEST, NULL, "added to the denominator"},
    [EPSILON] = {"epsilon", EPSILON_TORCH, EPSILON_TORCH, EPSILON_TENSORFLOW, "torch|tensorflow",
                 "eps beside the corrected sqrt(v) (torch) or beside the bare one (tensorflow)"},
    [WEIGHT_DECAY] = {"weight_decay", 0, 0, LARGEST, NULL, "L2 penalty, added to the gradient"},
    {.name = NULL}};

enum { EXP_AVG, EXP_AVG_SQ };
static const char *const slot_names[] = {"exp_avg", "exp_avg_sq", NULL};

enum { BETA1_POWER, BETA2_POWER };
static const char *const scalar_names[] = {"beta1_power", "beta2_power", NULL};

/* What begin hands to the kernel. */
enum { C_BETA1, C_BETA1_REST, C_BETA2, C_BETA2_REST, C_STEP, C_ROOT, C_EPS, C_DECAY };

static double
initial (const double *values, const char *name)
{
    (void)values;
    int power = strcmp (name, "beta1_power") == 0 || strcmp (name, "beta2_power") == 0;
    return power ? 1 : 0; /* beta^0 */
}

static void
begin (const gq_step *step)
{
    const double *values = step->settings;
    step->scalars[BETA1_POWER] *= values[BETA1];
    step->scalars[BETA2_POWER] *= values[BETA2];
    double lr = values[LR] * step->lr_factor;
    double correction1 = 1 - step->scalars[BETA1_POWER];
    double correction2 = sqrt (1 - step->scalars[BETA2_POWER]);
    int torch = values[EPSILON] == EPSILON_TORCH;

    float *constants = step->constants;
    constants[C_BETA1] = (float)values[BETA1];
    constants[C_BETA1_REST] = (float)(1 - values[BETA1]);
    constants[C_BETA2] = (float)values[BETA2];
    constants[C_BETA2_REST] = (float)(1 - values[BETA2]);
    /* The two conventions differ in these two numbers only; times 1 is exact. */
    constants[C_STEP] = (float)(torch ? lr / correction1 : lr * correction2 / correction1);
    constants[C_ROOT] = (float)(torch ? 1 / correction2 : 1);
    constants[C_EPS] = (float)values[EPS];
    constants[C_DECAY] = (float)values[WEIGHT_DECAY];
}

static GQ_KERNEL void
kernel (GQ_APPLY_PARAMETERS)
{
    const float beta1 = constants[C_BETA1], beta1_rest = constants[C_BETA1_REST];
    const float beta2 = constants[C_BETA2], beta2_rest = constants[C_BETA2_REST];
    const float step = constants[C_STEP], root = constants[C_ROOT], eps = constants[C_EPS];
    const float decay = constants[C_DECAY];
    const float *restrict exp_avg = before[EXP_AVG];
    const float *restrict exp_avg_sq = before[EXP_AVG_SQ];
    float *restrict exp_avg_after = after[EXP_AVG];
    float *restrict exp_avg_sq_after = after[EXP_AVG_SQ];

    for (size_t i = 0; i < n; i++) {
        float g = gradient[i] * scale + decay * weights[i];
        float m = beta1 * exp_avg[i] + beta1_rest * g;
        float v = beta2 * exp_avg_sq[i] + beta2_rest * (g * g);
        exp_avg_after[i] = m;
        exp_avg_sq_after[i] = v;
        next[i] = weights[i] - step * (m / (sqrtf (v) * root + eps));
    }
}

GQ_APPLY_VARIANTS (kernel)

__attribute__ ((visibility ("default"))) const gq_optimizer gq_optimizer_plugin = {
    .abi = GQ_OPTIMIZER_ABI,
    .size = sizeof (gq_optimizer),
    .name = "adam",
    .help = "Adam, arXiv:1412.6980; epsilon as in PyTorch or as in TensorFlow",
    .slots = slot_names,
    .scalars = scalar_names,
    .settings = settings,
    .initial = initial,
    .begin = begin,
    .apply = GQ_APPLY_TABLE (kernel),
};
