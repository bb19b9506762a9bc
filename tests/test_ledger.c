/*
 * Ledger: who sent what, what is settled, and that an acknowledgement never says too much.
 */
#include "support.h"

#include "optimizer/ledger.h"

TestSuite (ledger, .timeout = 60);

static gq_ledger ledger;

static void
nonce_of (uint32_t number, uint8_t nonce[GQ_NONCE_BYTES])
{
    memset (nonce, 0x11, GQ_NONCE_BYTES);
    memcpy (nonce, &number, sizeof number);
}

/* The epoch granted to nonce `number`; *actor in and out. */
static uint32_t
hello (uint32_t number, uint32_t *actor, uint32_t *next_epoch)
{
    uint8_t nonce[GQ_NONCE_BYTES];
    uint32_t epoch = 0;
    nonce_of (number, nonce);
    cr_assert_eq (gq_ledger_hello (&ledger, actor, nonce, next_epoch, &epoch), GQ_OK);
    return epoch;
}

Test (ledger, every_new_hello_gets_an_epoch_of_its_own)
{
    uint32_t next = 7, actor = 3;
    cr_assert_eq (hello (1, &actor, &next), 7);
    cr_assert_eq (hello (2, &actor, &next), 8);
    actor = 4;
    cr_assert_eq (hello (3, &actor, &next), 9);
    cr_assert_eq (next, 10);
    cr_assert_eq (ledger.actor_count, 5);
}

Test (ledger, a_repeated_hello_is_granted_the_same_again)
{
    uint32_t next = 1, actor = GQ_ACTORS_MAX;
    const uint32_t epoch = hello (1, &actor, &next);
    const uint32_t granted = actor;
    cr_assert_eq (gq_ledger_enter (&ledger, actor, epoch, 1), GQ_OK);
    actor = GQ_ACTORS_MAX;
    cr_assert_eq (hello (1, &actor, &next), epoch);
    cr_assert_eq (actor, granted);
    cr_assert_eq (next, 2);
    cr_assert_eq (ledger.actors[granted].received, 1, "and forgets nothing");
}

Test (ledger, who_asks_for_any_id_gets_the_lowest_free_one_until_none_is_left)
{
    uint32_t next = 1, taken = 1, actor;
    uint8_t nonce[GQ_NONCE_BYTES];
    uint32_t epoch;
    hello (90000, &taken, &next);
    for (uint32_t i = 0; i < GQ_ACTORS_MAX - 1; i++) {
        actor = GQ_ACTORS_MAX;
        hello (i, &actor, &next);
        cr_assert_eq (actor, i < 1 ? 0 : i + 1);
    }
    actor = GQ_ACTORS_MAX;
    nonce_of (90001, nonce);
    const uint32_t before = next;
    cr_assert_eq (gq_ledger_hello (&ledger, &actor, nonce, &next, &epoch), GQ_FULL);
    cr_assert_eq (next, before);
    actor = GQ_ACTORS_MAX;
    nonce_of (5, nonce);
    cr_assert_eq (gq_ledger_hello (&ledger, &actor, nonce, &next, &epoch), GQ_OK);
    cr_assert_eq (actor, 6, "who is known keeps its place");
}

Test (ledger, a_new_life_of_an_actor_begins_at_number_1_with_nothing_refused)
{
    uint32_t next = 1, actor = 2;
    const uint32_t first = hello (1, &actor, &next);
    cr_assert_eq (gq_ledger_enter (&ledger, 2, first, 1), GQ_OK);
    gq_ledger_hold (&ledger, 2);
    cr_assert_eq (gq_ledger_enter (&ledger, 2, first, 2), GQ_OK);
    gq_ledger_refuse (&ledger, 2, 2, GQ_STALE);
    const uint32_t second = hello (2, &actor, &next);
    gq_ack ack = gq_ledger_ack (&ledger, 2);
    cr_assert (ack.cumulative == 0 && ack.refused == 0 && ack.refused_reason == GQ_OK);
    cr_assert_eq (gq_ledger_enter (&ledger, 2, first, 3), GQ_REFUSED, "the old life's are late");
    cr_assert_eq (ledger.outdated, 1);
    gq_ledger_settle_all (&ledger); /* the step that the old life's gradient waits for */
    cr_assert_eq (gq_ledger_ack (&ledger, 2).cumulative, 0);
    cr_assert_eq (gq_ledger_enter (&ledger, 2, second, 1), GQ_OK);
    gq_ledger_settle (&ledger, 2);
    cr_assert_eq (gq_ledger_ack (&ledger, 2).cumulative, 1);
    cr_assert_eq (ledger.lost, 0);
}

