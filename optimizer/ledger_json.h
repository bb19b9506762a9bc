/*
 * The ledger as JSON, for checkpoints.
 */
#ifndef GQ_LEDGER_JSON_H
#define GQ_LEDGER_JSON_H

#include <jansson.h>

#include "ledger.h"

/* [{"actor", "epoch", "nonce", "received": [cumulative, "beyond"], "settled": [...], "pending",
 * "refused": [count, sequence, reason]}, ...]; maps as 16 hexadecimal digits.  NULL: memory. */
json_t *gq_ledger_to_json (const gq_ledger *ledger);

/* Into an empty ledger.  GQ_OK, GQ_MALFORMED. */
GQ_CHECK gq_status gq_ledger_from_json (gq_ledger *ledger, const json_t *json);

#endif
