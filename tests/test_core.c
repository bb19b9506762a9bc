/*
 * Core of the optimizer: what is applied, what is refused and why, and that both are answered.  The
 * rule is sgd with lr 1, so that weights are a sum that a plain loop can make as well.
 */
#include "rule_testing.h"
#include "support.h"

#include "optimizer/core.h"

TestSuite (core, .timeout = 60);

enum { N = 7, ACTORS = 8, TERM = 3 };

static gq_core core;
static gq_rule *rule;
static const gq_core_config plain = {.aggregate = 1, .max_staleness = UINT64_MAX};

/* What a test changes in a gradient before it is sent. */
typedef struct gradient {
    uint32_t actor, epoch, samples, term;
    uint64_t sequence, version;
    float values[N];
} gradient;

/* All elements alike: number `sequence` of an actor, fresh. */
static gradient
of (uint32_t actor, uint64_t sequence, float value)
{
    gradient g = {.actor = actor,
                  .epoch = 1,
                  .samples = 1,
                  .term = TERM,
                  .sequence = sequence,
                  .version = core.version};
    for (size_t i = 0; i < N; i++)
        g.values[i] = value;
    return g;
}

static gq_frame
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

static gq_outcome
take_frame (const gq_frame *frame, const float *values, gq_status *reason)
{
    gq_frame read;
    size_t size;
    uint8_t *bytes = support_message (frame, values, &size);
    const gq_outcome outcome = gq_core_take (&core, bytes, size, &read, reason);
    free (bytes);
    return outcome;
}

static gq_outcome
take (gradient g)
{
    gq_status reason;
    const gq_frame frame = header_of (&g);
    return take_frame (&frame, g.values, &reason);
}

static void
begin_without_weights (const gq_core_config *config)
{
    const gq_tensor_shape shapes[] = {{.name = "a", .rank = 1, .shape = {3}},
                                      {.name = "b", .rank = 2, .shape = {2, 2}}};
    gq_layout layout;
    rule = load ("sgd", "auto", SETS ("lr=1"));
    gq_core_init (&core, config, rule);
    memset (core.run, 0xab, sizeof core.run);
    core.term = TERM;
    cr_assert_eq (gq_layout_init (&layout, shapes, 2, NULL), GQ_OK);
    cr_assert_eq (gq_core_set_layout (&core, &layout), GQ_OK);
    cr_assert_null (layout.tensors, "moved");
}

/* A core with weights 0 at version `version`. */
static void
begin (const gq_core_config *config, uint64_t version)
{
    const float zero[N] = {0};
    begin_without_weights (config);
    gq_core_set_weights (&core, zero, version, version);
}

static void
end (void)
{
    gq_core_clear (&core);
    gq_rule_free (&rule);
}

static void
expect_weights (const float *expected)
{
    const float *weights = gq_buffers_current (core.buffers);
    for (size_t i = 0; i < N; i++)
        cr_assert_eq (weights[i], expected[i], "[%zu]: %.9g, not %.9g", i, (double)weights[i],
                      (double)expected[i]);
}

static void
expect_all (float value)
{
    float expected[N];
    for (size_t i = 0; i < N; i++)
        expected[i] = value;
    expect_weights (expected);
}

static uint64_t
settled (uint32_t actor)
{
    return gq_ledger_ack (&core.ledger, actor).cumulative;
}

/* ---- applying ---- */

Test (core, weights_are_the_exact_float32_sum_in_the_order_applied)
{
    enum { STEPS = 5000 };
    uint64_t seed = 5, sequences[ACTORS] = {0};
    float expected[N] = {0};
    printf ("seed %llu\n", (unsigned long long)seed);
    begin (&plain, 0);
    for (uint64_t step = 1; step <= STEPS; step++) {
        const uint32_t actor = (uint32_t)(support_random (&seed) % ACTORS);
        gradient g = of (actor, ++sequences[actor], 0);
        for (size_t i = 0; i < N; i++) {
            /* Of very different sizes, so that another order gives other bits. */
            g.values[i] = ldexpf ((float)(int32_t)support_random (&seed),
                                  -20 - (int)(support_random (&seed) % 24));
            expected[i] -= g.values[i];
        }
        cr_assert_eq (take (g), GQ_OUTCOME_STEPPED);
        cr_assert_eq (core.version, step);
        cr_assert_eq (core.applied, step);
        cr_assert_eq (settled (actor), sequences[actor]);
    }
    expect_weights (expected);
    cr_assert_eq (gq_core_rejected (&core), 0);
    end ();
}

