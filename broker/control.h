/*
 * The broker's control plane: JSON requests on a ROUTER.  Beside the path of a gradient, never in
 * it.
 */
#ifndef GQ_BROKER_CONTROL_H
#define GQ_BROKER_CONTROL_H

#include <czmq.h>

#include "endpoint.h"
#include "near.h"

typedef struct gq_broker_control gq_broker_control;

/*
 * `router` is bound and stays the caller's; gradients and relay are the threads to ask for stats;
 * `near` hears of the optimizer's reports.
 * NULL: out of memory.
 */
gq_broker_control *gq_broker_control_new (zsock_t *router, zactor_t *gradients, zactor_t *relay,
                                          gq_near *near, const gq_endpoints *endpoints,
                                          uint64_t frame_bytes_max, uint64_t now_ns);
void gq_broker_control_free (gq_broker_control **control_p);

/* Answer what has arrived, a bounded number of requests.  Never waits. */
void gq_broker_control_serve (gq_broker_control *control, uint64_t now_ns);

/* Is somebody to be answered within a few milliseconds, whatever arrives? */
bool gq_broker_control_owes (const gq_broker_control *control);

#endif
