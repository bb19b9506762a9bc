/*
 * Window of unsettled gradients.  The clock is a number, and the oracle of an acknowledgement is
 * the list of what it says.
 */
#include <criterion/criterion.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "window.h"

TestSuite (window, .timeout = 60);

#define RESEND_NS UINT64_C (1000000)
#define SEED      UINT64_C (20240229)

static gq_window window;

/* A window with `sent` gradients on the way, sequence number n in slot n - 1, sent at n. */
static void
begin (uint32_t size, uint32_t sent)
{
    gq_window_init (&window, size, RESEND_NS, SEED);
    for (uint32_t n = 1; n <= sent; n++) {
        uint32_t slot;
        cr_assert_eq (gq_window_sent (&window, n, &slot), n);
        cr_assert_eq (slot, n - 1);
    }
}

static uint64_t
bit (unsigned i)
{
    return UINT64_C (1) << i;
}

/* What a settled window must still say is unchanged. */
static void
expect_unchanged (const gq_window *before)
{
    cr_assert_eq (memcmp (before, &window, sizeof window), 0);
}

Test (window, room_lasts_for_exactly_size_gradients)
{
    for (uint32_t size = 1; size <= GQ_WINDOW_MAX; size++) {
        gq_window_init (&window, size, RESEND_NS, SEED);
        for (uint32_t n = 0; n < size; n++) {
            uint32_t slot;
            cr_assert (gq_window_room (&window), "size %u, %u sent", size, n);
            cr_assert_eq (gq_window_count (&window), n);
            gq_window_sent (&window, 0, &slot);
        }
        cr_assert_not (gq_window_room (&window), "size %u", size);
        cr_assert_eq (gq_window_count (&window), size);
    }
}

Test (window, sequence_numbers_are_1_2_3_whatever_is_settled_between)
{
    uint64_t state = SEED;
    begin (3, 0);
    printf ("seed %" PRIu64 "\n", state);
    for (uint64_t n = 1; n <= 1000; n++) {
        uint32_t slot;
        cr_assert_eq (gq_window_sent (&window, n, &slot), n);
        state = state * UINT64_C (6364136223846793005) + 1;
        if (!gq_window_room (&window) || state >> 63 != 0)
            gq_window_settle (&window, n, 0);
    }
}

Test (window, slots_on_the_way_are_never_given_out_again)
{
    uint32_t slot;
    begin (4, 4);
    cr_assert_eq (gq_window_settle (&window, 0, bit (2)), bit (2), "sequence 3 is in slot 2");
    cr_assert_eq (gq_window_sent (&window, 9, &slot), 5);
    cr_assert_eq (slot, 2, "the only free one");
    cr_assert_not (gq_window_room (&window));
}

Test (window, cumulative_settles_everything_up_to_it_and_no_more)
{
    for (uint64_t cumulative = 0; cumulative <= GQ_WINDOW_MAX; cumulative++) {
        begin (GQ_WINDOW_MAX, GQ_WINDOW_MAX);
        const uint64_t freed = gq_window_settle (&window, cumulative, 0);
        const uint64_t expected = cumulative == 64 ? UINT64_MAX : bit ((unsigned)cumulative) - 1;
        cr_assert_eq (freed, expected, "cumulative %" PRIu64, cumulative);
        cr_assert_eq (gq_window_count (&window), GQ_WINDOW_MAX - cumulative);
    }
}

Test (window, each_bit_of_beyond_settles_its_own_number_only)
{
    for (unsigned cumulative = 0; cumulative < GQ_WINDOW_MAX; cumulative++)
        for (unsigned i = 0; cumulative + i < GQ_WINDOW_MAX; i++) {
            begin (GQ_WINDOW_MAX, GQ_WINDOW_MAX);
            gq_window_settle (&window, cumulative, 0);
            const uint64_t freed = gq_window_settle (&window, cumulative, bit (i));
            cr_assert_eq (freed, bit (cumulative + i), "%u + 1 + %u", cumulative, i);
            cr_assert_eq (gq_window_count (&window), GQ_WINDOW_MAX - cumulative - 1);
        }
}

