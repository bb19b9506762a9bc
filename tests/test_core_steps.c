/*
 * Core of the optimizer: what one step is made of.  How old a gradient may be, how much an old one
 * counts, and how many make a mean.
 */
#include "core_testing.h"

TestSuite (core_steps, .timeout = 60);

/* ---- staleness ---- */

static gradient
stale (uint64_t sequence, uint64_t age, float value)
{
    gradient g = of (1, sequence, value);
    g.version = core.version - age;
    return g;
}

Test (core_steps, a_gradient_is_refused_past_the_allowed_staleness_and_not_before)
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

Test (core_steps, without_a_bound_any_staleness_is_applied)
{
    begin (&plain, 1000000);
    cr_assert_eq (take (stale (1, 1000000, 1)), GQ_OUTCOME_STEPPED);
    expect_all (-1);
    end ();
}

Test (core_steps, damping_scales_by_mean_staleness_over_staleness_but_never_up)
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

Test (core_steps, a_version_from_before_a_restart_keeps_its_age)
{
    /* The journal leads to the very version where the last life ended: none is ever undone. */
    begin (&plain, 10);
    gradient g = of (2, 1, 1);
    g.term = TERM - 1;
    g.version = 7;
    cr_assert_eq (take (g), GQ_OUTCOME_STEPPED);
    cr_assert_eq (core.staleness.max, 3);
    end ();
}

Test (core_steps, a_version_that_does_not_exist_yet_is_not_stale)
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

Test (core_steps, a_step_of_k_gradients_applies_their_mean)
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

Test (core_steps, a_second_step_remembers_nothing_of_the_first)
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

Test (core_steps, sample_weights_make_the_mean_that_of_all_samples)
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

Test (core_steps, without_sample_weights_samples_do_not_matter)
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

Test (core_steps, damping_inside_a_step_takes_part_of_one_gradient_and_leaves_the_divisor)
{
    const gq_core_config config = {.aggregate = 2, .damp = true};
    begin (&config, 10);
    cr_assert_eq (take (stale (1, 0, 1)), GQ_OUTCOME_HELD);
    cr_assert_eq (take (stale (2, 4, 1)), GQ_OUTCOME_STEPPED); /* mean 2: half of it */
    expect_all (-0.75f);                                       /* (1 + 1/2) / 2 */
    end ();
}

Test (core_steps, a_held_gradient_is_acknowledged_only_with_its_step)
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

Test (core_steps, a_refused_gradient_behind_a_held_one_is_settled_with_it)
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

Test (core_steps, a_refused_gradient_takes_no_place_in_a_step)
{
    const gq_core_config config = {.aggregate = 2, .max_staleness = 0};
    begin (&config, 5);
    take (of (0, 1, 1));
    cr_assert_eq (take (stale (1, 1, 100)), GQ_OUTCOME_REFUSED);
    cr_assert_eq (take (of (2, 1, 3)), GQ_OUTCOME_STEPPED);
    expect_all (-2);
    end ();
}

Test (core_steps, synchronous_steps_refuse_what_came_too_late_for_the_last_one)
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
