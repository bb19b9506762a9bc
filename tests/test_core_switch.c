/*
 * Another rule and other settings take over in the midst of a run: what stays, what starts anew.
 */
#include "core_testing.h"

#include "core_compare.h"

TestSuite (core_switch, .timeout = 60);

static const gq_core_config of_three = {.aggregate = 3, .max_staleness = UINT64_MAX};

/* Go on under another rule; the old one is gone afterwards, as in a run. */
static void
switch_to (const gq_core_config *config, const char *name, const char *const *sets)
{
    gq_rule *next = load (name, "auto", sets);
    cr_assert_eq (gq_core_switch (&core, config, next), GQ_OK);
    gq_rule_free (&rule);
    rule = next;
}

static void
take_some (uint64_t from, uint64_t to)
{
    for (uint64_t sequence = from; sequence <= to; sequence++)
        cr_assert_neq (take (of (1, sequence, 1.0f / (float)sequence)), GQ_OUTCOME_REFUSED);
}

Test (core_switch, the_same_plug_in_keeps_weights_slots_scalars_and_steps)
{
    float weights[N], slots[2][N];
    double scalars[GQ_SCALARS_MAX];
    rule_name = "adam";
    begin (&plain, 10);
    take_some (1, 5);
    memcpy (weights, gq_buffers_current (core.buffers), sizeof weights);
    for (size_t i = 0; i < 2; i++)
        memcpy (slots[i], gq_rule_slot (rule, i), sizeof slots[i]);
    const size_t scalar_count = gq_rule_scalar_count (rule);
    memcpy (scalars, gq_rule_scalars (rule), scalar_count * sizeof *scalars);
    switch_to (&plain, "adam", SETS ("lr=0.25", "clip_norm=2"));
    expect_weights (weights);
    cr_assert_eq (core.version, 15);
    cr_assert_eq (gq_rule_steps (rule), 5);
    for (size_t i = 0; i < 2; i++)
        expect_same_vector (gq_rule_slot (rule, i), slots[i], N, "a slot");
    cr_assert_arr_eq (gq_rule_scalars (rule), scalars, scalar_count * sizeof *scalars);
    cr_assert_eq (take (of (1, 6, 1)), GQ_OUTCOME_STEPPED);
    end ();
}

Test (core_switch, another_plug_in_keeps_weights_and_ledger_and_starts_its_own_slots)
{
    float weights[N];
    const float zero[N] = {0};
    rule_name = "adam";
    begin (&plain, 10);
    take_some (1, 5);
    memcpy (weights, gq_buffers_current (core.buffers), sizeof weights);
    switch_to (&plain, "rmsprop", NO_SETS);
    expect_weights (weights);
    cr_assert_eq (core.version, 15);
    cr_assert_eq (settled (1), 5);
    cr_assert_eq (gq_rule_steps (rule), 0);
    for (size_t i = 0; i < gq_rule_slot_count (rule); i++)
        expect_same_vector (gq_rule_slot (rule, i), zero, N, "a slot");
    cr_assert_eq (take (of (1, 5, 1)), GQ_OUTCOME_IGNORED, "what was applied stays so");
    cr_assert_eq (take (of (1, 6, 1)), GQ_OUTCOME_STEPPED);
    end ();
}

Test (core_switch, a_step_being_aggregated_goes_on_under_the_new_settings)
{
    const gq_core_config of_four = {.aggregate = 4, .max_staleness = UINT64_MAX};
    begin (&of_three, 0);
    take (of (0, 1, 1));
    take (of (1, 1, 2));
    switch_to (&of_four, "sgd", SETS ("lr=1"));
    cr_assert_eq (core.held, 2);
    cr_assert_eq (take (of (2, 1, 3)), GQ_OUTCOME_HELD);
    cr_assert_eq (settled (0), 0);
    cr_assert_eq (take (of (3, 1, 6)), GQ_OUTCOME_STEPPED);
    expect_all (-3); /* (1 + 2 + 3 + 6) / 4 */
    cr_assert_eq (settled (0), 1);
    end ();
}

Test (core_switch, a_step_that_is_complete_under_the_new_settings_is_made_at_once_by_the_new_rule)
{
    for (uint32_t aggregate = 1; aggregate <= 2; aggregate++) {
        const gq_core_config fewer = {.aggregate = aggregate, .max_staleness = UINT64_MAX};
        begin (&of_three, 0);
        take (of (0, 1, 1));
        take (of (1, 1, 2));
        switch_to (&fewer, "sgd", SETS ("lr=2"));
        expect_all (-3); /* 2 * (1 + 2) / 2 */
        cr_assert_eq (core.version, 1);
        cr_assert_eq (core.applied, 2);
        cr_assert_eq (core.held, 0);
        cr_assert (settled (0) == 1 && settled (1) == 1);
        end ();
    }
}

Test (core_switch, aggregation_can_begin_in_the_midst_of_a_run)
{
    begin (&plain, 0);
    cr_assert_eq (take (of (0, 1, 1)), GQ_OUTCOME_STEPPED);
    switch_to (&of_three, "sgd", SETS ("lr=1"));
    cr_assert_eq (take (of (0, 2, 3)), GQ_OUTCOME_HELD);
    cr_assert_eq (take (of (0, 3, 3)), GQ_OUTCOME_HELD);
    cr_assert_eq (take (of (0, 4, 3)), GQ_OUTCOME_STEPPED);
    expect_all (-4);
    end ();
}

Test (core_switch, settings_can_change_under_the_same_rule)
{
    const gq_core_config strict = {.aggregate = 1, .max_staleness = 0};
    begin (&plain, 10);
    cr_assert_eq (gq_core_switch (&core, &strict, rule), GQ_OK);
    gradient g = of (1, 1, 1);
    g.version = 9;
    cr_assert_eq (take (g), GQ_OUTCOME_REFUSED);
    cr_assert_eq (take (of (1, 2, 1)), GQ_OUTCOME_STEPPED);
    end ();
}

Test (core_switch, before_any_layout_only_rule_and_settings_change)
{
    begin_without_layout (&plain);
    switch_to (&of_three, "adam", NO_SETS);
    cr_assert_eq (core.config.aggregate, 3);
    cr_assert_null (core.sum);
    const gq_tensor_shape shape = {.name = "w", .rank = 1, .shape = {N}};
    gq_layout layout;
    cr_assert_eq (gq_layout_init (&layout, &shape, 1, NULL), GQ_OK);
    cr_assert_eq (gq_core_set_layout (&core, &layout), GQ_OK);
    cr_assert_not_null (core.sum);
    cr_assert_not_null (gq_rule_slot (rule, 1));
    end ();
}
