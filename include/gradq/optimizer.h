/*
 * The plug-in ABI: what an update rule must bring.  docs/PLUGINS.md builds one step by step.
 *
 * A plug-in is a shared object that exports one `const gq_optimizer gq_optimizer_plugin`.  It owns
 * no memory and no thread: the host holds weights, state slots and scalars, clips, schedules the
 * learning rate, checks that gradients are finite, and calls
 *
 *     begin   once per step: advance the scalars, compute the step's constants
 *     apply   any number of times, for disjoint ranges of the vector, perhaps on several threads
 *
 * apply never writes what it reads: the host keeps the state from before the step until the range
 * is done, and makes an interrupted step whole again from it.
 *
 * Bit-for-bit replay rests on `apply` being element-wise float32 with +, -, *, /, sqrtf and
 * comparisons only, compiled with -ffp-contract=off and without -ffast-math.
 */
#ifndef GRADQ_OPTIMIZER_H
#define GRADQ_OPTIMIZER_H

#include <stddef.h>
#include <stdint.h>

#include "gradq/limits.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GQ_OPTIMIZER_ABI    2
#define GQ_OPTIMIZER_SYMBOL "gq_optimizer_plugin"
#define GQ_CONSTANTS_MAX    16

/* One hyperparameter.  A table of them ends with a row whose name is NULL. */
typedef struct gq_setting {
    const char *name;
    double value;        /* default; with choices: the index of the default */
    double min, max;     /* both allowed */
    const char *choices; /* NULL: a number.  "torch|tensorflow": a word, stored as its index */
    const char *help;    /* one line, with the unit or the formula's symbol */
} gq_setting;

/* What begin gets and gives. */
typedef struct gq_step {
    const double *settings; /* in the table's order */
    double lr_factor;       /* of the host's schedule; 1 when there is none */
    uint64_t step;          /* 1 for the first step of this state */
    double *scalars;        /* [scalar count], the plug-in's own, kept in checkpoints */
    float *constants;       /* [GQ_CONSTANTS_MAX], out: what apply needs */
} gq_step;

/*
 * One step on n elements: read weights[n], gradient[n] * scale and before[i][n], slot i's range
 * before the step; write every element of next[n] and of after[i][n], slot i's range after it.
 *
 * What is read and what is written never overlap.  Of an idle slot (below) both are NULL.  No
 * pointer is aligned to more than 4 bytes.  Any n >= 0.
 */
typedef void gq_apply (const float *constants, float scale, size_t n, const float *restrict weights,
                       float *restrict next, const float *restrict gradient,
                       const float *const restrict *before, float *const restrict *after);

/* The host picks the highest level that the CPU and --cpu allow and the plug-in brings. */
typedef enum gq_cpu {
    GQ_CPU_BASE, /* SSE2 on x86-64, whatever the compiler's default is elsewhere */
    GQ_CPU_AVX2,
    GQ_CPU_AVX512,
    GQ_CPU_COUNT
} gq_cpu;

typedef struct gq_optimizer {
    uint32_t abi;               /* GQ_OPTIMIZER_ABI */
    uint32_t size;              /* sizeof (gq_optimizer) */
    const char *name;           /* [a-z0-9_]+ */
    const char *help;           /* one line: the rule and its source */
    const char *const *slots;   /* state vectors by PyTorch's names ("exp_avg"), NULL-terminated */
    const char *const *scalars; /* scalar state ("beta1_power"), NULL-terminated */
    const gq_setting *settings;
    /* The initial value of a slot or scalar; NULL: all zero. */
    double (*initial) (const double *settings, const char *slot_or_scalar);
    void (*begin) (const gq_step *step);
    gq_apply *apply[GQ_CPU_COUNT]; /* [GQ_CPU_BASE] is required, the others may be NULL */
    /* Which slots apply leaves alone under these settings, bit i for slot i; NULL: none. */
    uint32_t (*idle) (const double *settings);
} gq_optimizer;

/*
 * Variants of one kernel: write it once as
 *
 *     static GQ_KERNEL void adam_kernel (GQ_APPLY_PARAMETERS) { ... }
 *     GQ_APPLY_VARIANTS (adam_kernel)
 *     ... .apply = GQ_APPLY_TABLE (adam_kernel)
 */
#define GQ_KERNEL inline __attribute__ ((always_inline))
#define GQ_APPLY_PARAMETERS                                                                        \
    const float *constants, float scale, size_t n, const float *restrict weights,                  \
        float *restrict next, const float *restrict gradient, const float *const restrict *before, \
        float *const restrict *after

#define GQ_APPLY_VARIANT(kernel, suffix, attribute)                           \
    attribute static void kernel##_##suffix (GQ_APPLY_PARAMETERS)             \
    {                                                                         \
        kernel (constants, scale, n, weights, next, gradient, before, after); \
    }

#if defined(__x86_64__)
#define GQ_APPLY_VARIANTS(kernel)                                                   \
    GQ_APPLY_VARIANT (kernel, base, )                                               \
    GQ_APPLY_VARIANT (kernel, avx2, __attribute__ ((target ("avx2"))))              \
    GQ_APPLY_VARIANT (kernel, avx512,                                               \
                      __attribute__ ((target ("avx512f,avx512vl,avx512dq,avx512bw," \
                                              "prefer-vector-width=512"))))
#define GQ_APPLY_TABLE(kernel)                                        \
    {                                                                 \
        [GQ_CPU_BASE] = kernel##_base, [GQ_CPU_AVX2] = kernel##_avx2, \
        [GQ_CPU_AVX512] = kernel##_avx512                             \
    }
#else
#define GQ_APPLY_VARIANTS(kernel) GQ_APPLY_VARIANT (kernel, base, )
#define GQ_APPLY_TABLE(kernel)        \
    {                                 \
        [GQ_CPU_BASE] = kernel##_base \
    }
#endif

#ifdef __cplusplus
}
#endif
#endif
