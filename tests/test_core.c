/*
 * Core of the optimizer: which gradients are applied, which are refused and why, and that both are
 * answered; which first weights and names it takes.
 */
#include "core_testing.h"

TestSuite (core, .timeout = 60);

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

Test (core, a_gradient_in_bf16_is_its_float32_values_at_any_address)
{
    /* Of 8 significant digits, as are their sums. */
    const float values[N] = {1, -2, 0.5F, 96, -0.0078125F, 0, 3};
    float expected[N] = {0};
    begin (&plain, 0);
    for (size_t shift = 0; shift < 8; shift++) {
        gradient g = of (1, shift + 1, 0);
        gq_frame frame = support_bf16 (header_of (&g)), read;
        uint16_t payload[N];
        gq_status reason;
        size_t size;
        for (size_t i = 0; i < N; i++) {
            uint32_t bits;
            memcpy (&bits, &values[i], sizeof bits);
            payload[i] = (uint16_t)(bits >> 16);
            expected[i] -= values[i];
        }
        uint8_t *bytes = support_message (&frame, payload, &size);
        uint8_t *place = support_guarded_end (size + 8) - size - shift;
        memcpy (place, bytes, size);
        cr_assert_eq (gq_core_take (&core, place, size, &read, &reason), GQ_OUTCOME_STEPPED);
        expect_weights (expected);
        free (bytes);
    }
    end ();
}

/* ---- refusing ---- */

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

Test (core, bf16_is_refused_for_the_same_reasons)
{
    static const uint16_t bad[] = {0x7f80, 0xff80, 0x7fc0, 0xff81};
    uint64_t sequence = 0;
    uint16_t payload[N + 1] = {0};
    begin (&plain, 0);
    for (size_t i = 0; i < N; i++)
        for (size_t k = 0; k < sizeof bad / sizeof bad[0]; k++) {
            const gradient g = of (2, ++sequence, 0);
            const gq_frame frame = support_bf16 (header_of (&g));
            payload[i] = bad[k];
            expect_refused (&frame, payload, GQ_NONFINITE);
            payload[i] = 0;
        }
    gradient g = of (2, ++sequence, 0);
    gq_frame frame = header_of (&g);
    frame.count = N + 1;
    frame = support_bf16 (frame);
    expect_refused (&frame, payload, GQ_COUNT);
    g.sequence = ++sequence;
    frame = support_bf16 (header_of (&g));
    frame.digest++;
    expect_refused (&frame, payload, GQ_LAYOUT);
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
    begin_without_layout (&plain);
    gq_status reason;
    const gradient g = of (2, 1, 1);
    const gq_frame frame = header_of (&g);
    cr_assert_eq (take_frame (&frame, g.values, &reason), GQ_OUTCOME_REFUSED);
    cr_assert_eq (reason, GQ_LAYOUT);
    cr_assert_eq (settled (2), 1);
    end ();
}

