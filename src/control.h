/*
 * Control plane: JSON requests to the broker's ROUTER, one ZeroMQ part each way.
 */
#ifndef GQ_CONTROL_H
#define GQ_CONTROL_H

#include <jansson.h>

#include "gradq/limits.h"
#include "gradq/status.h"

/*
 * Ask once: connect to `address`, send `request` (borrowed), wait for the answer.
 *
 * GQ_OK: *answer_p is the answer, yours to json_decref; it may hold {"ok": false, ...}.
 * GQ_UNREACHABLE: nobody answered in timeout_ms.  GQ_INVALID: not an endpoint.  GQ_MALFORMED: the
 * answer is not a JSON object.  *error says which and what to do.
 */
GQ_CHECK gq_status gq_control_ask (json_t **answer_p, const char *address, const json_t *request,
                                   int timeout_ms, gq_error *error);

#endif
