/*
 * What the suites of the core share: a core whose rule is sgd with lr 1, so that weights are a sum
 * that a plain loop can make as well, actors that it knows, and gradients to feed it.  Never fails
 * quietly.
 */
#ifndef GQ_CORE_TESTING_H
#define GQ_CORE_TESTING_H

#include "rule_testing.h"
#include "support.h"

#include "bf16.h"
#include "optimizer/core.h"

enum { N = 7, ACTORS = 8, TERM = 3, EPOCH = 2 };

static gq_core core;
static gq_rule *rule;
static const char *rule_name = "sgd"; /* what a suite may change before it begins */
static const char *const *rule_sets = SETS ("lr=1");
static const gq_core_config plain = {.aggregate = 1, .max_staleness = UINT64_MAX};

/* What a test changes in a gradient before it is sent. */
typedef struct gradient {
    uint32_t actor, epoch, samples, term;
    uint64_t sequence, version;
    float values[N];
} gradient;

/* All elements alike: number `sequence` of an actor, fresh. */
static inline gradient
of (uint32_t actor, uint64_t sequence, float value)
{
    gradient g = {.actor = actor,
                  .epoch = EPOCH,
                  .samples = 1,
                  .term = TERM,
                  .sequence = sequence,
                  .version = core.version};
    for (size_t i = 0; i < N; i++)
        g.values[i] = value;
    return g;
}

static inline gq_frame
header_of (const gradient *g)
{
    gq_frame frame = support_frame (GQ_KIND_GRADIENT, core.layout.digest, N);
    memcpy (frame.run, core.run, GQ_RUN_ID_BYTES);
    frame.actor = g->actor;
    frame.epoch = g->epoch;
    frame.samples = g->samples;
    frame.term = g->term;
    frame.sequence = g->sequence;
    frame.version = g->version;
    return frame;
}

static inline gq_outcome
take_frame (const gq_frame *frame, const void *payload, gq_status *reason)
{
    gq_frame read;
    size_t size;
    uint8_t *bytes = support_message (frame, payload, &size);
    const gq_outcome outcome = gq_core_take (&core, bytes, size, &read, reason);
    free (bytes);
    return outcome;
}

/* The same values, or what is left of them, in bf16. */
static inline gq_outcome
take_bf16 (const gq_frame *frame, const float *values, gq_status *reason)
{
    const gq_frame half = support_bf16 (*frame);
    uint16_t payload[N];
    gq_bf16_encode (values, payload, frame->count);
    return take_frame (&half, payload, reason);
}

static inline gq_outcome
take (gradient g)
{
    gq_status reason;
    const gq_frame frame = header_of (&g);
    return take_frame (&frame, g.values, &reason);
}

static inline void
grant (uint32_t actor, uint32_t epoch)
{
    uint8_t nonce[GQ_NONCE_BYTES] = {1};
    memcpy (nonce + 1, &actor, sizeof actor);
    memcpy (nonce + 5, &epoch, sizeof epoch);
    cr_assert_eq (gq_core_grant (&core, actor, epoch, nonce), GQ_OK);
}

static inline void
begin_without_layout (const gq_core_config *config)
{
    rule = load (rule_name, "auto", rule_sets);
    gq_core_init (&core, config, rule);
    memset (core.run, 0xab, sizeof core.run);
    core.term = TERM;
    for (uint32_t actor = 0; actor < ACTORS; actor++)
        grant (actor, EPOCH);
}

static inline void
begin_without_weights (const gq_core_config *config)
{
    const gq_tensor_shape shapes[] = {{.name = "a", .rank = 1, .shape = {3}},
                                      {.name = "b", .rank = 2, .shape = {2, 2}}};
    gq_layout layout;
    begin_without_layout (config);
    cr_assert_eq (gq_layout_init (&layout, shapes, 2, NULL), GQ_OK);
    cr_assert_eq (gq_core_set_layout (&core, &layout), GQ_OK);
    cr_assert_null (layout.tensors, "moved");
}

/* A core with weights 0 at version `version`. */
static inline void
begin (const gq_core_config *config, uint64_t version)
{
    const float zero[N] = {0};
    begin_without_weights (config);
    gq_core_set_weights (&core, zero, version, version);
}

static inline void
end (void)
{
    gq_core_clear (&core);
    gq_rule_free (&rule);
}

static inline void
expect_weights (const float *expected)
{
    const float *weights = gq_buffers_current (core.buffers);
    for (size_t i = 0; i < N; i++)
        cr_assert_eq (weights[i], expected[i], "[%zu]: %.9g, not %.9g", i, (double)weights[i],
                      (double)expected[i]);
}

static inline void
expect_all (float value)
{
    float expected[N];
    for (size_t i = 0; i < N; i++)
        expected[i] = value;
    expect_weights (expected);
}

static inline uint64_t
settled (uint32_t actor)
{
    return gq_ledger_ack (&core.ledger, actor).cumulative;
}

/* Refused for `reason`: nothing changed but the counters, and the actor will hear of it. */
static inline void
expect_refused (const gq_frame *frame, const void *payload, gq_status expected)
{
    const uint64_t version = core.version, rejected = core.rejected_by[expected];
    const uint64_t refused = gq_ledger_ack (&core.ledger, frame->actor).refused;
    gq_status reason;
    cr_assert_eq (take_frame (frame, payload, &reason), GQ_OUTCOME_REFUSED);
    cr_assert_eq (reason, expected, "%s", gq_status_name (reason));
    cr_assert_eq (core.version, version);
    cr_assert_eq (core.rejected_by[expected], rejected + 1);
    const gq_ack ack = gq_ledger_ack (&core.ledger, frame->actor);
    cr_assert_eq (ack.cumulative, frame->sequence, "settled, or its actor would wait for ever");
    cr_assert_eq (ack.refused, refused + 1);
    cr_assert_eq (ack.refused_sequence, frame->sequence);
    cr_assert_eq (ack.refused_reason, (uint32_t)expected);
    cr_assert (core.ledger.actors[frame->actor].owed);
    expect_all (0);
}

#endif