Test (core, what_names_nobody_is_counted_as_malformed_and_changes_nothing)
{
    begin (&plain, 0);
    const gradient g = of (2, 1, 1);
    static gq_ledger before;
    gq_frame frame = header_of (&g), read;
    gq_status reason;
    memcpy (&before, &core.ledger, sizeof before);
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
    cr_assert_arr_eq (&core.ledger, &before, sizeof before);
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

Test (core, a_skipped_number_holds_nothing_up_and_may_still_come_once)
{
    begin (&plain, 0);
    cr_assert_eq (take (of (1, 1, 1)), GQ_OUTCOME_STEPPED);
    cr_assert_eq (take (of (1, 5, 1)), GQ_OUTCOME_STEPPED);
    gq_ack ack = gq_ledger_ack (&core.ledger, 1);
    cr_assert (ack.cumulative == 1 && ack.beyond == 8, "5 is bit 3 beyond 1");
    cr_assert_eq (take (of (1, 3, 1)), GQ_OUTCOME_STEPPED);
    cr_assert_eq (take (of (1, 3, 1)), GQ_OUTCOME_IGNORED);
    cr_assert_eq (take (of (1, 5, 1)), GQ_OUTCOME_IGNORED);
    cr_assert_eq (take (of (1, 2, NAN)), GQ_OUTCOME_REFUSED);
    cr_assert_eq (take (of (1, 2, 1)), GQ_OUTCOME_IGNORED, "refused is settled too");
    ack = gq_ledger_ack (&core.ledger, 1);
    cr_assert (ack.cumulative == 3 && ack.beyond == 2);
    cr_assert_eq (take (of (1, 4, 1)), GQ_OUTCOME_STEPPED);
    cr_assert_eq (settled (1), 5);
    expect_all (-4);
    end ();
}

Test (core, a_gradient_of_an_epoch_that_ended_is_ignored)
{
    begin (&plain, 0);
    gradient g = of (1, 1, 1);
    cr_assert_eq (take (g), GQ_OUTCOME_STEPPED);
    grant (1, EPOCH + 3);
    core.ledger.actors[1].owed = false;
    g.sequence = 2;
    cr_assert_eq (take (g), GQ_OUTCOME_IGNORED);
    cr_assert_eq (core.ledger.outdated, 1);
    cr_assert (core.ledger.actors[1].owed, "an ack of the new epoch tells the old life its end");
    cr_assert_eq (settled (1), 0);
    g.epoch = EPOCH + 3;
    g.sequence = 1;
    cr_assert_eq (take (g), GQ_OUTCOME_STEPPED);
    cr_assert_eq (settled (1), 1);
    expect_all (-2);
    end ();
}

Test (core, a_gradient_of_nobody_or_too_far_ahead_is_malformed_and_changes_nothing)
{
    begin (&plain, 0);
    gradient never = of (1, 1, 1), stranger = of (ACTORS, 1, 1), far = of (1, 65, 1);
    never.epoch = EPOCH + 1;
    gq_status reason;
    for (int i = 0; i < 3; i++) {
        const gradient *g = i == 0 ? &never : i == 1 ? &stranger : &far;
        const gq_frame frame = header_of (g);
        cr_assert_eq (take_frame (&frame, g->values, &reason), GQ_OUTCOME_IGNORED);
        cr_assert_eq (reason, GQ_MALFORMED);
        cr_assert_eq (core.malformed, i + 1);
    }
    cr_assert_not (core.ledger.actors[ACTORS].known);
    expect_all (0);
    cr_assert_eq (take (of (1, 64, 1)), GQ_OUTCOME_STEPPED, "the map holds 64");
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
    frame.digest--;
    cr_assert_eq (take_bf16 (&frame, zero, &reason), GQ_OUTCOME_IGNORED);
    cr_assert_eq (reason, GQ_MALFORMED, "weights are float32");
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
                 {"x", "exp_avg.x", GQ_OK},                           /* no slot of sgd */
                 {"x", "retired.adam.momentum_buffer.x", GQ_INVALID}, /* whatever may retire */
                 {"a.x", "retired.r.s.a.x", GQ_INVALID},
                 {"x", "retired.r.s.a.x", GQ_OK},
                 {"x", "retired.r.x", GQ_OK},
                 {"x", "retired.x", GQ_OK},
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
        cr_assert_eq (gq_core_check_layout (rule, &layout, &error), pairs[i].status, "%s and %s",
                      pairs[i].first, pairs[i].second);
        if (pairs[i].status != GQ_OK)
            cr_assert (strstr (error.text, pairs[i].first) != NULL &&
                           strstr (error.text, pairs[i].second) != NULL,
                       "%s", error.text);
        gq_layout_clear (&layout);
    }
    end ();
}

Test (core, a_slot_may_not_be_called_as_checkpoints_call_what_retired)
{
    const gq_tensor_shape shape = {.name = "x", .rank = 0};
    gq_layout layout;
    gq_error error = {""};
    rule = load (build_path ("tests/plugins/slot_retired.so"), "auto", NO_SETS);
    gq_core_init (&core, &plain, rule);
    cr_assert_eq (gq_layout_init (&layout, &shape, 1, NULL), GQ_OK);
    cr_assert_eq (gq_core_check_layout (rule, &layout, &error), GQ_INVALID);
    cr_assert_not_null (strstr (error.text, "rename the slot"), "%s", error.text);
    gq_layout_clear (&layout);
    end ();
}