Test (window, a_gradient_is_freed_once)
{
    begin (8, 8);
    cr_assert_eq (gq_window_settle (&window, 1, bit (1)), bit (0) | bit (2));
    cr_assert_eq (gq_window_settle (&window, 1, bit (1)), 0, "the same again");
    cr_assert_eq (gq_window_settle (&window, 3, 0), bit (1), "3 was settled before");
    cr_assert_eq (gq_window_count (&window), 5);
}

Test (window, numbers_that_were_never_given_out_settle_nothing)
{
    begin (8, 3);
    const gq_window before = window;
    cr_assert_eq (gq_window_settle (&window, 4, 0), 0);
    expect_unchanged (&before);
    cr_assert_eq (gq_window_settle (&window, UINT64_MAX, UINT64_MAX), 0);
    expect_unchanged (&before);
    /* Bit i is number 1 + 1 + i: 3 is the last one. */
    for (unsigned i = 2; i < 64; i++) {
        cr_assert_eq (gq_window_settle (&window, 1, bit (i)), 0, "bit %u", i);
        cr_assert_eq (gq_window_settle (&window, 1, bit (i) | 1), 0, "bit %u beside a good one", i);
        expect_unchanged (&before);
    }
    cr_assert_eq (gq_window_settle (&window, 1, bit (1)), bit (0) | bit (2), "3 is possible");
}

Test (window, an_older_acknowledgement_changes_nothing)
{
    begin (8, 8);
    cr_assert_eq (gq_window_settle (&window, 3, bit (1)), bit (0) | bit (1) | bit (2) | bit (4));
    const gq_window before = window;
    /* What was said on the way there: each number at most as settled as now. */
    for (uint64_t cumulative = 0; cumulative <= 3; cumulative++) {
        cr_assert_eq (gq_window_settle (&window, cumulative, 0), 0);
        cr_assert_eq (gq_window_settle (&window, cumulative, bit ((unsigned)(4 - cumulative))), 0);
        expect_unchanged (&before);
    }
    uint32_t slot;
    cr_assert_eq (gq_window_sent (&window, 0, &slot), 9, "and takes no number back");
}

Test (window, acknowledgements_in_any_order_free_every_gradient_exactly_once)
{
    for (uint64_t seed = 1; seed <= 200; seed++) {
        uint64_t acks[64][2], state = seed, freed = 0, map = 0;
        unsigned count = 0;
        begin (GQ_WINDOW_MAX, 40);
        /* Settle 1 to 40 in a shuffled order, and acknowledge after each. */
        unsigned order[40] = {0};
        for (unsigned i = 0; i < 40; i++) {
            state = state * UINT64_C (6364136223846793005) + 1;
            const unsigned j = (unsigned)((state >> 33) % (i + 1));
            order[i] = order[j];
            order[j] = i;
        }
        for (unsigned i = 0; i < 40; i++) {
            map |= bit (order[i]);
            const unsigned cumulative = (unsigned)__builtin_ctzll (~map);
            acks[count][0] = cumulative;
            acks[count++][1] = map >> cumulative;
        }
        for (unsigned left = count; left > 0; left--) {
            state = state * UINT64_C (6364136223846793005) + 1;
            const unsigned pick = (unsigned)((state >> 33) % left);
            const uint64_t now = gq_window_settle (&window, acks[pick][0], acks[pick][1]);
            cr_assert_eq (now & freed, 0, "seed %" PRIu64 ": freed twice", seed);
            freed |= now;
            acks[pick][0] = acks[left - 1][0];
            acks[pick][1] = acks[left - 1][1];
        }
        cr_assert_eq (freed, bit (40) - 1, "seed %" PRIu64, seed);
        cr_assert_eq (gq_window_count (&window), 0);
    }
}

