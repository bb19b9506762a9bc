/*
 * What the suites of replay and recovery share: a random life of a core (new epochs, holes,
 * duplicates, refusals of every kind, stale gradients), and one number for all of its state.
 */
#ifndef GQ_REPLAY_TESTING_H
#define GQ_REPLAY_TESTING_H

#include "core_testing.h"

#define XXH_STATIC_LINKING_ONLY /* XXH64_state_t on the stack */
#include <xxhash.h>

#include "core_compare.h"
#include "optimizer/ledger_json.h"

/* Of all that expect_same_core compares. */
static inline uint64_t
digest_of (gq_core *self)
{
    const uint64_t count = self->layout.element_count;
    const uint64_t numbers[] = {self->version, self->applied, self->held, self->staleness_count};
    XXH64_state_t state;
    XXH64_reset (&state, 0);
    XXH64_update (&state, numbers, sizeof numbers);
    XXH64_update (&state, &self->staleness_sum, sizeof self->staleness_sum);
    if (count > 0)
        XXH64_update (&state, gq_buffers_current (self->buffers), count * sizeof (float));
    if (self->held > 0) {
        XXH64_update (&state, self->sum, count * sizeof (float));
        XXH64_update (&state, &self->held_weight, sizeof self->held_weight);
    }
    for (size_t i = 0; count > 0 && i < gq_rule_slot_count (self->rule); i++)
        XXH64_update (&state, gq_rule_slot (self->rule, i), count * sizeof (float));
    XXH64_update (&state, gq_rule_scalars (self->rule),
                  gq_rule_scalar_count (self->rule) * sizeof (double));
    const gq_rule_state *retired = &self->retired;
    XXH64_update (&state, retired->name, strlen (retired->name));
    XXH64_update (&state, &retired->steps, sizeof retired->steps);
    XXH64_update (&state, &retired->version, sizeof retired->version);
    XXH64_update (&state, retired->scalars, retired->scalar_count * sizeof (double));
    for (size_t i = 0; i < retired->slot_count; i++)
        XXH64_update (&state, retired->slots[i], retired->n * sizeof (float));
    json_t *ledger = gq_ledger_to_json (&self->ledger);
    char *text = json_dumps (ledger, JSON_COMPACT);
    XXH64_update (&state, text, strlen (text));
    free (text);
    json_decref (ledger);
    return XXH64_digest (&state);
}

/* The actors of a random life, every other one of which speaks bf16; what becomes of their frames
 * is counted. */
typedef struct driver {
    uint64_t seed;
    uint32_t epochs[ACTORS];
    uint64_t next[ACTORS]; /* number to send */
    uint64_t outcomes[GQ_OUTCOME_BLOCKED + 1];
} driver;

static inline void
driver_begin (driver *self, uint64_t seed)
{
    memset (self, 0, sizeof *self);
    self->seed = seed;
    printf ("seed %llu\n", (unsigned long long)seed);
    for (size_t i = 0; i < ACTORS; i++) {
        self->epochs[i] = EPOCH;
        self->next[i] = 1;
    }
}

/* Values of very different sizes: another order or another factor gives other bits. */
static inline gradient
driver_gradient (driver *self, uint32_t actor)
{
    gradient g = of (actor, self->next[actor], 0);
    const uint64_t age = support_random (&self->seed) % 7;
    g.epoch = self->epochs[actor];
    g.samples = 1 + (uint32_t)(support_random (&self->seed) % 5);
    g.version = core.version > age ? core.version - age : 0;
    for (size_t i = 0; i < N; i++)
        g.values[i] = ldexpf ((float)(int32_t)support_random (&self->seed),
                              -31 - (int)(support_random (&self->seed) % 20));
    switch (support_random (&self->seed) % 16) {
    case 0:
        g.values[1] = NAN;
        break;
    case 1: /* an old one again, or one that was passed over */
        g.sequence -= support_random (&self->seed) % g.sequence;
        return g;
    case 2: /* passes one over */
        g.sequence = ++self->next[actor];
        break;
    case 3:
        g.epoch--;
        return g;
    default:
        break;
    }
    self->next[actor]++;
    return g;
}

/* One event: mostly a gradient, sometimes a new life of an actor. */
static inline void
driver_step (driver *self)
{
    const uint32_t actor = (uint32_t)(support_random (&self->seed) % ACTORS);
    /* A hole that nobody fills would block its actor for good: an actor dies before that. */
    const gq_ledger_entry *entry = &core.ledger.actors[actor];
    const bool stuck = self->next[actor] > entry->received.cumulative + 60;
    if (stuck || support_random (&self->seed) % 24 == 0) {
        grant (actor, self->epochs[actor] += 1 + (uint32_t)(support_random (&self->seed) % 3));
        self->next[actor] = 1;
        return;
    }
    const gradient g = driver_gradient (self, actor);
    gq_frame frame = header_of (&g);
    gq_status reason;
    if (support_random (&self->seed) % 32 == 0)
        frame.digest++;
    gq_outcome outcome = actor % 2 == 0 ? take_frame (&frame, g.values, &reason)
                                        : take_bf16 (&frame, g.values, &reason);
    self->outcomes[outcome]++;
}

static inline void
driver_run (driver *self, unsigned steps)
{
    for (unsigned i = 0; i < steps; i++)
        driver_step (self);
}

#endif
