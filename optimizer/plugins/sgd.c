/*
 * Stochastic gradient descent with momentum or Nesterov's variant, as torch.optim.SGD computes it
 * (Sutskever et al., 2013, with PyTorch's placing of lr).  Step 5 of a gradient's path.
 *
 *     b <- momentum b + g          (b starts at 0, so the first b is g, as PyTorch's is)
 *     plain:     w <- w - lr g
 *     momentum:  w <- w - lr b
 *     nesterov:  w <- w - lr (g + momentum b)
 *
 * Never touches momentum_buffer while momentum is 0: the slot then costs address space, no memory.
 */
#include "gradq/optimizer.h"

/* Keeps every constant far inside the range of float32. */
#define LARGEST 1e4

enum { LR, MOMENTUM, NESTEROV };
static const gq_setting settings[] = {
    [LR] = {"lr", 1e-2, 0, LARGEST, NULL, "learning rate"},
    [MOMENTUM] = {"momentum", 0, 0, 1, NULL, "decay of the sum of gradients; 0: none"},
    [NESTEROV] = {"nesterov", 0, 0, 1, "false|true", "look ahead; means nothing at momentum 0"},
    {.name = NULL}};

enum { MOMENTUM_BUFFER };
static const char *const slot_names[] = {"momentum_buffer", NULL};
static const char *const scalar_names[] = {NULL};

/* What begin hands to the kernel. */
enum { C_LR, C_MOMENTUM, C_NESTEROV };

static void
begin (const gq_step *step)
{
    step->constants[C_LR] = (float)(step->settings[LR] * step->lr_factor);
    step->constants[C_MOMENTUM] = (float)step->settings[MOMENTUM];
    step->constants[C_NESTEROV] = (float)step->settings[NESTEROV];
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
    const float *restrict momentum_buffer = before[MOMENTUM_BUFFER];
    float *restrict momentum_after = after[MOMENTUM_BUFFER];

    if (momentum == 0) {
        for (size_t i = 0; i < n; i++)
            next[i] = weights[i] - lr * (gradient[i] * scale);
        return;
    }
    if (constants[C_NESTEROV] == 0) {
        for (size_t i = 0; i < n; i++) {
            float b = momentum * momentum_buffer[i] + gradient[i] * scale;
            momentum_after[i] = b;
            next[i] = weights[i] - lr * b;
        }
        return;
    }
    for (size_t i = 0; i < n; i++) {
        float g = gradient[i] * scale;
        float b = momentum * momentum_buffer[i] + g;
        momentum_after[i] = b;
        next[i] = weights[i] - lr * (g + momentum * b);
    }
}

GQ_APPLY_VARIANTS (kernel)

__attribute__ ((visibility ("default"))) const gq_optimizer gq_optimizer_plugin = {
    .abi = GQ_OPTIMIZER_ABI,
    .size = sizeof (gq_optimizer),
    .name = "sgd",
    .help = "stochastic gradient descent, plain, with momentum or Nesterov's, as in PyTorch",
    .slots = slot_names,
    .scalars = scalar_names,
    .settings = settings,
    .begin = begin,
    .apply = GQ_APPLY_TABLE (kernel),
    .idle = idle,
};
