/*
 * Hyperparameters from words, and the learning-rate schedule.  Before step 5 of a gradient's path:
 * what is decided here holds for a whole run.
 *
 * Never guesses: a word that is not exactly right is refused with what would have been.
 */
#include "rule_settings.h"

#include <assert.h>
#include <ctype.h>
#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "options.h"

/* Steps up to here are exact as double. */
#define STEPS_MAX 0x1p53
enum { CONSTANT, LINEAR, COSINE };

const gq_setting gq_host_settings[GQ_HOST_SETTING_COUNT] = {
    [GQ_HOST_CLIP_NORM] = {"clip_norm", 0, 0, FLT_MAX, NULL,
                           "scale the gradient down to this Euclidean norm; 0: never"},
    [GQ_HOST_SCHEDULE] = {"schedule", CONSTANT, CONSTANT, COSINE, "constant|linear|cosine",
                          "course of the learning rate after warm-up"},
    [GQ_HOST_SCHEDULE_STEPS] = {"schedule_steps", 0, 0, STEPS_MAX, NULL,
                                "step at which linear and cosine reach 0"},
    [GQ_HOST_WARMUP_STEPS] = {"warmup_steps", 0, 0, STEPS_MAX, NULL,
                              "steps in which the learning rate rises linearly"},
};

/* Word `index` of "a|b|c": its start, and its length in *length; NULL past the last. */
static const char *
choice_at (const char *choices, size_t index, size_t *length)
{
    for (; index > 0; index--) {
        choices = strchr (choices, '|');
        if (choices == NULL)
            return NULL;
        choices++;
    }
    *length = strcspn (choices, "|");
    return choices;
}

gq_status
gq_setting_check (const gq_setting *row, const char *owner, gq_error *error)
{
    if (row->name[0] == '\0' || strpbrk (row->name, "= \t\n") != NULL)
        return gq_fail (error, GQ_INVALID, "%s: setting name \"%s\" is empty or has '=' or a space",
                        owner, row->name);
    if (row->help == NULL)
        return gq_fail (error, GQ_INVALID, "%s: setting %s has no help text", owner, row->name);
    if (!isfinite (row->value) || !(row->min <= row->value && row->value <= row->max))
        return gq_fail (error, GQ_INVALID, "%s: default %g of setting %s is not within %g .. %g",
                        owner, row->value, row->name, row->min, row->max);
    size_t length = 0, count = 0;
    if (row->choices == NULL)
        return GQ_OK;
    for (; choice_at (row->choices, count, &length) != NULL; count++)
        if (length == 0 || length >= GQ_SETTING_TEXT)
            return gq_fail (error, GQ_INVALID, "%s: setting %s: choices \"%s\" has a bad word",
                            owner, row->name, row->choices);
    if (row->min != 0 || row->max != (double)(count - 1) || row->value != floor (row->value))
        return gq_fail (error, GQ_INVALID,
                        "%s: setting %s: with the %zu choices \"%s\" min, max and default are "
                        "indices: 0, %zu, and one between",
                        owner, row->name, count, row->choices, count - 1);
    return GQ_OK;
}

/* Append to error->text, cut at its end. */
static void __attribute__ ((format (printf, 2, 3)))
append (gq_error *error, const char *format, ...)
{
    size_t used = strlen (error->text);
    va_list arguments;
    va_start (arguments, format);
    vsnprintf (error->text + used, sizeof error->text - used, format, arguments);
    va_end (arguments);
}

static gq_status
unknown_key (const char *key, const gq_setting *rows, size_t count, const char *owner,
             gq_error *error)
{
    const char *names[GQ_SETTINGS_MAX + GQ_HOST_SETTING_COUNT];
    assert (count <= sizeof names / sizeof *names);
    for (size_t i = 0; i < count; i++)
        names[i] = rows[i].name;
    gq_error text;
    snprintf (text.text, sizeof text.text, "%s has no setting \"%s\"", owner, key);
    const char *nearest = gq_nearest (key, names, count);
    if (nearest != NULL)
        append (&text, "; did you mean %s?", nearest);
    append (&text, "  Valid, with defaults:");
    for (size_t i = 0; i < count; i++) {
        char value[GQ_SETTING_TEXT];
        gq_setting_text (&rows[i], rows[i].value, value);
        append (&text, "%s %s=%s", i == 0 ? "" : ",", rows[i].name, value);
        if (rows[i].choices != NULL)
            append (&text, " (%s)", rows[i].choices);
    }
    return gq_fail (error, GQ_INVALID, "%s", text.text);
}

/* Index of `word` in the choices, whatever its case; -1: none.  A yes-or-no takes the same words
 * that flags take in the environment. */
static int
choice_index (const char *choices, const char *word)
{
    static const char *const flags[] = {"0", "1", "no", "yes", "off", "on"};
    size_t length = 0;
    int index = 0;
    for (const char *at; (at = choice_at (choices, (size_t)index, &length)) != NULL; index++)
        if (strlen (word) == length && strncasecmp (at, word, length) == 0)
            return index;
    if (strcmp (choices, "false|true") == 0)
        for (int i = 0; i < (int)(sizeof flags / sizeof *flags); i++)
            if (strcasecmp (flags[i], word) == 0)
                return i % 2;
    return -1;
}

