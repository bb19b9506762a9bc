/*
 * Plug-in host: step 5 of a gradient's path, one step of the update rule.  It owns all that the
 * rule remembers: settings, slots, scalars, the number of steps.
 *
 * Never writes to the weights that it reads from: readers may still hold them.
 */
#include "plugin.h"

#include <assert.h>
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "crash.h"
#include "plugin_open.h"
#include "rule_settings.h"

#define SETTINGS_MAX (GQ_SETTINGS_MAX + GQ_HOST_SETTING_COUNT)

/* Shorter vectors are done before a second thread is awake. */
#define CREW_ELEMENTS_MIN 65536

struct gq_rule {
    void *library; /* of dlopen; closed last, the tables below point into it */
    const gq_optimizer *plugin;
    gq_cpu level;
    size_t own_count;              /* settings of the plug-in; the host's follow */
    gq_setting rows[SETTINGS_MAX]; /* [own_count + GQ_HOST_SETTING_COUNT] */
    double values[SETTINGS_MAX];
    uint32_t idle;       /* bit i: slot i stays where and as it is */
    gq_crew *crew;       /* borrowed; NULL: the calling thread does all */
    gq_rule_state state; /* with the plug-in's names */
    double last_norm;
};

/* What one step needs. */
/* Alignment that plug-ins are promised. */
#define VECTOR_BYTES 64

typedef struct rule_pass {
    const gq_rule *rule;
    const float *weights, *gradient, *constants;
    float *next;
    float scale;
    bool in_place;              /* the gradient is used where it lies */
    float *after[GQ_SLOTS_MAX]; /* where slots lie behind it, NULL: where they are */
    atomic_bool unsound;        /* an element of the gradient was not finite */
} rule_pass;

static const char *const level_names[GQ_CPU_COUNT] = {[GQ_CPU_BASE] =
#if defined(__x86_64__)
                                                          "sse2",
#else
                                                          "base",
#endif
                                                      [GQ_CPU_AVX2] = "avx2",
                                                      [GQ_CPU_AVX512] = "avx512"};

/* ---- which kernel ---- */

/* The same features that GQ_APPLY_VARIANTS compiles for. */
static bool
cpu_has (gq_cpu level)
{
#if defined(__x86_64__)
    if (level == GQ_CPU_AVX512)
        return __builtin_cpu_supports ("avx512f") && __builtin_cpu_supports ("avx512vl") &&
               __builtin_cpu_supports ("avx512dq") && __builtin_cpu_supports ("avx512bw");
    if (level == GQ_CPU_AVX2)
        return __builtin_cpu_supports ("avx2");
#endif
    return level == GQ_CPU_BASE;
}

static gq_status
choose_level (gq_cpu *level, const gq_optimizer *plugin, const char *cpu, gq_error *error)
{
    int most = GQ_CPU_COUNT - 1;
    if (strcmp (cpu, "auto") != 0) {
        while (most >= 0 && strcmp (cpu, level_names[most]) != 0)
            most--;
        if (most < 0)
            return gq_fail (error, GQ_INVALID, "cpu is auto, %s, avx2 or avx512, not \"%s\"",
                            level_names[GQ_CPU_BASE], cpu);
        if (!cpu_has ((gq_cpu)most))
            return gq_fail (error, GQ_INVALID,
                            "this CPU has no %s; take cpu auto, the results are the same bits",
                            cpu);
    }
    while (most > GQ_CPU_BASE && (!cpu_has ((gq_cpu)most) || plugin->apply[most] == NULL))
        most--;
    *level = (gq_cpu)most;
    return GQ_OK;
}

/* ---- the interface ---- */

/* Copies of the names, which outlive the plug-in.  Opening it checked that they fit. */
static void
name_state (gq_rule_state *state, const gq_optimizer *plugin)
{
    snprintf (state->name, sizeof state->name, "%s", plugin->name);
    for (size_t i = 0; plugin->slots[i] != NULL; i++)
        snprintf (state->slot_names[state->slot_count++], GQ_RULE_WORD_MAX, "%s", plugin->slots[i]);
    for (size_t i = 0; plugin->scalars[i] != NULL; i++)
        snprintf (state->scalar_names[state->scalar_count++], GQ_RULE_WORD_MAX, "%s",
                  plugin->scalars[i]);
}

/* Index of the plug-in's setting lr; own_count: it has none. */
static size_t
lr_index (const gq_rule *rule)
{
    size_t index = 0;
    while (index < rule->own_count && strcmp (rule->rows[index].name, "lr") != 0)
        index++;
    return index;
}