Test (window, no_number_is_given_out_past_the_map_of_64)
{
    uint32_t slot;
    begin (2, 1);
    /* Number 1 stays unsettled, all after it are settled one by one. */
    for (uint64_t n = 2; n <= GQ_WINDOW_MAX; n++) {
        cr_assert (gq_window_room (&window), "before %" PRIu64, n);
        cr_assert_eq (gq_window_sent (&window, n, &slot), n);
        gq_window_settle (&window, 0, bit ((unsigned)n - 1));
    }
    cr_assert_eq (gq_window_count (&window), 1);
    cr_assert_not (gq_window_room (&window), "65 could not be acknowledged while 1 is open");
    gq_window_settle (&window, 1, 0);
    cr_assert (gq_window_room (&window));
}

Test (window, what_came_and_waits_for_its_step_stops_nobody)
{
    uint32_t slot;
    begin (2, 1);
    for (uint64_t n = 2; n <= GQ_WINDOW_MAX; n++) {
        gq_window_sent (&window, n, &slot);
        gq_window_settle (&window, 0, bit ((unsigned)n - 1));
    }
    gq_window_received (&window, GQ_WINDOW_MAX + 1);
    cr_assert_not (gq_window_room (&window), "of a number never given out");
    gq_window_received (&window, GQ_WINDOW_MAX);
    cr_assert (gq_window_room (&window), "1 came, late, and is not settled");
    cr_assert_eq (gq_window_sent (&window, 65, &slot), 65);
    cr_assert_eq (gq_window_settle (&window, 65, 0), 3, "1 and 65");
    gq_window_received (&window, 1);
    cr_assert_eq (window.received, 65, "an older one changes nothing");
    for (uint64_t n = 66; n <= 65 + GQ_WINDOW_MAX; n++) {
        cr_assert (gq_window_room (&window), "before %" PRIu64, n);
        gq_window_sent (&window, n, &slot);
        if (n > 66)
            gq_window_settle (&window, 65, bit ((unsigned)(n - 66)));
    }
    cr_assert_not (gq_window_room (&window), "from the higher of what is settled and what came");
}

Test (window, nothing_is_due_before_its_time_and_everything_at_it)
{
    begin (5, 5);
    const uint64_t next_ns = gq_window_next_ns (&window);
    cr_assert_lt (next_ns, UINT64_MAX);
    cr_assert_eq (gq_window_due (&window, next_ns - 1), -1);
    cr_assert_geq (gq_window_due (&window, next_ns), 0);
    cr_assert_eq (window.slots[gq_window_due (&window, next_ns)].due_ns, next_ns);
}

Test (window, the_oldest_of_several_due_comes_first)
{
    begin (4, 4);
    /* 1 is settled and 5 takes its slot, so that slots are not in order of age. */
    uint32_t slot;
    gq_window_settle (&window, 1, 0);
    gq_window_sent (&window, 5, &slot);
    cr_assert_eq (slot, 0);
    const uint64_t late_ns = 10 * RESEND_NS;
    static const int expected[] = {1, 2, 3, 0};
    for (int i = 0; i < 4; i++) {
        const int due = gq_window_due (&window, late_ns);
        cr_assert_eq (due, expected[i], "turn %d: slot %d", i, due);
        gq_window_resent (&window, (uint32_t)due, late_ns);
    }
    cr_assert_eq (gq_window_due (&window, late_ns), -1);
    cr_assert_eq (window.resent, 4);
}

Test (window, a_settled_gradient_is_never_due)
{
    begin (4, 4);
    gq_window_settle (&window, 1, bit (0) | bit (1));
    cr_assert_eq (gq_window_due (&window, UINT64_MAX), 3);
    gq_window_settle (&window, 4, 0);
    cr_assert_eq (gq_window_due (&window, UINT64_MAX), -1);
    cr_assert_eq (gq_window_next_ns (&window), UINT64_MAX);
}

