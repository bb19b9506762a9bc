/*
 * The optimizer's half of the control plane: hellos and layout questions that the broker passes
 * on, and the reports that it sends.
 */
#ifndef GQ_HELLO_H
#define GQ_HELLO_H

#include <jansson.h>

#include "core.h"
#include "identity.h"
#include "publish.h"

/* Answer a "hello" or "layout" request; the answer is the caller's.  NULL: not a request. */
json_t *gq_hello_answer (gq_core *core, gq_identity *identity, const json_t *request);

/* What the broker shows of this optimizer.  NULL: out of memory. */
json_t *gq_hello_report (gq_core *core, const gq_publisher *publisher, const gq_histogram *apply_us,
                         uint64_t checkpoint_version);

#endif
