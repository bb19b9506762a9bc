/*
 * State of a retired rule to and from JSON.
 */
#include "rule_json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A scalar is text: 17 digits name every double apart, and JSON has no infinity. */
static json_t *
scalar_to_json (const char *name, double value)
{
    char text[32];
    snprintf (text, sizeof text, "%.17g", value);
    return json_pack ("[s, s]", name, text);
}

json_t *
gq_rule_state_to_json (const gq_rule_state *state)
{
    json_t *slots = json_array ();
    json_t *scalars = json_array ();
    int failed = 0;
    for (size_t i = 0; i < state->slot_count; i++)
        failed |= json_array_append_new (slots, json_string (state->slot_names[i]));
    for (size_t i = 0; i < state->scalar_count; i++)
        failed |= json_array_append_new (
            scalars, scalar_to_json (state->scalar_names[i], state->scalars[i]));
    if (failed) {
        json_decref (slots);
        json_decref (scalars);
        return NULL;
    }
    return json_pack ("{s:s, s:I, s:I, s:o, s:o}", "optimizer", state->name, "version",
                      (json_int_t)state->version, "optimizer_steps", (json_int_t)state->steps,
                      "slots", slots, "scalars", scalars);
}

/* The next of names[count]: a word that is not among them yet. */
static bool
add_word (char names[][GQ_RULE_WORD_MAX], size_t count, const char *word)
{
    if (word == NULL || !gq_rule_word (word))
        return false;
    for (size_t i = 0; i < count; i++)
        if (strcmp (names[i], word) == 0)
            return false;
    snprintf (names[count], GQ_RULE_WORD_MAX, "%s", word);
    return true;
}

static bool
scalar_from_json (gq_rule_state *state, const json_t *json)
{
    const char *text = json_string_value (json_array_get (json, 1));
    char *end = NULL;
    if (text == NULL || !add_word (state->scalar_names, state->scalar_count,
                                   json_string_value (json_array_get (json, 0))))
        return false;
    state->scalars[state->scalar_count++] = strtod (text, &end);
    return end != text && *end == '\0';
}

gq_status
gq_rule_state_from_json (gq_rule_state *state, const json_t *json)
{
    const char *name = json_string_value (json_object_get (json, "optimizer"));
    const json_t *version = json_object_get (json, "version");
    const json_t *steps = json_object_get (json, "optimizer_steps");
    const json_t *slots = json_object_get (json, "slots");
    const json_t *scalars = json_object_get (json, "scalars");
    if (name == NULL || !gq_rule_word (name) || !json_is_integer (version) ||
        json_integer_value (version) < 0 || !json_is_integer (steps) ||
        json_integer_value (steps) < 0 || !json_is_array (slots) ||
        json_array_size (slots) > GQ_SLOTS_MAX || !json_is_array (scalars) ||
        json_array_size (scalars) > GQ_SCALARS_MAX)
        return GQ_MALFORMED;
    for (size_t i = 0; i < json_array_size (slots); i++) {
        if (!add_word (state->slot_names, i, json_string_value (json_array_get (slots, i))))
            return GQ_MALFORMED;
        state->slot_count++;
    }
    for (size_t i = 0; i < json_array_size (scalars); i++)
        if (!scalar_from_json (state, json_array_get (scalars, i)))
            return GQ_MALFORMED;
    snprintf (state->name, sizeof state->name, "%s", name);
    state->version = (uint64_t)json_integer_value (version);
    state->steps = (uint64_t)json_integer_value (steps);
    return GQ_OK;
}