Test (window, the_time_out_doubles_up_to_four_times_within_a_quarter_either_way)
{
    static const uint64_t factors[] = {1, 2, 4, 4, 4, 4, 4, 4};
    for (uint64_t seed = 0; seed < 1000; seed++) {
        uint32_t slot;
        uint64_t now_ns = 12345;
        gq_window_init (&window, 1, RESEND_NS, seed);
        gq_window_sent (&window, now_ns, &slot);
        for (unsigned i = 0; i < sizeof factors / sizeof factors[0]; i++) {
            const uint64_t patience_ns = gq_window_next_ns (&window) - now_ns;
            const uint64_t base_ns = factors[i] * RESEND_NS;
            cr_assert (patience_ns >= base_ns * 3 / 4 && patience_ns <= base_ns * 5 / 4,
                       "seed %" PRIu64 ", send %u: %" PRIu64 " ns of %" PRIu64, seed, i + 1,
                       patience_ns, base_ns);
            now_ns = gq_window_next_ns (&window);
            gq_window_resent (&window, slot, now_ns);
        }
    }
}

Test (window, jitter_spreads_over_the_whole_range_and_differs_by_seed)
{
    /* Uniform over half of the time-out: of 1000, each tenth of it gets 100 +- 9.5; 60 is over four
     * deviations below. */
    unsigned tenths[10] = {0};
    for (uint64_t seed = 0; seed < 1000; seed++) {
        uint32_t slot;
        gq_window_init (&window, 1, RESEND_NS, seed);
        gq_window_sent (&window, 0, &slot);
        const uint64_t above_ns = gq_window_next_ns (&window) - RESEND_NS * 3 / 4;
        tenths[above_ns * 10 / (RESEND_NS / 2 + 1)]++;
    }
    for (unsigned i = 0; i < 10; i++)
        cr_assert_geq (tenths[i], 60, "tenth %u: %u", i, tenths[i]);
}

Test (window, a_resend_moves_only_its_own_time)
{
    begin (3, 3);
    const gq_window before = window;
    gq_window_resent (&window, 1, 5 * RESEND_NS);
    cr_assert_eq (window.slots[0].due_ns, before.slots[0].due_ns);
    cr_assert_eq (window.slots[2].due_ns, before.slots[2].due_ns);
    cr_assert_gt (window.slots[1].due_ns, 5 * RESEND_NS);
    cr_assert_eq (gq_window_count (&window), 3);
}

Test (window, an_acknowledgement_that_lacks_a_settled_number_is_a_rollback)
{
    uint64_t state = SEED;
    printf ("seed %" PRIu64 "\n", state);
    for (int round = 0; round < 2000; round++) {
        /* What is settled: everything up to `cumulative`, and a map beyond it. */
        const uint32_t sent = 1 + (uint32_t)(round % 40);
        begin (GQ_WINDOW_MAX, sent);
        state = state * UINT64_C (6364136223846793005) + 1442695040888963407;
        const uint64_t cumulative = (state >> 33) % (sent + 1);
        const uint64_t left = sent - cumulative;
        const uint64_t beyond = left < 2 ? 0 : (state >> 7) & (bit ((unsigned)left) - 1) & ~bit (0);
        gq_window_settle (&window, cumulative, beyond);
        /* What the later life names; the oracle goes number by number. */
        state = state * UINT64_C (6364136223846793005) + 1442695040888963407;
        const uint64_t other = (state >> 33) % 4 == 0 ? (state >> 40) % (sent + 1) : cumulative;
        const uint64_t map =
            (state >> 50) % 2 == 0 ? beyond | (state & ~bit (0)) : state & ~bit (0);
        bool lacks = false;
        for (uint64_t n = 1; n <= sent; n++) {
            const bool was = n <= cumulative || (beyond >> (n - cumulative - 1) & 1) != 0;
            const bool is = n <= other || (map >> (n - other - 1) & 1) != 0;
            lacks = lacks || (was && !is);
        }
        cr_assert_eq (gq_window_rolled_back (&window, other, map), lacks, "round %d", round);
    }
}