Test (core, a_payload_may_lie_at_any_address)
{
    begin (&plain, 0);
    for (size_t shift = 0; shift < 16; shift++) {
        const gradient g = of (1, shift + 1, 1);
        const gq_frame frame = header_of (&g);
        gq_frame read;
        gq_status reason;
        size_t size;
        uint8_t *bytes = support_message (&frame, g.values, &size);
        uint8_t *place = support_guarded_end (size + 16) - size - shift;
        memcpy (place, bytes, size);
        cr_assert_eq (gq_core_take (&core, place, size, &read, &reason), GQ_OUTCOME_STEPPED);
        expect_all (-(float)(shift + 1));
        free (bytes);
    }
    end ();
}

/* ---- refusing ---- */

/* Refused for `reason`: nothing changed but the counters, and the actor will hear of it. */
static void
expect_refused (const gq_frame *frame, const float *values, gq_status expected)
{
    const uint64_t version = core.version, rejected = core.rejected_by[expected];
    const uint64_t refused = gq_ledger_ack (&core.ledger, frame->actor).refused;
    gq_status reason;
    cr_assert_eq (take_frame (frame, values, &reason), GQ_OUTCOME_REFUSED);
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

Test (core, a_gradient_for_another_layout_is_refused)
{
    begin (&plain, 0);
    const gradient g = of (2, 1, 1);
    gq_frame frame = header_of (&g);
    frame.digest++;
    expect_refused (&frame, g.values, GQ_LAYOUT);
    end ();
}

Test (core, a_gradient_of_another_size_is_refused)
{
    begin (&plain, 0);
    const float more[N + 1] = {0};
    gradient g = of (2, 1, 1);
    gq_frame frame = header_of (&g);
    frame.count = N + 1, frame.payload_bytes = 4 * (N + 1);
    expect_refused (&frame, more, GQ_COUNT);
    frame.sequence = 2, frame.count = 1, frame.payload_bytes = 4;
    expect_refused (&frame, more, GQ_COUNT);
    end ();
}

Test (core, a_value_that_is_not_finite_is_refused_wherever_it_stands)
{
    static const float bad[] = {NAN, -NAN, INFINITY, -INFINITY};
    uint64_t sequence = 0;
    begin (&plain, 0);
    for (size_t i = 0; i < N; i++)
        for (size_t k = 0; k < sizeof bad / sizeof bad[0]; k++) {
            gradient g = of (2, ++sequence, 1);
            g.values[i] = bad[k];
            const gq_frame frame = header_of (&g);
            expect_refused (&frame, g.values, GQ_NONFINITE);
        }
    cr_assert_eq (gq_core_rejected (&core), sequence);
    end ();
}

Test (core, a_damaged_payload_is_refused_and_answered)
{
    begin (&plain, 0);
    const gradient g = of (2, 1, 1);
    const gq_frame frame = header_of (&g);
    gq_frame read;
    gq_status reason;
    size_t size;
    uint8_t *bytes = support_message (&frame, g.values, &size);
    bytes[size - 1] ^= 1;
    cr_assert_eq (gq_core_take (&core, bytes, size, &read, &reason), GQ_OUTCOME_REFUSED);
    cr_assert_eq (reason, GQ_CHECKSUM);
    cr_assert_eq (settled (2), 1);
    cr_assert_eq (core.rejected_by[GQ_CHECKSUM], 1);
    expect_all (0);
    free (bytes);
    end ();
}

Test (core, a_gradient_before_any_weights_is_refused)
{
    begin_without_weights (&plain);
    gq_status reason;
    const gradient g = of (2, 1, 1);
    const gq_frame frame = header_of (&g);
    cr_assert_eq (take_frame (&frame, g.values, &reason), GQ_OUTCOME_REFUSED);
    cr_assert_eq (settled (2), 1);
    cr_assert_eq (core.version, 0);
    end ();
}

Test (core, a_gradient_before_any_layout_is_refused)
{
    rule = load ("sgd", "auto", NO_SETS);
    gq_core_init (&core, &plain, rule);
    gq_status reason;
    const gradient g = of (2, 1, 1);
    const gq_frame frame = header_of (&g);
    cr_assert_eq (take_frame (&frame, g.values, &reason), GQ_OUTCOME_REFUSED);
    cr_assert_eq (reason, GQ_LAYOUT);
    end ();
}

Test (core, what_names_nobody_is_counted_as_malformed_and_changes_nothing)
{
    begin (&plain, 0);
    const gradient g = of (2, 1, 1);
    gq_frame frame = header_of (&g), read;
    gq_status reason;
    frame.run[0] ^= 1;
    cr_assert_eq (take_frame (&frame, g.values, &reason), GQ_OUTCOME_IGNORED);
    cr_assert_eq (reason, GQ_RUN);
    frame.run[0] ^= 1;
    frame.kind = GQ_KIND_WEIGHTS;
    cr_assert_eq (take_frame (&frame, g.values, &reason), GQ_OUTCOME_IGNORED);
    cr_assert_eq (reason, GQ_MALFORMED);
    cr_assert_eq (gq_core_take (&core, "", 0, &read, &reason), GQ_OUTCOME_IGNORED);
    cr_assert_eq (reason, GQ_MALFORMED);
    cr_assert_eq (core.malformed, 3);
    cr_assert_not (core.ledger.actors[2].known);
    cr_assert_eq (gq_core_rejected (&core), 0);
    expect_all (0);
    end ();
}

Test (core, no_truncation_or_flipped_header_bit_is_applied)
{
    begin (&plain, 0);
    const gradient g = of (2, 1, 1);
    const gq_frame frame = header_of (&g);
    gq_frame read;
    gq_status reason;
    size_t size;
    uint8_t *bytes = support_message (&frame, g.values, &size);
    uint8_t *guarded = support_guarded_end (size);
    for (size_t length = 0; length < size; length++) {
        memcpy (guarded - length, bytes, length);
        cr_assert_eq (gq_core_take (&core, guarded - length, length, &read, &reason),
                      GQ_OUTCOME_IGNORED, "%zu bytes", length);
    }
    for (size_t bit = 0; bit < 8 * GQ_FRAME_HEADER_BYTES; bit++) {
        /* The payload's checksum lies under the header's. */
        bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
        cr_assert_eq (gq_core_take (&core, bytes, size, &read, &reason), GQ_OUTCOME_IGNORED);
        bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    expect_all (0);
    cr_assert_eq (gq_core_take (&core, bytes, size, &read, &reason), GQ_OUTCOME_STEPPED);
    free (bytes);
    end ();
}

/* ---- sequence numbers ---- */

Test (core, a_duplicate_is_not_applied_again_but_answered_again)
{
    begin (&plain, 0);
    const gradient first = of (1, 1, 1), second = of (1, 2, 1);
    cr_assert_eq (take (first), GQ_OUTCOME_STEPPED);
    cr_assert_eq (take (second), GQ_OUTCOME_STEPPED);
    core.ledger.actors[1].owed = false;
    cr_assert_eq (take (first), GQ_OUTCOME_IGNORED);
    cr_assert_eq (take (second), GQ_OUTCOME_IGNORED);
    cr_assert (core.ledger.actors[1].owed);
    cr_assert_eq (core.ledger.duplicates, 2);
    cr_assert_eq (settled (1), 2);
    cr_assert_eq (core.version, 2);
    expect_all (-2);
    end ();
}

Test (core, a_skipped_number_is_counted_as_lost_and_holds_nothing_up)
{
    begin (&plain, 0);
    cr_assert_eq (take (of (1, 1, 1)), GQ_OUTCOME_STEPPED);
    cr_assert_eq (take (of (1, 5, 1)), GQ_OUTCOME_STEPPED);
    cr_assert_eq (core.ledger.lost, 3);
    cr_assert_eq (settled (1), 5);
    cr_assert_eq (take (of (1, 3, 1)), GQ_OUTCOME_IGNORED, "what was passed over does not come");
    expect_all (-2);
    end ();
}

Test (core, a_gradient_of_an_epoch_that_ended_is_ignored)
{
    begin (&plain, 0);
    gradient g = of (1, 1, 1);
    g.epoch = 5;
    cr_assert_eq (take (g), GQ_OUTCOME_STEPPED);
    g.epoch = 4;
    g.sequence = 2;
    cr_assert_eq (take (g), GQ_OUTCOME_IGNORED);
    cr_assert_eq (core.ledger.outdated, 1);
    cr_assert_eq (settled (1), 1);
    expect_all (-1);
    end ();
}

Test (core, an_epoch_granted_before_a_restart_goes_on_from_the_number_it_has_reached)
{
    begin (&plain, 0);
    gradient g = of (1, 41, 1);
    g.epoch = 9;
    cr_assert_eq (take (g), GQ_OUTCOME_STEPPED);
    cr_assert_eq (settled (1), 41);
    cr_assert_eq (core.ledger.lost, 0, "what an earlier life settled was not lost");
    g.sequence = 40;
    cr_assert_eq (take (g), GQ_OUTCOME_IGNORED);
    end ();
}

/* ---- staleness ---- */

static gradient
stale (uint64_t sequence, uint64_t age, float value)
{
    gradient g = of (1, sequence, value);
    g.version = core.version - age;
    return g;
}

Test (core, a_gradient_is_refused_past_the_allowed_staleness_and_not_before)
{
    for (uint64_t allowed = 0; allowed <= 3; allowed++) {
        const gq_core_config config = {.aggregate = 1, .max_staleness = allowed};
        begin (&config, 10);
        const gradient old = stale (1, allowed + 1, 1);
        const gq_frame frame = header_of (&old);
        expect_refused (&frame, old.values, GQ_STALE);
        cr_assert_eq (take (stale (2, allowed, 1)), GQ_OUTCOME_STEPPED);
        cr_assert_eq (core.staleness.count, 1, "refused ones are not in the statistics");
        cr_assert_eq (core.staleness.max, allowed);
        end ();
    }
}

Test (core, without_a_bound_any_staleness_is_applied)
{
    begin (&plain, 1000000);
    cr_assert_eq (take (stale (1, 1000000, 1)), GQ_OUTCOME_STEPPED);
    expect_all (-1);
    end ();
}

Test (core, damping_scales_by_mean_staleness_over_staleness_but_never_up)
{
    /* Mean over all gradients so far, this one included: 0, 1, 2, 7/4, 10/5. */
    static const struct {
        uint64_t staleness;
        double factor;
    } steps[] = {{0, 1}, {2, 1.0 / 2}, {4, 2.0 / 4}, {1, 1}, {3, 2.0 / 3}};
    const gq_core_config config = {.aggregate = 1, .max_staleness = 0, .damp = true};
    float expected = 0;
    begin (&config, 10);
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        cr_assert_eq (take (stale (i + 1, steps[i].staleness, 1.5f)), GQ_OUTCOME_STEPPED);
        expected -= 1.5f * (float)steps[i].factor;
        expect_all (expected);
    }
    cr_assert_eq (core.rejected_by[GQ_STALE], 0, "damped instead of refused");
    end ();
}

Test (core, a_version_that_a_restart_undid_counts_from_where_the_restart_began)
{
    const gq_core_config config = {.aggregate = 1, .max_staleness = 1};
    begin (&config, 10);
    cr_assert_eq (take (of (1, 1, 1)), GQ_OUTCOME_STEPPED);
    cr_assert_eq (take (of (1, 2, 1)), GQ_OUTCOME_STEPPED); /* version 12 */
    gradient g = of (2, 1, 1);
    g.term = TERM - 1;
    g.version = 12; /* of the life before: its common part with ours ends at 10, 2 steps ago */
    gq_status reason;
    gq_frame frame = header_of (&g);
    cr_assert_eq (take_frame (&frame, g.values, &reason), GQ_OUTCOME_REFUSED);
    cr_assert_eq (reason, GQ_STALE);
    frame.term = TERM;
    frame.sequence = 2;
    cr_assert_eq (take_frame (&frame, g.values, &reason), GQ_OUTCOME_STEPPED);
    end ();
}

Test (core, a_version_from_before_the_restart_keeps_its_age)
{
    begin (&plain, 10);
    gradient g = of (2, 1, 1);
    g.term = TERM - 1;
    g.version = 7;
    cr_assert_eq (take (g), GQ_OUTCOME_STEPPED);
    cr_assert_eq (core.staleness.max, 3);
    end ();
}

Test (core, a_version_that_does_not_exist_yet_is_not_stale)
{
    const gq_core_config config = {.aggregate = 1, .max_staleness = 0};
    begin (&config, 10);
    gradient g = of (1, 1, 1);
    g.version = UINT64_MAX;
    cr_assert_eq (take (g), GQ_OUTCOME_STEPPED);
    cr_assert_eq (core.staleness.max, 0);
    end ();
}

/* ---- aggregation ---- */

Test (core, a_step_of_k_gradients_applies_their_mean)
{
    const gq_core_config config = {.aggregate = 4, .max_staleness = UINT64_MAX};
    begin (&config, 0);
    cr_assert_eq (take (of (0, 1, 1)), GQ_OUTCOME_HELD);
    cr_assert_eq (take (of (1, 1, 2)), GQ_OUTCOME_HELD);
    cr_assert_eq (take (of (2, 1, 5)), GQ_OUTCOME_HELD);
    expect_all (0);
    cr_assert_eq (core.version, 0);
    cr_assert_eq (core.applied, 0);
    cr_assert_eq (take (of (3, 1, -4)), GQ_OUTCOME_STEPPED);
    expect_all (-1); /* (1 + 2 + 5 - 4) / 4, exact in float32 */
    cr_assert_eq (core.version, 1);
    cr_assert_eq (core.applied, 4);
    cr_assert_eq (core.held, 0);
    end ();
}

Test (core, a_second_step_remembers_nothing_of_the_first)
{
    const gq_core_config config = {
        .aggregate = 2, .max_staleness = UINT64_MAX, .weigh_samples = true};
    begin (&config, 0);
    for (uint64_t sequence = 1; sequence <= 4; sequence++) {
        gradient g = of (0, sequence, 2);
        g.samples = sequence <= 2 ? 100 : 1;
        cr_assert_neq (take (g), GQ_OUTCOME_REFUSED);
    }
    expect_all (-4);
    end ();
}

Test (core, sample_weights_make_the_mean_that_of_all_samples)
{
    static const uint32_t samples[] = {1, 2, 5};
    const gq_core_config config = {
        .aggregate = 3, .max_staleness = UINT64_MAX, .weigh_samples = true};
    begin (&config, 0);
    for (uint32_t i = 0; i < 3; i++) {
        gradient g = of (i, 1, (float)(i + 1));
        g.samples = samples[i];
        cr_assert_eq (take (g), i < 2 ? GQ_OUTCOME_HELD : GQ_OUTCOME_STEPPED);
    }
    expect_all (-2.5f); /* (1 * 1 + 2 * 2 + 5 * 3) / 8, exact in float32 */
    end ();
}

Test (core, without_sample_weights_samples_do_not_matter)
{
    const gq_core_config config = {.aggregate = 2, .max_staleness = UINT64_MAX};
    begin (&config, 0);
    gradient a = of (0, 1, 1), b = of (1, 1, 2);
    a.samples = 1000;
    take (a);
    take (b);
    expect_all (-1.5f);
    end ();
}

Test (core, damping_inside_a_step_takes_part_of_one_gradient_and_leaves_the_divisor)
{
    const gq_core_config config = {.aggregate = 2, .damp = true};
    begin (&config, 10);
    cr_assert_eq (take (stale (1, 0, 1)), GQ_OUTCOME_HELD);
    cr_assert_eq (take (stale (2, 4, 1)), GQ_OUTCOME_STEPPED); /* mean 2: half of it */
    expect_all (-0.75f);                                       /* (1 + 1/2) / 2 */
    end ();
}

Test (core, a_held_gradient_is_acknowledged_only_with_its_step)
{
    const gq_core_config config = {.aggregate = 3, .max_staleness = UINT64_MAX};
    begin (&config, 0);
    take (of (0, 1, 1));
    take (of (1, 1, 1));
    cr_assert_eq (settled (0), 0);
    cr_assert_eq (settled (1), 0);
    cr_assert_not (core.ledger.actors[0].owed);
    take (of (0, 2, 1));
    cr_assert_eq (settled (0), 2);
    cr_assert_eq (settled (1), 1);
    cr_assert (core.ledger.actors[0].owed && core.ledger.actors[1].owed);
    end ();
}

Test (core, a_refused_gradient_behind_a_held_one_is_settled_with_it)
{
    const gq_core_config config = {.aggregate = 2, .max_staleness = UINT64_MAX};
    begin (&config, 0);
    take (of (0, 1, 1));
    cr_assert_eq (take (of (0, 2, NAN)), GQ_OUTCOME_REFUSED);
    const gq_ack ack = gq_ledger_ack (&core.ledger, 0);
    cr_assert_eq (ack.cumulative, 0, "cumulative: 2 settled would say that 1 is");
    cr_assert_eq (ack.refused, 1, "but the refusal is known at once");
    cr_assert_eq (take (of (1, 1, 3)), GQ_OUTCOME_STEPPED);
    cr_assert_eq (settled (0), 2);
    cr_assert_eq (core.applied, 2);
    expect_all (-2);
    end ();
}

Test (core, a_refused_gradient_takes_no_place_in_a_step)
{
    const gq_core_config config = {.aggregate = 2, .max_staleness = 0};
    begin (&config, 5);
    take (of (0, 1, 1));
    cr_assert_eq (take (stale (1, 1, 100)), GQ_OUTCOME_REFUSED);
    cr_assert_eq (take (of (2, 1, 3)), GQ_OUTCOME_STEPPED);
    expect_all (-2);
    end ();
}

Test (core, synchronous_steps_refuse_what_came_too_late_for_the_last_one)
{
    /* Backup workers: K of N with staleness 0; the slowest one's gradient is refused, the next one,
     * from the new version, is welcome. */
    const gq_core_config config = {.aggregate = 2, .max_staleness = 0};
    begin (&config, 0);
    const gradient slow = of (2, 1, 50);
    take (of (0, 1, 1));
    take (of (1, 1, 1));
    cr_assert_eq (take (slow), GQ_OUTCOME_REFUSED);
    take (of (2, 2, 1));
    take (of (0, 2, 1));
    expect_all (-2);
    cr_assert_eq (core.version, 2);
    end ();
}

/* ---- first weights ---- */

static gq_outcome
take_init (const float *values, gq_status *reason)
{
    gq_frame frame = support_frame (GQ_KIND_INIT, core.layout.digest, N);
    memcpy (frame.run, core.run, GQ_RUN_ID_BYTES);
    return take_frame (&frame, values, reason);
}

Test (core, the_first_offer_of_weights_becomes_version_0_and_later_ones_are_ignored)
{
    const float first[N] = {1, 2, 3, 4, 5, 6, 7}, second[N] = {9};
    gq_status reason;
    begin_without_weights (&plain);
    cr_assert_eq (take_init (first, &reason), GQ_OUTCOME_STARTED);
    expect_weights (first);
    cr_assert (core.has_weights);
    cr_assert_eq (core.version, 0);
    cr_assert_eq (take_init (second, &reason), GQ_OUTCOME_IGNORED);
    expect_weights (first);
    cr_assert_eq (take (of (0, 1, 1)), GQ_OUTCOME_STEPPED);
    cr_assert_eq (take_init (second, &reason), GQ_OUTCOME_IGNORED);
    cr_assert_eq (core.version, 1);
    end ();
}

Test (core, first_weights_that_are_not_finite_or_of_another_layout_are_not_taken)
{
    const float nan[N] = {0, NAN}, zero[N] = {0};
    gq_status reason;
    begin_without_weights (&plain);
    cr_assert_eq (take_init (nan, &reason), GQ_OUTCOME_IGNORED);
    cr_assert_eq (reason, GQ_NONFINITE);
    gq_frame frame = support_frame (GQ_KIND_INIT, core.layout.digest + 1, N);
    memcpy (frame.run, core.run, GQ_RUN_ID_BYTES);
    cr_assert_eq (take_frame (&frame, zero, &reason), GQ_OUTCOME_IGNORED);
    cr_assert_eq (reason, GQ_LAYOUT);
    cr_assert_not (core.has_weights);
    cr_assert_eq (take_init (zero, &reason), GQ_OUTCOME_STARTED);
    end ();
}

/* ---- names ---- */

Test (core, a_parameter_may_not_be_named_as_a_slot_of_another_is_in_checkpoints)
{
    static const struct {
        const char *first, *second;
        gq_status status;
    } pairs[] = {{"x", "momentum_buffer.x", GQ_INVALID},
                 {"momentum_buffer.x", "x", GQ_INVALID},
                 {"y", "momentum_buffer.x", GQ_OK},
                 {"x", "momentum_bufferx", GQ_OK},
                 {"x", "exp_avg.x", GQ_OK}, /* no slot of sgd */
                 {"x", "momentum_buffer.", GQ_OK}};
    rule = load ("sgd", "auto", NO_SETS);
    gq_core_init (&core, &plain, rule);
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        gq_tensor_shape shapes[2] = {{.rank = 0}, {.rank = 0}};
        gq_layout layout;
        gq_error error = {""};
        snprintf (shapes[0].name, GQ_NAME_MAX, "%s", pairs[i].first);
        snprintf (shapes[1].name, GQ_NAME_MAX, "%s", pairs[i].second);
        cr_assert_eq (gq_layout_init (&layout, shapes, 2, NULL), GQ_OK);
        cr_assert_eq (gq_core_check_layout (&core, &layout, &error), pairs[i].status, "%s and %s",
                      pairs[i].first, pairs[i].second);
        if (pairs[i].status != GQ_OK)
            cr_assert_not_null (strstr (error.text, "momentum_buffer.x"), "%s", error.text);
        gq_layout_clear (&layout);
    }
    end ();
}