/* The plug-in is open: take its tables, the words of the user and the kernel. */
static gq_status
configure (gq_rule *rule, const char *const *sets, size_t set_count, const char *cpu,
           gq_error *error)
{
    const gq_optimizer *plugin = rule->plugin;
    name_state (&rule->state, plugin);
    for (; plugin->settings[rule->own_count].name != NULL; rule->own_count++)
        rule->rows[rule->own_count] = plugin->settings[rule->own_count];
    memcpy (rule->rows + rule->own_count, gq_host_settings, sizeof gq_host_settings);
    gq_status status =
        gq_settings_parse (rule->values, rule->rows, rule->own_count + GQ_HOST_SETTING_COUNT, sets,
                           set_count, plugin->name, error);
    if (status == GQ_OK)
        status = gq_host_settings_check (rule->values + rule->own_count,
                                         lr_index (rule) < rule->own_count, plugin->name, error);
    if (status == GQ_OK)
        status = choose_level (&rule->level, plugin, cpu, error);
    if (status == GQ_OK && plugin->idle != NULL)
        rule->idle = plugin->idle (rule->values);
    return status;
}

gq_status
gq_rule_load (gq_rule **rule_p, const char *name, const char *directory, const char *const *sets,
              size_t set_count, const char *cpu, gq_error *warning, gq_error *error)
{
    assert (rule_p != NULL && name != NULL && cpu != NULL && (sets != NULL || set_count == 0));
    *rule_p = NULL;
    if (warning != NULL)
        warning->text[0] = '\0';
    gq_rule *rule = calloc (1, sizeof *rule);
    if (rule == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory while loading %.400s", name);
    gq_status status =
        gq_plugin_open (&rule->library, &rule->plugin, name, directory, warning, error);
    if (status == GQ_OK)
        status = configure (rule, sets, set_count, cpu, error);
    if (status == GQ_OK)
        *rule_p = rule;
    else
        gq_rule_free (&rule);
    return status;
}

void
gq_rule_free (gq_rule **rule_p)
{
    gq_rule *rule = *rule_p;
    if (rule == NULL)
        return;
    gq_rule_state_clear (&rule->state);
    if (rule->library != NULL)
        dlclose (rule->library);
    free (rule);
    *rule_p = NULL;
}

static double
initial_value (const gq_rule *rule, const char *name)
{
    return rule->plugin->initial == NULL ? 0 : rule->plugin->initial (rule->values, name);
}

/* Several threads need not wait for one another when slots move to where none of them lies. */
static uint64_t
slide_of (const gq_rule *rule, uint64_t n)
{
    return rule->crew == NULL || n < CREW_ELEMENTS_MIN ? GQ_SLIDE
                                                       : (n + GQ_SLIDE - 1) / GQ_SLIDE * GQ_SLIDE;
}

gq_status
gq_rule_use_crew (gq_rule *rule, gq_crew *crew)
{
    const gq_rule_state before = rule->state;
    rule->crew = crew;
    if (before.n == 0 || before.slide == slide_of (rule, before.n))
        return GQ_OK;
    memset (rule->state.rings, 0, sizeof rule->state.rings);
    if (gq_rule_state_allocate (&rule->state, before.n, slide_of (rule, before.n)) != GQ_OK) {
        rule->state = before;
        return GQ_MEMORY;
    }
    for (size_t i = 0; i < before.slot_count; i++)
        memcpy (rule->state.slots[i], before.slots[i], (size_t)before.n * sizeof (float));
    gq_rule_state_free_rings (&before);
    return GQ_OK;
}

gq_status
gq_rule_reset (gq_rule *rule, uint64_t n)
{
    gq_rule_state *state = &rule->state;
    if (gq_rule_state_allocate (state, n, slide_of (rule, n)) != GQ_OK)
        return GQ_MEMORY;
    for (size_t i = 0; i < state->slot_count; i++) {
        float value = (float)initial_value (rule, state->slot_names[i]);
        for (uint64_t j = 0; value != 0 && j < n; j++)
            state->slots[i][j] = value;
    }
    for (size_t i = 0; i < state->scalar_count; i++)
        state->scalars[i] = initial_value (rule, state->scalar_names[i]);
    state->steps = 0;
    rule->last_norm = 0;
    return GQ_OK;
}

static void
exchange (gq_rule_state *a, gq_rule_state *b)
{
    gq_rule_state moved = *a;
    *a = *b;
    *b = moved;
}

gq_status
gq_rule_take_over (gq_rule *rule, gq_rule *from, gq_rule_state *retired, uint64_t version,
                   uint64_t n)
{
    assert (from->state.n == n && (retired->name[0] == '\0' || retired->n == n));
    if (gq_rule_state_same (&rule->state, &from->state)) {
        exchange (&rule->state, &from->state);
        rule->last_norm = from->last_norm;
        return GQ_OK;
    }
    if (gq_rule_state_same (&rule->state, retired))
        exchange (&rule->state, retired);
    else if (gq_rule_reset (rule, n) != GQ_OK)
        return GQ_MEMORY;
    rule->state.version = 0;
    gq_rule_state_clear (retired);
    exchange (retired, &from->state);
    retired->version = version;
    return GQ_OK;
}

/* As torch.nn.utils.clip_grad_norm_: min (1, clip / (norm + 1e-6)); the 1e-6 is PyTorch's. */
static float
clipped_scale (gq_rule *rule, const float *gradient, float scale)
{
    double clip = rule->values[rule->own_count + GQ_HOST_CLIP_NORM];
    rule->last_norm = 0;
    if (clip == 0)
        return scale;
    rule->last_norm = fabs ((double)scale) * sqrt (gq_sum_squares (gradient, rule->state.n));
    double factor = clip / (rule->last_norm + 1e-6);
    /* Not a number: of a gradient that holds one, against its actor's word.  It must not pass. */
    return factor >= 1 ? scale : factor < 1 ? (float)(scale * factor) : 0;
}

gq_status
gq_rule_install (gq_rule *rule, const gq_rule_place *from, const double *scalars, uint64_t steps)
{
    gq_rule_state *state = &rule->state;
    gq_status status = gq_rule_state_allocate (state, state->n, from->slide);
    if (status != GQ_OK)
        return status;
    for (size_t i = 0; i < state->slot_count; i++) {
        memcpy (state->rings[i], from->rings[i], (size_t)state->ring * sizeof (float));
        state->slots[i] = state->rings[i] + from->at[i];
    }
    memcpy (state->scalars, scalars, state->scalar_count * sizeof *scalars);
    state->steps = steps;
    return GQ_OK;
}

gq_status
gq_rule_move (gq_rule *rule, int fd, const uint64_t *at)
{
    return gq_rule_state_move (&rule->state, fd, at);
}

/* Where slot i is to lie after a step; NULL: the step leaves it alone. */
static float *
slot_after (const gq_rule *rule, size_t index)
{
    const gq_rule_state *state = &rule->state;
    if ((rule->idle >> index & 1) != 0)
        return NULL;
    const uint64_t at = (uint64_t)(state->slots[index] - state->rings[index]);
    return state->rings[index] + (at >= state->slide ? at : at + state->ring) - state->slide;
}

/* Block k of a step. */
static void
apply_block (rule_pass *pass, uint64_t k)
{
    const gq_rule *rule = pass->rule;
    const gq_rule_state *state = &rule->state;
    const uint64_t at = k * GQ_SLIDE;
    const uint64_t size = state->n - at < GQ_SLIDE ? state->n - at : GQ_SLIDE;
    const float *before[GQ_SLOTS_MAX] = {NULL};
    float *after[GQ_SLOTS_MAX] = {NULL};
    _Alignas(VECTOR_BYTES) float copy[GQ_SLIDE];
    const float *gradient = pass->in_place ? pass->gradient + at : copy;
    for (size_t i = 0; i < state->slot_count; i++)
        if (pass->after[i] != NULL) {
            before[i] = state->slots[i] + at;
            after[i] = pass->after[i] + at;
        }
    /* It may lie in memory that an actor goes on writing: what is applied is what was looked at. */
    if (!pass->in_place && !gq_copy_finite (copy, pass->gradient + at, size))
        atomic_store_explicit (&pass->unsound, true, memory_order_relaxed);
    rule->plugin->apply[rule->level](pass->constants, pass->scale, size, pass->weights + at,
                                     pass->next + at, gradient, before, after);
}

static uint64_t
block_count (const gq_rule *rule)
{
    return (rule->state.n + GQ_SLIDE - 1) / GQ_SLIDE;
}

/* A thread's share of the blocks, for slots that slide by all of their length. */
static void
apply_share (void *context, unsigned index)
{
    rule_pass *pass = context;
    const uint64_t blocks = block_count (pass->rule);
    const unsigned size = gq_crew_size (pass->rule->crew);
    for (uint64_t k = blocks * index / size; k < blocks * (index + 1) / size; k++)
        apply_block (pass, k);
}

/* The step's arithmetic, block by block from *done on; or by the crew, which counts none: what was
 * before such a step is all there until it is done. */
static void
sweep (gq_rule *rule, rule_pass *pass, atomic_ullong *done)
{
    gq_rule_state *state = &rule->state;
    uint64_t blocks = block_count (rule);
    for (size_t i = 0; i < state->slot_count; i++)
        pass->after[i] = slot_after (rule, i);
    if (rule->crew != NULL && state->n >= CREW_ELEMENTS_MIN && state->slide >= state->n) {
        gq_crew_run (rule->crew, apply_share, pass);
        gq_crash_point ("stepping");
        blocks = 0;
    }
    const bool crash = gq_crash_wanted ();
    for (uint64_t k = atomic_load (done); k < blocks; k++) {
        apply_block (pass, k);
        if (crash)
            gq_crash_point ("stepping");
        /* After the block, for whoever goes on when we are killed: the compiler must not move it
         * before. */
        atomic_store_explicit (done, k + 1, memory_order_release);
        if (crash)
            gq_crash_point ("stepping");
    }
    for (size_t i = 0; i < state->slot_count; i++)
        if (pass->after[i] != NULL)
            state->slots[i] = pass->after[i];
}

bool
gq_rule_step_on (gq_rule *rule, const float *weights, float *next, const float *gradient,
                 float scale, bool sound, atomic_ullong *done)
{
    assert (rule->state.n == 0 || weights + rule->state.n <= next ||
            next + rule->state.n <= weights);
    assert (rule->state.slot_count == 0 || rule->state.slots[0] != NULL);
    float constants[GQ_CONSTANTS_MAX] = {0};
    rule_pass pass = {.rule = rule,
                      .weights = weights,
                      .next = next,
                      .gradient = gradient,
                      .in_place = sound && (uintptr_t)gradient % VECTOR_BYTES == 0,
                      .scale = clipped_scale (rule, gradient, scale),
                      .constants = constants};
    rule->state.steps++;
    gq_step step = {
        .settings = rule->values,
        .lr_factor = gq_schedule_factor (rule->values + rule->own_count, rule->state.steps),
        .step = rule->state.steps,
        .scalars = rule->state.scalars,
        .constants = constants,
    };
    rule->plugin->begin (&step);
    sweep (rule, &pass, done);
    return !atomic_load (&pass.unsound);
}

void
gq_rule_step (gq_rule *rule, const float *weights, float *next, const float *gradient, float scale)
{
    atomic_ullong done;
    atomic_init (&done, 0);
    (void)gq_rule_step_on (rule, weights, next, gradient, scale, false, &done);
}

const gq_optimizer *
gq_rule_plugin (const gq_rule *rule)
{
    return rule->plugin;
}

const gq_rule_state *
gq_rule_state_of (const gq_rule *rule)
{
    return &rule->state;
}

size_t
gq_rule_slot_count (const gq_rule *rule)
{
    return rule->state.slot_count;
}

float *
gq_rule_slot (gq_rule *rule, size_t index)
{
    assert (index < rule->state.slot_count);
    return rule->state.slots[index];
}

size_t
gq_rule_scalar_count (const gq_rule *rule)
{
    return rule->state.scalar_count;
}

double *
gq_rule_scalars (gq_rule *rule)
{
    return rule->state.scalars;
}

uint64_t
gq_rule_steps (const gq_rule *rule)
{
    return rule->state.steps;
}

void
gq_rule_set_steps (gq_rule *rule, uint64_t steps)
{
    rule->state.steps = steps;
}

double
gq_rule_last_norm (const gq_rule *rule)
{
    return rule->last_norm;
}

double
gq_rule_lr (const gq_rule *rule)
{
    const size_t index = lr_index (rule);
    if (index == rule->own_count)
        return (double)NAN;
    return rule->values[index] *
           gq_schedule_factor (rule->values + rule->own_count, rule->state.steps + 1);
}

int
gq_rule_setting (const gq_rule *rule, size_t index, const char **key, char value[GQ_SETTING_TEXT])
{
    if (index >= rule->own_count + GQ_HOST_SETTING_COUNT)
        return 0;
    *key = rule->rows[index].name;
    gq_setting_text (&rule->rows[index], rule->values[index], value);
    return 1;
}

const char *
gq_rule_cpu (const gq_rule *rule)
{
    return level_names[rule->level];
}
