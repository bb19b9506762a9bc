/*
 * Who takes part in a run: what actors and the optimizer last said of themselves.  Owns no socket
 * and reads no clock.  Only for people and for hello; no gradient depends on it.
 */
#ifndef GQ_REGISTRY_H
#define GQ_REGISTRY_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "gradq/limits.h"
#include "gradq/status.h"
#include "queue.h"

/* Nothing heard for this long: "silent". */
#define GQ_SILENT_MS 3000

typedef struct gq_registry gq_registry;

gq_registry *gq_registry_new (void); /* NULL: out of memory */
void gq_registry_free (gq_registry **registry_p);

/*
 * An optimizer's report.  The broker serves one: GQ_OK when it is the one, or takes over (the old
 * one is silent or gone, or this one is a later life, a higher term, of the same run).
 * GQ_REFUSED with *error: another one is alive.  `peer`: its identity as hexadecimal text.
 */
GQ_CHECK gq_status gq_registry_optimizer (gq_registry *registry, const char *peer,
                                          const json_t *report, uint64_t now_ns, gq_error *error);

/* Peer of the optimizer to ask, NULL when none is alive. */
const char *gq_registry_peer (const gq_registry *registry, uint64_t now_ns);

/* The optimizer with this peer said goodbye.  false: it is another one. */
bool gq_registry_optimizer_gone (gq_registry *registry, const char *peer);

/* An actor's report or bye.  GQ_INVALID: no actor id in it. */
GQ_CHECK gq_status gq_registry_actor (gq_registry *registry, const json_t *report, bool gone,
                                      uint64_t now_ns);

/* "optimizer" object and "actors" array of stats; queue_actors[GQ_ACTORS_MAX].  NULL: memory. */
json_t *gq_registry_optimizer_json (const gq_registry *registry, uint64_t now_ns);
json_t *gq_registry_actors_json (const gq_registry *registry, const gq_queue_actor *queue_actors,
                                 uint64_t now_ns);

#endif
