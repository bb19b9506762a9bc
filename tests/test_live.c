/*
 * Live state: an optimizer that is killed between any two blocks of a step, or anywhere around it,
 * goes on to the same bits as one that was not, from gradients that the journal only names.
 */
#include "live_testing.h"

TestSuite (live, .timeout = 240);

/* What a run that nobody disturbs comes to. */
static report
undisturbed (const char *const *words)
{
    directory_begin ();
    report told = complete (&(order){.words = words, .until = EVENTS});
    remove_all ();
    return told;
}

/* Kill at each pass of a point in turn; then the next life at `again`; then go on to the end. */
static unsigned
expect_the_same_bits (const char *const *words, const char *point, const char *again)
{
    const report expected = undisturbed (words);
    char crash[64];
    unsigned passes = 0;
    for (bool killed = true; killed; passes += killed) {
        report told;
        snprintf (crash, sizeof crash, "%s:%u", point, passes + 1);
        directory_begin ();
        killed = !run_life (&(order){.words = words, .crash = crash, .until = EVENTS}, &told);
        if (killed && again != NULL)
            (void)run_life (&(order){.words = words, .crash = again, .until = EVENTS}, &told);
        if (killed)
            told = complete (&(order){.words = words, .until = EVENTS});
        cr_assert_eq (told.version, expected.version, "after %s: version %llu, not %llu", crash,
                      (unsigned long long)told.version, (unsigned long long)expected.version);
        cr_assert_eq (told.digest, expected.digest, "after %s (then %s): other bits", crash,
                      again != NULL ? again : "nothing");
        remove_all ();
    }
    return passes;
}

#define HELD                                                                                   \
    WORDS ("--optimizer", "adam", "--aggregate", "3", "--aggregate-weights", "samples",        \
           "--staleness-policy", "damp", "--set", "clip_norm=0.5", "--set", "schedule=linear", \
           "--set", "schedule_steps=20", "--set", "warmup_steps=2")
#define CLIPPED                                                                              \
    WORDS ("--optimizer", "rmsprop", "--staleness-policy", "damp", "--set", "clip_norm=0.5", \
           "--set", "schedule=cosine", "--set", "schedule_steps=12")

Test (live, a_step_that_was_killed_at_any_block_is_finished)
{
    cr_assert_eq (expect_the_same_bits (ADAM, "stepping", NULL), 2 * BLOCKS * EVENTS);
}

Test (live, a_recovery_that_is_killed_in_a_block_too_does_no_harm)
{
    cr_assert_eq (expect_the_same_bits (ADAM, "stepping", "stepping:1"), 2 * BLOCKS * EVENTS);
}

Test (live, so_is_the_step_of_several_gradients)
{
    cr_assert_eq (expect_the_same_bits (HELD, "stepping", NULL), 2 * BLOCKS * (EVENTS / 3));
}

Test (live, so_is_one_with_an_idle_slot)
{
    cr_assert_eq (expect_the_same_bits (CLIPPED, "stepping", NULL), 2 * BLOCKS * EVENTS);
}

Test (live, so_is_one_of_a_rule_without_state)
{
    cr_assert_eq (expect_the_same_bits (WORDS ("--optimizer", "sgd"), "stepping", NULL),
                  2 * BLOCKS * EVENTS);
}

Test (live, killed_anywhere_around_a_step_nothing_is_lost_or_doubled)
{
    static const char *const points[] = {"before-apply", "before-commit", "committing",
                                         "after-commit"};
    for (size_t i = 0; i < sizeof points / sizeof points[0]; i++) {
        cr_assert_geq (expect_the_same_bits (ADAM, points[i], "recovering:1"), EVENTS);
        cr_assert_geq (expect_the_same_bits (HELD, points[i], NULL), EVENTS);
    }
}
