/*
 * A life of the optimizer, to and from JSON.
 */
#include "life.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A path is kept absolute: recovery may run from another directory. */
static void
plugin_name (char name[PATH_MAX], const char *given)
{
    char absolute[PATH_MAX];
    bool is_path = strchr (given, '/') != NULL || strstr (given, ".so") != NULL;
    bool found = is_path && realpath (given, absolute) != NULL;
    snprintf (name, PATH_MAX, "%s", found ? absolute : given);
}

gq_status
gq_life_from_options (gq_life *life, const gq_options *options)
{
    const char *const *sets;
    size_t count = gq_options_list (options, "set", &sets);
    *life = (gq_life){
        .sets = json_array (),
        .config = {.aggregate = (uint32_t)gq_options_count (options, "aggregate"),
                   .weigh_samples =
                       strcmp (gq_options_text (options, "aggregate-weights"), "samples") == 0,
                   .max_staleness = gq_options_count (options, "max-staleness"),
                   .damp = strcmp (gq_options_text (options, "staleness-policy"), "damp") == 0}};
    plugin_name (life->plugin, gq_options_text (options, "optimizer"));
    for (size_t i = 0; i < count; i++)
        if (json_array_append_new (life->sets, json_string (sets[i])) != 0)
            return GQ_MEMORY;
    return GQ_OK;
}

void
gq_life_clear (gq_life *life)
{
    json_decref (life->sets);
    *life = (gq_life){0};
}

json_t *
gq_life_to_json (const gq_life *life)
{
    const gq_core_config *config = &life->config;
    json_t *staleness = config->max_staleness > INT64_MAX
                            ? json_null ()
                            : json_integer ((json_int_t)config->max_staleness);
    return json_pack ("{s:I, s:I, s:s, s:O, s:I, s:b, s:o, s:b}", "term", (json_int_t)life->term,
                      "version", (json_int_t)life->version, "plugin", life->plugin, "set",
                      life->sets, "aggregate", (json_int_t)config->aggregate, "weigh_samples",
                      (int)config->weigh_samples, "max_staleness", staleness, "damp",
                      (int)config->damp);
}

gq_status
gq_life_from_json (gq_life *life, const json_t *json)
{
    json_int_t term = json_integer_value (json_object_get (json, "term"));
    json_int_t version = json_integer_value (json_object_get (json, "version"));
    json_int_t aggregate = json_integer_value (json_object_get (json, "aggregate"));
    const char *plugin = json_string_value (json_object_get (json, "plugin"));
    const json_t *staleness = json_object_get (json, "max_staleness");
    json_t *sets = json_object_get (json, "set");
    if (term < 1 || term > UINT32_MAX || version < 0 || aggregate < 1 ||
        aggregate > GQ_AGGREGATE_MAX || plugin == NULL || strlen (plugin) >= PATH_MAX ||
        !json_is_array (sets) || json_array_size (sets) > 2 * GQ_SETTINGS_MAX)
        return GQ_MALFORMED;
    for (size_t i = 0; i < json_array_size (sets); i++)
        if (!json_is_string (json_array_get (sets, i)))
            return GQ_MALFORMED;
    *life = (gq_life){
        .term = (uint32_t)term,
        .version = (uint64_t)version,
        .sets = json_incref (sets),
        .config = {.aggregate = (uint32_t)aggregate,
                   .weigh_samples = json_is_true (json_object_get (json, "weigh_samples")),
                   .max_staleness = json_is_integer (staleness)
                                        ? (uint64_t)json_integer_value (staleness)
                                        : UINT64_MAX,
                   .damp = json_is_true (json_object_get (json, "damp"))}};
    memcpy (life->plugin, plugin, strlen (plugin) + 1);
    return GQ_OK;
}

static gq_status
complete (gq_life *life, const gq_rule *rule)
{
    json_t *all = json_array ();
    const char *key;
    char value[64];
    bool whole = all != NULL;
    for (size_t i = 0; whole && gq_rule_setting (rule, i, &key, value); i++)
        whole = json_array_append_new (all, json_sprintf ("%s=%s", key, value)) == 0;
    json_decref (whole ? life->sets : all);
    if (whole)
        life->sets = all;
    return whole ? GQ_OK : GQ_MEMORY;
}

gq_status
gq_life_load (gq_life *life, gq_rule **rule_p, const char *directory, const char *cpu,
              gq_error *warning, gq_error *error)
{
    const char *sets[2 * GQ_SETTINGS_MAX];
    size_t count = json_array_size (life->sets);
    if (count > 2 * GQ_SETTINGS_MAX)
        return gq_fail (error, GQ_INVALID, "--set: at most %d are allowed", 2 * GQ_SETTINGS_MAX);
    for (size_t i = 0; i < count; i++)
        sets[i] = json_string_value (json_array_get (life->sets, i));
    gq_status status =
        gq_rule_load (rule_p, life->plugin, directory, sets, count, cpu, warning, error);
    if (status == GQ_OK && complete (life, *rule_p) != GQ_OK) {
        gq_rule_free (rule_p);
        status = gq_fail (error, GQ_MEMORY, "out of memory");
    }
    return status;
}