static gq_status
parse_value (double *value, const gq_setting *row, const char *text, const char *owner,
             gq_error *error)
{
    if (row->choices != NULL) {
        int index = choice_index (row->choices, text);
        if (index < 0)
            return gq_fail (error, GQ_INVALID, "%s: setting %s is one of %s, not \"%s\"", owner,
                            row->name, row->choices, text);
        *value = index;
        return GQ_OK;
    }
    char *end = NULL;
    double number = strtod (text, &end);
    if (end == text || *end != '\0' || isspace ((unsigned char)text[0]) || isnan (number))
        return gq_fail (error, GQ_INVALID, "%s: setting %s takes a number, not \"%s\" (%s)", owner,
                        row->name, text, row->help);
    if (!(row->min <= number && number <= row->max))
        return gq_fail (error, GQ_INVALID, "%s: setting %s=%s is out of bounds: %g .. %g (%s)",
                        owner, row->name, text, row->min, row->max, row->help);
    *value = number;
    return GQ_OK;
}

gq_status
gq_settings_parse (double *values, const gq_setting *rows, size_t count, const char *const *sets,
                   size_t set_count, const char *owner, gq_error *error)
{
    bool seen[GQ_SETTINGS_MAX + GQ_HOST_SETTING_COUNT] = {false};
    assert (count <= sizeof seen / sizeof *seen);
    for (size_t i = 0; i < count; i++)
        values[i] = rows[i].value;
    for (size_t s = 0; s < set_count; s++) {
        const char *equals = strchr (sets[s], '=');
        if (equals == NULL || equals == sets[s])
            return gq_fail (error, GQ_INVALID, "setting \"%s\" is not of the form key=value",
                            sets[s]);
        size_t length = (size_t)(equals - sets[s]), i = 0;
        while (i < count &&
               (strlen (rows[i].name) != length || strncmp (rows[i].name, sets[s], length) != 0))
            i++;
        if (i == count) {
            char key[GQ_NAME_MAX];
            snprintf (key, sizeof key, "%.*s", (int)(length < sizeof key ? length : sizeof key),
                      sets[s]);
            return unknown_key (key, rows, count, owner, error);
        }
        if (seen[i])
            return gq_fail (error, GQ_INVALID, "setting %s is given twice; keep one of them",
                            rows[i].name);
        seen[i] = true;
        gq_status status = parse_value (&values[i], &rows[i], equals + 1, owner, error);
        if (status != GQ_OK)
            return status;
    }
    return GQ_OK;
}

gq_status
gq_host_settings_check (const double *values, bool has_lr, const char *owner, gq_error *error)
{
    double total = values[GQ_HOST_SCHEDULE_STEPS], warmup = values[GQ_HOST_WARMUP_STEPS];
    /* Such a rule need not know of the factor: what was asked for would quietly not happen. */
    if (!has_lr && (values[GQ_HOST_SCHEDULE] != CONSTANT || warmup != 0))
        return gq_fail (error, GQ_INVALID,
                        "%s has no setting lr, on which schedule and warmup_steps act; leave them "
                        "out, or call its learning rate lr",
                        owner);
    if (total != floor (total) || warmup != floor (warmup))
        return gq_fail (error, GQ_INVALID, "schedule_steps and warmup_steps are whole numbers");
    if (values[GQ_HOST_SCHEDULE] == CONSTANT) {
        if (total != 0)
            return gq_fail (error, GQ_INVALID,
                            "schedule_steps=%.0f does nothing without a schedule; add "
                            "schedule=linear or schedule=cosine, or leave it out",
                            total);
        return GQ_OK;
    }
    const char *name = values[GQ_HOST_SCHEDULE] == LINEAR ? "linear" : "cosine";
    if (total == 0)
        return gq_fail (error, GQ_INVALID,
                        "schedule=%s needs schedule_steps=N, the step at which lr reaches 0", name);
    if (warmup >= total)
        return gq_fail (error, GQ_INVALID,
                        "schedule=%s: warmup_steps=%.0f leaves nothing of schedule_steps=%.0f",
                        name, warmup, total);
    return GQ_OK;
}

void
gq_setting_text (const gq_setting *row, double value, char text[GQ_SETTING_TEXT])
{
    if (row->choices != NULL) {
        size_t length = 0;
        const char *word = choice_at (row->choices, (size_t)value, &length);
        assert (word != NULL);
        snprintf (text, GQ_SETTING_TEXT, "%.*s", (int)length, word);
        return;
    }
    /* 17 digits name every double apart; most need fewer. */
    for (int digits = 1; digits <= 17; digits++) {
        snprintf (text, GQ_SETTING_TEXT, "%.*g", digits, value);
        if (strtod (text, NULL) == value)
            return;
    }
}

/*
 * cos (pi x) for x in [0, 1] by its Taylor series, with cos (pi - y) = -cos (y) so that y <= pi/2;
 * the first term left out is then below 2^-71.  libm's cos may give other bits on another CPU, and
 * a replay would drift.
 */
static double
cos_pi (double x)
{
    const double pi = 0x1.921fb54442d18p+1;
    double y = pi * (x <= 0.5 ? x : 1 - x), term = 1, sum = 1;
    for (int k = 2; k <= 24; k += 2) {
        term *= -(y * y) / (k * (k - 1));
        sum += term;
    }
    return x <= 0.5 ? sum : -sum;
}

double
gq_schedule_factor (const double *values, uint64_t step)
{
    double total = values[GQ_HOST_SCHEDULE_STEPS], warmup = values[GQ_HOST_WARMUP_STEPS];
    double t = (double)step - 1;
    if (t < warmup)
        return (double)step / warmup;
    if (values[GQ_HOST_SCHEDULE] == CONSTANT)
        return 1;
    if (t >= total)
        return 0;
    double done = (t - warmup) / (total - warmup);
    return values[GQ_HOST_SCHEDULE] == LINEAR ? 1 - done : (1 + cos_pi (done)) / 2;
}
