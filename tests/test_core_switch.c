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

/* What a rule remembers, apart from the rule. */
typedef struct memory {
    float slots[GQ_SLOTS_MAX][N];
    double scalars[GQ_SCALARS_MAX];
    uint64_t steps;
} memory;

static memory
remembered (const gq_rule_state *state)
{
    memory kept = {.steps = state->steps};
    for (size_t i = 0; i < state->slot_count; i++)
        memcpy (kept.slots[i], state->slots[i], sizeof kept.slots[i]);
    memcpy (kept.scalars, state->scalars, sizeof kept.scalars);
    return kept;
}

static void
expect_remembers (const gq_rule_state *state, const char *name, const memory *kept)
{
    cr_assert_str_eq (state->name, name);
    cr_assert_eq (state->n, N);
    cr_assert_eq (state->steps, kept->steps);
    for (size_t i = 0; i < state->slot_count; i++)
        expect_same_vector (state->slots[i], kept->slots[i], N, state->slot_names[i]);
    cr_assert_eq (
        memcmp (state->scalars, kept->scalars, state->scalar_count * sizeof *kept->scalars), 0);
}

Test (core_switch, a_rule_that_comes_back_goes_on_as_if_it_had_never_rested)
{
    rule_name = "adam";
    begin (&plain, 10);
    take_some (1, 5);
    const memory adam = remembered (gq_rule_state_of (rule));
    cr_assert (adam.steps == 5 && adam.slots[1][0] != 0 && adam.scalars[0] != 1);
    switch_to (&plain, "sgd", SETS ("momentum=0.5"));
    expect_remembers (&core.retired, "adam", &adam);
    cr_assert_eq (core.retired.version, 15);
    take_some (6, 8);
    const memory sgd = remembered (gq_rule_state_of (rule));
    switch_to (&plain, "adam", SETS ("lr=0.25"));
    expect_remembers (gq_rule_state_of (rule), "adam", &adam);
    expect_remembers (&core.retired, "sgd", &sgd);
    cr_assert_eq (core.retired.version, 18);
    take_some (9, 9);
    cr_assert_eq (gq_rule_steps (rule), 6);
    switch_to (&plain, "sgd", SETS ("momentum=0.5"));
    expect_remembers (gq_rule_state_of (rule), "sgd", &sgd);
    cr_assert_eq (core.retired.steps, 6);
    end ();
}

Test (core_switch, a_schedule_goes_by_the_steps_of_its_rule)
{
    rule_sets = SETS ("lr=1", "schedule=linear", "schedule_steps=4");
    begin (&plain, 10);
    take (of (1, 1, 1));
    take (of (1, 2, 1));
    expect_all (-1.75f); /* lr 1, 3/4 */
    switch_to (&plain, "adagrad", SETS ("lr=0"));
    take_some (3, 5);
    switch_to (&plain, "sgd", rule_sets);
    take (of (1, 6, 1));
    expect_all (-2.25f); /* its third step: 2/4 */
    switch_to (&plain, "sgd", SETS ("lr=1", "schedule=linear", "schedule_steps=8"));
    take (of (1, 7, 1));
    expect_all (-2.875f); /* its fourth, of eight: 5/8 */
    switch_to (&plain, "sgd", rule_sets);
    take (of (1, 8, 1));
    expect_all (-2.875f);
    cr_assert_eq (core.version, 18, "a step that changes nothing is one");
    end ();
}

Test (core_switch, other_settings_of_the_same_rule_leave_what_retired_before_it)
{
    rule_name = "adam";
    begin (&plain, 0);
    take_some (1, 3);
    const memory adam = remembered (gq_rule_state_of (rule));
    switch_to (&plain, "sgd", NO_SETS);
    take_some (4, 5);
    switch_to (&of_three, "sgd", SETS ("lr=0.5", "clip_norm=1"));
    expect_remembers (&core.retired, "adam", &adam);
    cr_assert_eq (core.retired.version, 3);
    cr_assert_eq (gq_rule_steps (rule), 2);
    end ();
}

Test (core_switch, only_the_rule_before_the_current_one_is_kept)
{
    const float zero[N] = {0};
    rule_name = "adam";
    begin (&plain, 0);
    take_some (1, 3);
    switch_to (&plain, "sgd", NO_SETS);
    switch_to (&plain, "rmsprop", NO_SETS);
    cr_assert_str_eq (core.retired.name, "sgd");
    switch_to (&plain, "adam", NO_SETS);
    cr_assert_str_eq (core.retired.name, "rmsprop");
    cr_assert_eq (gq_rule_steps (rule), 0);
    expect_same_vector (gq_rule_slot (rule, 0), zero, N, "a slot");
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
    cr_assert_str_empty (core.retired.name, "a rule without slots leaves none");
    const gq_tensor_shape shape = {.name = "w", .rank = 1, .shape = {N}};
    gq_layout layout;
    cr_assert_eq (gq_layout_init (&layout, &shape, 1, NULL), GQ_OK);
    cr_assert_eq (gq_core_set_layout (&core, &layout), GQ_OK);
    cr_assert_not_null (core.sum);
    cr_assert_not_null (gq_rule_slot (rule, 1));
    end ();
}
