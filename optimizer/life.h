/*
 * How one life of the optimizer decides: its rule, settings and modes.  What a TERM record of the
 * journal says, and a checkpoint, so that replay does as that life did.
 */
#ifndef GQ_LIFE_H
#define GQ_LIFE_H

#include <jansson.h>
#include <limits.h>

#include "core.h"
#include "options.h"

typedef struct gq_life {
    uint32_t term;
    uint64_t version;      /* at which it begins */
    char plugin[PATH_MAX]; /* name of a shipped rule, or the absolute path of a file */
    json_t *sets;          /* array of "key=value" strings */
    gq_core_config config;
} gq_life;

/* From the options of a starting optimizer; term and version are 0.  gq_life_clear it.
 * GQ_OK, GQ_MEMORY. */
GQ_CHECK gq_status gq_life_from_options (gq_life *life, const gq_options *options);
void gq_life_clear (gq_life *life);

/* {"term", "version", "plugin", "set": [...], "aggregate", "weigh_samples", "max_staleness",
 * "damp"}.  NULL: out of memory. */
json_t *gq_life_to_json (const gq_life *life);
/* GQ_OK, GQ_MALFORMED. */
GQ_CHECK gq_status gq_life_from_json (gq_life *life, const json_t *json);

/*
 * Load its rule, and replace `sets` by all settings of the rule, defaults included: another build's
 * defaults must not change what a replay does.  Statuses of gq_rule_load.
 */
GQ_CHECK gq_status gq_life_load (gq_life *life, gq_rule **rule_p, const char *directory,
                                 const char *cpu, gq_error *warning, gq_error *error);

#endif
