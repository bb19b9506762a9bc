/*
 * gradq-try: run an update rule on a file of gradients, with no broker and no actor.  Step 5 of a
 * gradient's path alone, through the same plug-in host as the optimizer.
 *
 *     gradq-try --optimizer ./mine.so --set lr=1e-3 --in grads.safetensors --out out.safetensors
 *               --at 1 --at 50
 *
 * Never writes a file unless every step of it was made.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gradq/limits.h"
#include "options.h"
#include "plugin.h"
#include "safetensors.h"

/* Room for "NAME@K": a slot's name, '@', and a 64-bit number. */
#define TENSOR_NAME_MAX (GQ_NAME_MAX + 24)
/* Settings of the rule and of the host, and the four facts that main adds. */
#define META_MAX (GQ_SETTINGS_MAX + 16)

typedef struct trial {
    gq_safetensors *file;
    const gq_tensor *grads; /* (steps, n) */
    uint64_t steps, n;
    uint64_t *at; /* [at_count], rising */
    size_t at_count;
    gq_rule *rule;
    float *weights, *next, *gradient; /* f32[n] */
    /* What is written: for each K, w@K and each slot. */
    gq_tensor *tensors; /* [at_count * (1 + slot count)] */
    size_t tensor_count;
    char (*names)[TENSOR_NAME_MAX];
    float *copies; /* f32[n] for each tensor */
} trial;

static int
compare_counts (const void *a, const void *b)
{
    uint64_t x, y;
    memcpy (&x, a, sizeof x);
    memcpy (&y, b, sizeof y);
    return (x > y) - (x < y);
}

