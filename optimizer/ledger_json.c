/*
 * Ledger to and from JSON.
 */
#include "ledger_json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hex.h"

static json_t *
sequences_to_json (const gq_sequences *set)
{
    char map[17];
    snprintf (map, sizeof map, "%016llx", (unsigned long long)set->beyond);
    return json_pack ("[I, s]", (json_int_t)set->cumulative, map);
}

static bool
sequences_from_json (gq_sequences *set, const json_t *json)
{
    const json_t *cumulative = json_array_get (json, 0);
    const char *map = json_string_value (json_array_get (json, 1));
    char *end = NULL;
    if (!json_is_integer (cumulative) || json_integer_value (cumulative) < 0 || map == NULL ||
        strlen (map) != 16)
        return false;
    set->cumulative = (uint64_t)json_integer_value (cumulative);
    set->beyond = strtoull (map, &end, 16);
    return *end == '\0' && (set->beyond & 1) == 0;
}

json_t *
gq_ledger_to_json (const gq_ledger *ledger)
{
    json_t *list = json_array ();
    for (uint32_t i = 0; i < ledger->actor_count; i++) {
        const gq_ledger_entry *entry = &ledger->actors[i];
        char nonce[2 * GQ_NONCE_BYTES + 1];
        if (!entry->known)
            continue;
        gq_hex_encode (entry->nonce, GQ_NONCE_BYTES, nonce);
        json_t *item = json_pack ("{s:I, s:I, s:s, s:o, s:o, s:I, s:[I, I, i]}", "actor",
                                  (json_int_t)i, "epoch", (json_int_t)entry->epoch, "nonce", nonce,
                                  "received", sequences_to_json (&entry->received), "settled",
                                  sequences_to_json (&entry->settled), "pending",
                                  (json_int_t)entry->pending, "refused", (json_int_t)entry->refused,
                                  (json_int_t)entry->refused_sequence, (int)entry->refused_reason);
        if (item == NULL || json_array_append_new (list, item) != 0) {
            json_decref (list);
            return NULL;
        }
    }
    return list;
}

static gq_status
entry_from_json (gq_ledger *ledger, const json_t *json)
{
    json_int_t actor = json_integer_value (json_object_get (json, "actor"));
    json_int_t epoch = json_integer_value (json_object_get (json, "epoch"));
    json_int_t pending = json_integer_value (json_object_get (json, "pending"));
    const char *nonce = json_string_value (json_object_get (json, "nonce"));
    const json_t *refused = json_object_get (json, "refused");
    json_int_t reason = json_integer_value (json_array_get (refused, 2));
    if (actor < 0 || actor >= GQ_ACTORS_MAX || epoch < 1 || epoch > UINT32_MAX || pending < 0 ||
        pending > GQ_AGGREGATE_MAX || nonce == NULL || reason < 0 || reason >= GQ_STATUS_COUNT ||
        ledger->actors[actor].known)
        return GQ_MALFORMED;
    gq_ledger_entry *entry = &ledger->actors[actor];
    if (!gq_hex_decode (nonce, entry->nonce, GQ_NONCE_BYTES) ||
        !sequences_from_json (&entry->received, json_object_get (json, "received")) ||
        !sequences_from_json (&entry->settled, json_object_get (json, "settled")))
        return GQ_MALFORMED;
    entry->known = true;
    entry->epoch = (uint32_t)epoch;
    entry->pending = (uint32_t)pending;
    entry->refused = (uint64_t)json_integer_value (json_array_get (refused, 0));
    entry->refused_sequence = (uint64_t)json_integer_value (json_array_get (refused, 1));
    entry->refused_reason = (gq_status)reason;
    if (ledger->actor_count <= (uint32_t)actor)
        ledger->actor_count = (uint32_t)actor + 1;
    return GQ_OK;
}

gq_status
gq_ledger_from_json (gq_ledger *ledger, const json_t *json)
{
    if (!json_is_array (json) || json_array_size (json) > GQ_ACTORS_MAX)
        return GQ_MALFORMED;
    for (size_t i = 0; i < json_array_size (json); i++)
        if (entry_from_json (ledger, json_array_get (json, i)) != GQ_OK)
            return GQ_MALFORMED;
    return GQ_OK;
}
