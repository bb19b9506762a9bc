/*
 * Two cores in the same state, to the last bit: what a journal or a checkpoint must lead to.
 */
#ifndef GQ_CORE_COMPARE_H
#define GQ_CORE_COMPARE_H

#include "support.h"

#include "optimizer/core.h"

static inline void
expect_same_vector (const float *a, const float *b, uint64_t count, const char *what)
{
    cr_assert_eq (memcmp (a, b, count * sizeof *a), 0, "%s differs", what);
}

static inline void
expect_same_double (double a, double b, const char *what)
{
    cr_assert_eq (memcmp (&a, &b, sizeof a), 0, "%s: %.17g, not %.17g", what, a, b);
}

static inline void
expect_same_ledger (const gq_ledger *a, const gq_ledger *b)
{
    cr_assert_eq (a->actor_count, b->actor_count);
    for (uint32_t i = 0; i < a->actor_count; i++) {
        const gq_ledger_entry *x = &a->actors[i], *y = &b->actors[i];
        cr_assert (x->known == y->known && x->epoch == y->epoch, "actor %u", i);
        cr_assert_arr_eq (x->nonce, y->nonce, GQ_NONCE_BYTES);
        cr_assert_eq (x->received.cumulative, y->received.cumulative, "actor %u: %llu, not %llu", i,
                      (unsigned long long)x->received.cumulative,
                      (unsigned long long)y->received.cumulative);
        cr_assert_eq (x->received.beyond, y->received.beyond, "actor %u", i);
        cr_assert_eq (x->settled.cumulative, y->settled.cumulative, "actor %u", i);
        cr_assert_eq (x->settled.beyond, y->settled.beyond, "actor %u", i);
        cr_assert_eq (x->pending, y->pending, "actor %u", i);
        cr_assert (x->refused == y->refused && x->refused_sequence == y->refused_sequence &&
                       x->refused_reason == y->refused_reason,
                   "actor %u", i);
    }
}

static inline void
expect_same_rule (gq_rule *a, gq_rule *b)
{
    cr_assert_str_eq (gq_rule_plugin (a)->name, gq_rule_plugin (b)->name);
    cr_assert_eq (gq_rule_steps (a), gq_rule_steps (b));
    cr_assert_arr_eq (gq_rule_scalars (a), gq_rule_scalars (b),
                      gq_rule_scalar_count (a) * sizeof (double));
    for (size_t i = 0; gq_rule_plugin (a)->slots[i] != NULL; i++)
        cr_assert_str_eq (gq_rule_plugin (a)->slots[i], gq_rule_plugin (b)->slots[i]);
}

/* Both hold the same of a retired rule, or nothing. */
static inline void
expect_same_state (const gq_rule_state *a, const gq_rule_state *b)
{
    cr_assert (gq_rule_state_same (a, b), "%s, not %s", a->name, b->name);
    cr_assert (a->n == b->n && a->steps == b->steps && a->version == b->version);
    cr_assert_eq (memcmp (a->scalars, b->scalars, a->scalar_count * sizeof (double)), 0);
    for (size_t i = 0; i < a->slot_count; i++)
        expect_same_vector (a->slots[i], b->slots[i], a->n, a->slot_names[i]);
}

/* All that decides about what comes next; not what only people look at. */
static inline void
expect_same_core (gq_core *a, gq_core *b)
{
    const uint64_t count = b->layout.element_count;
    cr_assert_eq (a->layout.digest, b->layout.digest);
    cr_assert_eq (a->version, b->version, "version %llu, not %llu", (unsigned long long)a->version,
                  (unsigned long long)b->version);
    cr_assert_eq (a->applied, b->applied);
    cr_assert_eq (a->has_weights, b->has_weights);
    cr_assert (a->config.aggregate == b->config.aggregate && a->config.damp == b->config.damp &&
               a->config.weigh_samples == b->config.weigh_samples &&
               a->config.max_staleness == b->config.max_staleness);
    expect_same_vector (gq_buffers_current (a->buffers), gq_buffers_current (b->buffers), count,
                        "weights");
    cr_assert_eq (a->held, b->held);
    if (a->held > 0) {
        expect_same_vector (a->sum, b->sum, count, "the step being aggregated");
        expect_same_double (a->held_weight, b->held_weight, "held_weight");
    }
    expect_same_double (a->staleness_sum, b->staleness_sum, "staleness_sum");
    cr_assert_eq (a->staleness_count, b->staleness_count);
    expect_same_rule (a->rule, b->rule);
    for (size_t i = 0; i < gq_rule_slot_count (a->rule); i++)
        expect_same_vector (gq_rule_slot (a->rule, i), gq_rule_slot (b->rule, i), count, "a slot");
    expect_same_state (&a->retired, &b->retired);
    expect_same_ledger (&a->ledger, &b->ledger);
}

#endif
