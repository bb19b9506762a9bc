/*
 * "key=value" words against a table of hyperparameters, and the learning-rate schedule.  Part of
 * the plug-in host (plugin.h); nothing else needs it.
 */
#ifndef GQ_RULE_SETTINGS_H
#define GQ_RULE_SETTINGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gradq/optimizer.h"
#include "gradq/status.h"

/* The host's own settings, in the order in which they follow the plug-in's. */
typedef enum gq_host_setting {
    GQ_HOST_CLIP_NORM,
    GQ_HOST_SCHEDULE,
    GQ_HOST_SCHEDULE_STEPS,
    GQ_HOST_WARMUP_STEPS,
    GQ_HOST_SETTING_COUNT
} gq_host_setting;
extern const gq_setting gq_host_settings[GQ_HOST_SETTING_COUNT];

/* Space for the text of one value, NUL included. */
#define GQ_SETTING_TEXT 64

/*
 * Is this row of a plug-in's table sound?  Name, help, bounds around the default, choices that
 * match the bounds.  GQ_OK, GQ_INVALID with *error, which starts with `owner`.
 */
GQ_CHECK gq_status gq_setting_check (const gq_setting *row, const char *owner, gq_error *error);

/*
 * Set values[count] to the defaults of rows[count], then to what sets[set_count] say.  `owner` is
 * the rule's name, for messages.
 *
 * GQ_OK.  GQ_INVALID with *error: no '=', a key that no row has (names the nearest and lists all
 * with their defaults), a key given twice, a value that is no number, no choice or out of bounds.
 */
GQ_CHECK gq_status gq_settings_parse (double *values, const gq_setting *rows, size_t count,
                                      const char *const *sets, size_t set_count, const char *owner,
                                      gq_error *error);

/* Do the host's values[GQ_HOST_SETTING_COUNT] make sense together, and for a rule `owner` that has
 * a setting lr or has none?  GQ_OK, GQ_INVALID. */
GQ_CHECK gq_status gq_host_settings_check (const double *values, bool has_lr, const char *owner,
                                           gq_error *error);

/* The text that gq_settings_parse reads back as exactly `value`: a word, or the shortest number. */
void gq_setting_text (const gq_setting *row, double value, char text[GQ_SETTING_TEXT]);

/*
 * Factor on the learning rate of step `step` (1, 2, ...) from the host's values; t = step - 1:
 *   step <= warmup                step / warmup
 *   constant                      1
 *   linear                        (total - t) / (total - warmup)              0 from t = total on
 *   cosine                        (1 + cos (pi (t - warmup) / (total - warmup))) / 2, likewise
 * (Linear as in Mnih et al., 2016, arXiv:1602.01783, there without warm-up; cosine: Loshchilov and
 * Hutter, 2017, arXiv:1608.03983, equation 5, without restarts.)  A function of the rule's step
 * count alone, and the same bits on every CPU: no libm.
 */
double gq_schedule_factor (const double *values, uint64_t step);

#endif