Test (ledger, numbers_skipped_are_lost_and_numbers_seen_are_duplicates)
{
    uint32_t next = 1, actor = 0;
    const uint32_t epoch = hello (1, &actor, &next);
    static const struct {
        uint64_t sequence;
        gq_status status;
        uint64_t lost, duplicates;
    } steps[] = {{1, GQ_OK, 0, 0}, {2, GQ_OK, 0, 0},    {2, GQ_AGAIN, 0, 1}, {1, GQ_AGAIN, 0, 2},
                 {5, GQ_OK, 2, 2}, {3, GQ_AGAIN, 2, 3}, {6, GQ_OK, 2, 3}};
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        cr_assert_eq (gq_ledger_enter (&ledger, 0, epoch, steps[i].sequence), steps[i].status,
                      "step %zu", i);
        if (steps[i].status == GQ_OK)
            gq_ledger_settle (&ledger, 0);
        cr_assert_eq (ledger.lost, steps[i].lost);
        cr_assert_eq (ledger.duplicates, steps[i].duplicates);
    }
    cr_assert_eq (gq_ledger_ack (&ledger, 0).cumulative, 6);
}

Test (ledger, the_first_number_may_be_lost_too)
{
    uint32_t next = 1, actor = 0;
    const uint32_t epoch = hello (1, &actor, &next);
    cr_assert_eq (gq_ledger_enter (&ledger, 0, epoch, 4), GQ_OK);
    cr_assert_eq (ledger.lost, 3);
}

Test (ledger, the_highest_number_does_not_overflow)
{
    uint32_t next = 1, actor = 0;
    const uint32_t epoch = hello (1, &actor, &next);
    cr_assert_eq (gq_ledger_enter (&ledger, 0, epoch, UINT64_MAX), GQ_OK);
    gq_ledger_settle (&ledger, 0);
    cr_assert_eq (gq_ledger_ack (&ledger, 0).cumulative, UINT64_MAX);
    cr_assert_eq (gq_ledger_enter (&ledger, 0, epoch, UINT64_MAX), GQ_AGAIN);
}

/* The twin: a list of what became of each number. */
typedef struct twin {
    bool held[400];
    uint64_t count, refused, refused_sequence;
} twin;

static uint64_t
settled_of (const twin *self)
{
    for (uint64_t i = 1; i <= self->count; i++)
        if (self->held[i])
            return i - 1;
    return self->count;
}

Test (ledger, acks_never_cover_a_held_gradient_whatever_the_order)
{
    for (uint64_t seed = 1; seed <= 20; seed++) {
        static twin twins[3];
        uint64_t state = seed;
        uint32_t next = 1;
        memset (&ledger, 0, sizeof ledger);
        memset (twins, 0, sizeof twins);
        printf ("seed %llu\n", (unsigned long long)seed);
        for (uint32_t actor = 0; actor < 3; actor++)
            cr_assert_eq (hello (actor, &actor, &next), actor + 1);
        for (int i = 0; i < 300; i++) {
            const uint32_t actor = (uint32_t)(support_random (&state) % 3);
            const uint64_t what = support_random (&state) % 4;
            twin *self = &twins[actor];
            if (what == 0) {
                gq_ledger_settle_all (&ledger);
                for (size_t k = 0; k < 3; k++)
                    memset (twins[k].held, 0, sizeof twins[k].held);
            } else {
                const uint64_t sequence = ++self->count;
                cr_assert_eq (gq_ledger_enter (&ledger, actor, actor + 1, sequence), GQ_OK);
                if (what == 1) {
                    gq_ledger_refuse (&ledger, actor, sequence, GQ_STALE);
                    self->refused++;
                    self->refused_sequence = sequence;
                } else {
                    gq_ledger_hold (&ledger, actor);
                    self->held[sequence] = true;
                }
            }
            for (uint32_t k = 0; k < 3; k++) {
                const gq_ack ack = gq_ledger_ack (&ledger, k);
                /* It may say less than it could: a refusal behind a held one waits with it. */
                cr_assert (ack.cumulative <= settled_of (&twins[k]));
                cr_assert_eq (ack.refused, twins[k].refused);
                cr_assert_eq (ack.refused_sequence, twins[k].refused_sequence);
            }
        }
        gq_ledger_settle_all (&ledger);
        for (uint32_t k = 0; k < 3; k++)
            cr_assert_eq (gq_ledger_ack (&ledger, k).cumulative, twins[k].count, "in the end all");
    }
}