/* The words of --at, sorted, each once.  GQ_OK, GQ_INVALID, GQ_MEMORY. */
static gq_status
read_at (trial *t, const gq_options *options, gq_error *error)
{
    const char *const *words = NULL;
    size_t count = gq_options_list (options, "at", &words);
    t->at = calloc (count + 1, sizeof *t->at);
    if (t->at == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory");
    for (size_t i = 0; i < count; i++) {
        char *end = NULL;
        errno = 0;
        t->at[i] = strtoull (words[i], &end, 10);
        if (words[i][strspn (words[i], "0123456789")] != '\0' || end == words[i] || errno != 0 ||
            t->at[i] == 0)
            return gq_fail (error, GQ_INVALID, "--at takes a step, 1 or higher, not \"%s\"",
                            words[i]);
    }
    qsort (t->at, count, sizeof *t->at, compare_counts);
    for (size_t i = 0; i < count; i++)
        if (t->at_count == 0 || t->at[i] != t->at[t->at_count - 1])
            t->at[t->at_count++] = t->at[i];
    return GQ_OK;
}

/* Find w0 and grads in the file and check them against each other. */
static gq_status
read_input (trial *t, const char *path, gq_error *error)
{
    gq_status status = gq_safetensors_read (&t->file, path, error);
    if (status != GQ_OK)
        return status;
    const gq_tensor *w0 = gq_safetensors_find (t->file, "w0");
    t->grads = gq_safetensors_find (t->file, "grads");
    if (w0 == NULL || t->grads == NULL)
        return gq_fail (error, GQ_NOTFOUND,
                        "%s holds no tensor \"%s\"; it needs w0 (n) and grads "
                        "(steps, n), both F32",
                        path, w0 == NULL ? "w0" : "grads");
    if (w0->dtype != GQ_DTYPE_F32 || t->grads->dtype != GQ_DTYPE_F32)
        return gq_fail (error, GQ_INVALID, "%s: tensor %s is not F32; convert it", path,
                        w0->dtype != GQ_DTYPE_F32 ? "w0" : "grads");
    if (w0->rank != 1 || t->grads->rank != 2 || t->grads->shape[1] != w0->shape[0])
        return gq_fail (error, GQ_INVALID,
                        "%s: shapes do not fit: w0 must be (n), grads (steps, n) "
                        "with the same n",
                        path);
    t->steps = t->grads->shape[0];
    t->n = w0->shape[0];
    if (t->steps == 0 || t->n == 0 || t->n > GQ_PARAMETERS_MAX)
        return gq_fail (error, GQ_INVALID,
                        "%s: %llu steps of %llu elements; both must be at least 1, "
                        "and at most %llu elements",
                        path, (unsigned long long)t->steps, (unsigned long long)t->n,
                        (unsigned long long)GQ_PARAMETERS_MAX);
    size_t bytes = (size_t)t->n * sizeof (float);
    t->weights = malloc (bytes);
    t->next = malloc (bytes);
    t->gradient = malloc (bytes);
    if (t->weights == NULL || t->next == NULL || t->gradient == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory for %zu bytes of weights", bytes);
    memcpy (t->weights, w0->data, bytes);
    if (!gq_all_finite (t->weights, t->n))
        return gq_fail (error, GQ_NONFINITE, "%s: w0 holds NaN or infinity", path);
    return GQ_OK;
}

/* Space for what will be written.  GQ_OK, GQ_INVALID (K beyond the steps), GQ_MEMORY. */
static gq_status
plan_output (trial *t, gq_error *error)
{
    if (t->at_count == 0)
        t->at[t->at_count++] = t->steps;
    if (t->at[t->at_count - 1] > t->steps)
        return gq_fail (error, GQ_INVALID, "--at %llu is beyond the %llu steps in the file",
                        (unsigned long long)t->at[t->at_count - 1], (unsigned long long)t->steps);
    size_t count = t->at_count * (1 + gq_rule_slot_count (t->rule));
    t->tensors = calloc (count, sizeof *t->tensors);
    t->names = calloc (count, sizeof *t->names);
    t->copies = calloc (count, (size_t)t->n * sizeof (float));
    if (t->tensors == NULL || t->names == NULL || t->copies == NULL ||
        gq_rule_reset (t->rule, t->n) != GQ_OK)
        return gq_fail (error, GQ_MEMORY, "out of memory for %zu vectors of %llu elements", count,
                        (unsigned long long)t->n);
    return GQ_OK;
}

static void
keep (trial *t, const char *name, uint64_t step, const float *values)
{
    size_t bytes = (size_t)t->n * sizeof (float), index = t->tensor_count++;
    snprintf (t->names[index], TENSOR_NAME_MAX, "%.*s@%llu", GQ_NAME_MAX, name,
              (unsigned long long)step);
    float *copy = t->copies + index * (size_t)t->n;
    memcpy (copy, values, bytes);
    t->tensors[index] = (gq_tensor){.name = t->names[index],
                                    .dtype = GQ_DTYPE_F32,
                                    .rank = 1,
                                    .shape = {t->n},
                                    .element_count = t->n,
                                    .data = copy,
                                    .bytes = bytes};
}

/* All steps that --at needs.  GQ_OK, GQ_NONFINITE. */
static gq_status
run_steps (trial *t, gq_error *error)
{
    size_t bytes = (size_t)t->n * sizeof (float);
    const char *rows = t->grads->data;
    for (uint64_t step = 1, k = 0; k < t->at_count; step++) {
        memcpy (t->gradient, rows + (step - 1) * bytes, bytes); /* the file may be unaligned */
        if (!gq_all_finite (t->gradient, t->n))
            return gq_fail (error, GQ_NONFINITE,
                            "row %llu of grads holds NaN or infinity; nothing "
                            "was written",
                            (unsigned long long)step - 1);
        gq_rule_step (t->rule, t->weights, t->next, t->gradient, 1);
        float *old = t->weights;
        t->weights = t->next;
        t->next = old;
        if (step != t->at[k])
            continue;
        keep (t, "w", step, t->weights);
        for (size_t i = 0; i < gq_rule_slot_count (t->rule); i++)
            keep (t, gq_rule_plugin (t->rule)->slots[i], step, gq_rule_slot (t->rule, i));
        k++;
    }
    return GQ_OK;
}

static gq_status
write_output (const trial *t, const char *path, gq_error *error)
{
    gq_meta meta[META_MAX];
    char values[META_MAX][64], steps[24];
    size_t count = 0;
    snprintf (steps, sizeof steps, "%llu", (unsigned long long)t->at[t->at_count - 1]);
    meta[count++] = (gq_meta){"rule", gq_rule_plugin (t->rule)->name};
    meta[count++] = (gq_meta){"steps", steps};
    meta[count++] = (gq_meta){"cpu", gq_rule_cpu (t->rule)};
    for (size_t i = 0; gq_rule_setting (t->rule, i, &meta[count].key, values[i]); i++)
        meta[count++].value = values[i];
    return gq_safetensors_write (path, t->tensors, t->tensor_count, meta, count, error);
}

static int
failed (int exit_code, const gq_error *error)
{
    fprintf (stderr, "gradq-try: %s\n", error->text);
    return exit_code;
}

/* Everything after the command line; `t` is cleared by the caller.  Returns the exit code. */
static int
run (trial *t, const gq_options *options)
{
    gq_error error = {.text = ""}, warning = {.text = ""};
    const char *in = gq_options_text (options, "in"), *out = gq_options_text (options, "out");
    if (in == NULL || out == NULL) {
        (void)gq_fail (&error, GQ_INVALID, "--%s FILE is missing; see --help",
                       in == NULL ? "in" : "out");
        return failed (GQ_EXIT_USAGE, &error);
    }
    gq_status status = read_at (t, options, &error);
    if (status != GQ_OK)
        return failed (status == GQ_INVALID ? GQ_EXIT_USAGE : GQ_EXIT_FAILED, &error);

    const char *const *sets = NULL;
    size_t set_count = gq_options_list (options, "set", &sets);
    status = gq_rule_load (&t->rule, gq_options_text (options, "optimizer"),
                           gq_options_text (options, "plugins"), sets, set_count,
                           gq_options_text (options, "cpu"), &warning, &error);
    if (warning.text[0] != '\0')
        fprintf (stderr, "gradq-try: warning: %s\n", warning.text);
    if (status != GQ_OK)
        return failed (status == GQ_MEMORY ? GQ_EXIT_FAILED : GQ_EXIT_CONFIG, &error);

    status = read_input (t, in, &error);
    if (status != GQ_OK)
        return failed (GQ_EXIT_FAILED, &error);
    status = plan_output (t, &error);
    if (status != GQ_OK)
        return failed (status == GQ_INVALID ? GQ_EXIT_USAGE : GQ_EXIT_FAILED, &error);
    status = run_steps (t, &error);
    if (status == GQ_OK)
        status = write_output (t, out, &error);
    return status == GQ_OK ? GQ_EXIT_OK : failed (GQ_EXIT_FAILED, &error);
}

static void
clear (trial *t)
{
    gq_rule_free (&t->rule);
    gq_safetensors_free (&t->file);
    free (t->at);
    free (t->weights);
    free (t->next);
    free (t->gradient);
    free (t->tensors);
    free (t->names);
    free (t->copies);
}

int
main (int argc, char **argv)
{
    gq_options *options = NULL;
    gq_error error = {.text = ""};
    gq_status status = gq_options_read (&options, GQ_PROGRAM_TRY, argc, argv, &error);
    if (status == GQ_AGAIN)
        return GQ_EXIT_OK;
    if (status != GQ_OK)
        return failed (gq_options_exit (status), &error);
    trial t = {.file = NULL};
    int code = run (&t, options);
    clear (&t);
    gq_options_free (&options);
    return code;
}
