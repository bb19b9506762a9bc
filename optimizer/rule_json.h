/*
 * What a checkpoint tells of a retired rule besides its slots, as JSON text.
 */
#ifndef GQ_RULE_JSON_H
#define GQ_RULE_JSON_H

#include <jansson.h>

#include "rule_state.h"

/* {"optimizer", "version", "optimizer_steps", "slots": [names], "scalars": [[name, "17 digits"]]}.
 * NULL: out of memory. */
json_t *gq_rule_state_to_json (const gq_rule_state *state);

/* Into a state that is all zero; its slots are not allocated.  GQ_OK; GQ_MALFORMED: nothing that
 * was written so. */
GQ_CHECK gq_status gq_rule_state_from_json (gq_rule_state *state, const json_t *json);

#endif
