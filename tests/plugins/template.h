/*
 * A sound plug-in (w <- w - lr g) with one place for a mistake: the files beside this one define
 * the macro of that place and include this.  Test data; step 5 of a gradient's path gone wrong.
 */
#include "gradq/optimizer.h"

#ifndef BAD_ABI
#define BAD_ABI GQ_OPTIMIZER_ABI
#endif
#ifndef BAD_SIZE
#define BAD_SIZE sizeof (gq_optimizer)
#endif
#ifndef BAD_NAME
#define BAD_NAME "good"
#endif
#ifndef BAD_SLOTS
#define BAD_SLOTS NULL
#endif
#ifndef BAD_SCALARS
#define BAD_SCALARS NULL
#endif
#ifndef BAD_BEGIN
#define BAD_BEGIN begin
#endif
#ifndef BAD_APPLY
#define BAD_APPLY kernel
#endif
#ifndef BAD_LR
#define BAD_LR "lr"
#endif
#ifndef BAD_ROWS
#define BAD_ROWS
#endif
#ifndef BAD_SYMBOL
#define BAD_SYMBOL gq_optimizer_plugin
#endif

static const char *const slot_names[] = {BAD_SLOTS, NULL};
static const char *const scalar_names[] = {BAD_SCALARS, NULL};
static const gq_setting settings[] = {{BAD_LR, 0.5, 0, 1, NULL, "learning rate"},
                                      BAD_ROWS{.name = NULL}};

static void __attribute__ ((unused)) begin (const gq_step *step)
{
    step->constants[0] = (float)(step->settings[0] * step->lr_factor);
}

static void __attribute__ ((unused)) kernel (GQ_APPLY_PARAMETERS)
{
    (void)before;
    (void)after;
    for (size_t i = 0; i < n; i++)
        next[i] = weights[i] - constants[0] * (gradient[i] * scale);
}

__attribute__ ((visibility ("default"))) const gq_optimizer BAD_SYMBOL = {
    .abi = BAD_ABI,
    .size = BAD_SIZE,
    .name = BAD_NAME,
    .help = "for tests",
    .slots = slot_names,
    .scalars = scalar_names,
    .settings = settings,
    .begin = BAD_BEGIN,
    .apply = {[GQ_CPU_BASE] = BAD_APPLY},
};
