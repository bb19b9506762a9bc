/*
 * Ledger: who sent what, in whatever order it came, what is settled, and that an acknowledgement
 * never says too much.
 */
#include "support.h"

#include "optimizer/ledger.h"
#include "optimizer/ledger_json.h"
#include "window.h"

TestSuite (ledger, .timeout = 60);

enum { MAP_BITS = 64, EPOCH = 9, ACTOR = 3 };

static gq_ledger ledger;

static void
nonce_of (uint32_t number, uint8_t nonce[GQ_NONCE_BYTES])
{
    memset (nonce, 0x11, GQ_NONCE_BYTES);
    memcpy (nonce, &number, sizeof number);
}

static void
grant (uint32_t actor, uint32_t epoch, uint32_t number)
{
    uint8_t nonce[GQ_NONCE_BYTES];
    nonce_of (number, nonce);
    gq_ledger_grant (&ledger, actor, epoch, nonce);
}

/* A ledger that knows one actor. */
static gq_ledger_entry *
begin (void)
{
    memset (&ledger, 0, sizeof ledger);
    grant (ACTOR, EPOCH, 1);
    return &ledger.actors[ACTOR];
}

static gq_status
judge (uint64_t sequence)
{
    return gq_ledger_judge (&ledger, ACTOR, EPOCH, sequence);
}

/* A new gradient comes and is applied. */
static void
apply (uint64_t sequence)
{
    cr_assert_eq (judge (sequence), GQ_OK, "%llu", (unsigned long long)sequence);
    gq_ledger_enter (&ledger, ACTOR, sequence);
    gq_ledger_settle (&ledger, ACTOR);
}

static void
expect_ack (uint64_t cumulative, uint64_t beyond)
{
    const gq_ack ack = gq_ledger_ack (&ledger, ACTOR);
    cr_assert_eq (ack.cumulative, cumulative, "%llu, not %llu", (unsigned long long)ack.cumulative,
                  (unsigned long long)cumulative);
    cr_assert_eq (ack.beyond, beyond, "%llx, not %llx", (unsigned long long)ack.beyond,
                  (unsigned long long)beyond);
}

/* ---- hello ---- */

/* What a hello with nonce `number` finds; *actor in and out. */
static uint32_t
find (uint32_t number, uint32_t *actor)
{
    uint8_t nonce[GQ_NONCE_BYTES];
    uint32_t epoch = UINT32_MAX;
    nonce_of (number, nonce);
    cr_assert_eq (gq_ledger_find (&ledger, actor, nonce, &epoch), GQ_OK);
    return epoch;
}

Test (ledger, a_repeated_hello_finds_what_it_was_granted_and_another_finds_nothing)
{
    uint32_t actor = ACTOR;
    begin ();
    cr_assert_eq (find (1, &actor), EPOCH);
    cr_assert_eq (find (2, &actor), 0, "a new life of that actor");
    cr_assert_eq (actor, ACTOR);
    actor = GQ_ACTORS_MAX;
    cr_assert_eq (find (1, &actor), EPOCH, "by its nonce alone");
    cr_assert_eq (actor, ACTOR);
    actor = GQ_ACTORS_MAX;
    cr_assert_eq (find (2, &actor), 0);
    cr_assert_eq (actor, 0, "the lowest that nobody has");
}

Test (ledger, a_hello_changes_nothing_before_it_is_granted)
{
    static gq_ledger before;
    uint32_t actor = GQ_ACTORS_MAX;
    begin ();
    memcpy (&before, &ledger, sizeof ledger); /* padding too */
    find (2, &actor);
    find (1, &actor);
    cr_assert_arr_eq (&ledger, &before, sizeof ledger);
}

Test (ledger, who_asks_for_any_id_gets_the_lowest_free_one_until_none_is_left)
{
    uint8_t nonce[GQ_NONCE_BYTES];
    uint32_t actor, epoch;
    grant (1, 1, 90000);
    for (uint32_t i = 0; i < GQ_ACTORS_MAX - 1; i++) {
        actor = GQ_ACTORS_MAX;
        cr_assert_eq (find (i, &actor), 0);
        cr_assert_eq (actor, i < 1 ? 0 : i + 1);
        grant (actor, 2 + i, i);
    }
    cr_assert_eq (ledger.actor_count, GQ_ACTORS_MAX);
    actor = GQ_ACTORS_MAX;
    nonce_of (90001, nonce);
    cr_assert_eq (gq_ledger_find (&ledger, &actor, nonce, &epoch), GQ_FULL);
    actor = GQ_ACTORS_MAX;
    cr_assert_eq (find (5, &actor), 7);
    cr_assert_eq (actor, 6, "who is known keeps its place");
}

Test (ledger, a_new_life_of_an_actor_begins_at_number_1_with_nothing_refused)
{
    begin ();
    apply (1);
    gq_ledger_enter (&ledger, ACTOR, 2);
    gq_ledger_hold (&ledger, ACTOR);
    gq_ledger_enter (&ledger, ACTOR, 3);
    gq_ledger_refuse (&ledger, ACTOR, 3, GQ_STALE);
    grant (ACTOR, EPOCH + 4, 2);
    const gq_ack ack = gq_ledger_ack (&ledger, ACTOR);
    cr_assert (ack.cumulative == 0 && ack.beyond == 0);
    cr_assert (ack.refused == 0 && ack.refused_sequence == 0 && ack.refused_reason == GQ_OK);
    gq_ledger_settle_all (&ledger); /* the step that the old life's gradient waits for */
    expect_ack (0, 0);
    cr_assert_eq (gq_ledger_judge (&ledger, ACTOR, EPOCH + 4, 1), GQ_OK);
    gq_ledger_enter (&ledger, ACTOR, 1);
    gq_ledger_settle (&ledger, ACTOR);
    expect_ack (1, 0);
}

/* ---- judging ---- */

Test (ledger, judging_changes_nothing)
{
    static gq_ledger before;
    begin ();
    apply (1);
    apply (3);
    memcpy (&before, &ledger, sizeof ledger); /* padding too */
    cr_assert_eq (judge (1), GQ_AGAIN);
    cr_assert_eq (judge (2), GQ_OK);
    cr_assert_eq (judge (3), GQ_AGAIN);
    cr_assert_eq (judge (1000), GQ_MALFORMED);
    cr_assert_eq (gq_ledger_judge (&ledger, ACTOR, EPOCH - 1, 2), GQ_REFUSED);
    cr_assert_eq (gq_ledger_judge (&ledger, ACTOR, EPOCH + 1, 2), GQ_MALFORMED);
    cr_assert_eq (gq_ledger_judge (&ledger, ACTOR + 1, EPOCH, 2), GQ_MALFORMED);
    cr_assert_arr_eq (&ledger, &before, sizeof ledger);
}

Test (ledger, epochs_that_ended_are_outdated_and_epochs_never_granted_are_malformed)
{
    begin ();
    cr_assert_eq (gq_ledger_judge (&ledger, ACTOR, EPOCH - 1, 1), GQ_REFUSED);
    cr_assert_eq (gq_ledger_judge (&ledger, ACTOR, EPOCH, 1), GQ_OK);
    cr_assert_eq (gq_ledger_judge (&ledger, ACTOR, EPOCH + 1, 1), GQ_MALFORMED);
    cr_assert_eq (gq_ledger_judge (&ledger, ACTOR, UINT32_MAX, 1), GQ_MALFORMED);
    cr_assert_eq (gq_ledger_judge (&ledger, 0, 1, 1), GQ_MALFORMED, "nobody has id 0");
    cr_assert_eq (gq_ledger_judge (&ledger, GQ_ACTORS_MAX - 1, 1, 1), GQ_MALFORMED);
}

Test (ledger, the_map_reaches_64_numbers_beyond_and_not_one_more)
{
    gq_ledger_entry *entry = begin ();
    cr_assert_eq (judge (MAP_BITS), GQ_OK);
    cr_assert_eq (judge (MAP_BITS + 1), GQ_MALFORMED);
    cr_assert_eq (judge (UINT64_MAX), GQ_MALFORMED);
    apply (1);
    cr_assert_eq (judge (MAP_BITS + 1), GQ_OK, "it moves on with the cumulative number");
    cr_assert_eq (judge (MAP_BITS + 2), GQ_MALFORMED);
    apply (MAP_BITS + 1);
    expect_ack (1, UINT64_C (1) << 63);
    cr_assert_eq (judge (MAP_BITS + 1), GQ_AGAIN);
    cr_assert_eq (entry->received.cumulative, 1);
}

Test (ledger, a_hole_in_the_middle_is_filled_by_what_comes_again)
{
    begin ();
    for (uint64_t sequence = 1; sequence <= 10; sequence++)
        if (sequence < 4 || sequence > 6)
            apply (sequence);
    expect_ack (3, 0x78); /* 7 to 10: bits 3 to 6 beyond 3 */
    for (uint64_t sequence = 1; sequence <= 10; sequence++)
        cr_assert_eq (judge (sequence), sequence < 4 || sequence > 6 ? GQ_AGAIN : GQ_OK);
    apply (5);
    expect_ack (3, 0x7a);
    apply (4);
    expect_ack (5, 0x1e);
    apply (6);
    expect_ack (10, 0);
}

Test (ledger, all_64_beyond_a_hole_are_taken_up_when_it_is_filled)
{
    begin ();
    for (uint64_t sequence = MAP_BITS; sequence >= 2; sequence--)
        apply (sequence);
    expect_ack (0, UINT64_MAX - 1);
    apply (1);
    expect_ack (MAP_BITS, 0);
    cr_assert_eq (judge (MAP_BITS), GQ_AGAIN);
    cr_assert_eq (judge (MAP_BITS + 1), GQ_OK);
}

Test (ledger, the_highest_numbers_do_not_overflow)
{
    gq_ledger_entry *entry = begin ();
    entry->received.cumulative = entry->settled.cumulative = UINT64_MAX - 3;
    apply (UINT64_MAX);
    cr_assert_eq (judge (UINT64_MAX), GQ_AGAIN);
    cr_assert_eq (judge (1), GQ_AGAIN);
    apply (UINT64_MAX - 1);
    apply (UINT64_MAX - 2);
    expect_ack (UINT64_MAX, 0);
}

Test (ledger, only_duplicates_and_late_ones_are_counted_and_answered)
{
    gq_ledger_entry *entry = begin ();
    apply (1);
    entry->owed = false;
    gq_ledger_discard (&ledger, ACTOR, GQ_MALFORMED);
    cr_assert (!entry->owed && ledger.duplicates == 0 && ledger.outdated == 0);
    gq_ledger_discard (&ledger, ACTOR, GQ_AGAIN);
    cr_assert (entry->owed && ledger.duplicates == 1 && ledger.outdated == 0);
    entry->owed = false;
    gq_ledger_discard (&ledger, ACTOR, GQ_REFUSED);
    cr_assert (entry->owed && ledger.duplicates == 1 && ledger.outdated == 1);
    expect_ack (1, 0);
}

/* ---- a twin that keeps a list ---- */

enum { NUMBERS = 400, ACTORS = 3 };

typedef enum fate { TO_COME, HELD, DONE } fate;

typedef struct twin {
    fate fates[NUMBERS + 1];
    uint64_t cumulative; /* of what has come */
    uint64_t refused, refused_sequence;
} twin;

/* An acknowledgement covers nothing that is to come or held; it may say less than it could: what
 * is refused behind a held one waits with it. */
static void
expect_ack_true (uint32_t actor, const twin *self)
{
    const gq_ack ack = gq_ledger_ack (&ledger, actor);
    const gq_sequences settled = {.cumulative = ack.cumulative, .beyond = ack.beyond};
    bool held = false;
    for (uint64_t i = 1; i <= NUMBERS; i++)
        held = held || self->fates[i] == HELD;
    for (uint64_t i = 1; i <= NUMBERS; i++) {
        if (gq_sequences_has (&settled, i))
            cr_assert (self->fates[i] == DONE, "%llu", (unsigned long long)i);
        else
            cr_assert (held || self->fates[i] == TO_COME, "%llu", (unsigned long long)i);
    }
    cr_assert_eq (ack.refused, self->refused);
    cr_assert_eq (ack.refused_sequence, self->refused_sequence);
}

static void
receive (uint32_t actor, twin *self, uint64_t sequence, uint64_t what)
{
    const bool reached = sequence <= self->cumulative + MAP_BITS;
    const gq_status expected = sequence <= NUMBERS && self->fates[sequence] != TO_COME ? GQ_AGAIN
                               : reached                                               ? GQ_OK
                                         : GQ_MALFORMED;
    const gq_status status = gq_ledger_judge (&ledger, actor, EPOCH, sequence);
    cr_assert_eq (status, expected, "%llu after %llu: %s", (unsigned long long)sequence,
                  (unsigned long long)self->cumulative, gq_status_name (status));
    if (status != GQ_OK || sequence > NUMBERS) {
        if (status != GQ_OK)
            gq_ledger_discard (&ledger, actor, status);
        return;
    }
    gq_ledger_enter (&ledger, actor, sequence);
    self->fates[sequence] = what == 0 ? HELD : DONE;
    if (what == 0) {
        gq_ledger_hold (&ledger, actor);
    } else if (what == 1) {
        gq_ledger_refuse (&ledger, actor, sequence, GQ_STALE);
        self->refused++;
        self->refused_sequence = sequence;
    } else {
        gq_ledger_settle (&ledger, actor);
    }
    while (self->cumulative < NUMBERS && self->fates[self->cumulative + 1] != TO_COME)
        self->cumulative++;
}

static void
settle_all (twin twins[ACTORS])
{
    gq_ledger_settle_all (&ledger);
    for (size_t k = 0; k < ACTORS; k++)
        for (size_t i = 1; i <= NUMBERS; i++)
            if (twins[k].fates[i] == HELD)
                twins[k].fates[i] = DONE;
}

Test (ledger, in_any_order_each_number_is_new_once_and_acks_cover_only_what_is_done)
{
    for (uint64_t seed = 1; seed <= 10; seed++) {
        static twin twins[ACTORS];
        uint64_t state = seed;
        memset (&ledger, 0, sizeof ledger);
        memset (twins, 0, sizeof twins);
        printf ("seed %llu\n", (unsigned long long)seed);
        for (uint32_t actor = 0; actor < ACTORS; actor++)
            grant (actor, EPOCH, actor);
        for (int i = 0; i < 2000; i++) {
            const uint32_t actor = (uint32_t)(support_random (&state) % ACTORS);
            const uint64_t what = support_random (&state) % 5;
            /* Mostly within a window of 8; sometimes at the edge of the map. */
            const uint64_t reach = support_random (&state) % 16 == 0 ? MAP_BITS + 2 : 8;
            const uint64_t sequence = twins[actor].cumulative + 1 + support_random (&state) % reach;
            if (what == 4)
                settle_all (twins);
            else
                receive (actor, &twins[actor], sequence, what);
            expect_ack_true (actor, &twins[actor]);
        }
        settle_all (twins);
        for (uint32_t actor = 0; actor < ACTORS; actor++)
            expect_ack_true (actor, &twins[actor]);
    }
}

/* ---- with the windows of its actors ---- */

static void
deliver (uint32_t actor, uint64_t sequence, uint32_t aggregate, uint32_t *held)
{
    const gq_status status = gq_ledger_judge (&ledger, actor, EPOCH, sequence);
    cr_assert (status == GQ_OK || status == GQ_AGAIN, "%llu: %s", (unsigned long long)sequence,
               gq_status_name (status));
    if (status == GQ_AGAIN)
        return;
    gq_ledger_enter (&ledger, actor, sequence);
    gq_ledger_hold (&ledger, actor);
    if (++*held < aggregate)
        return;
    gq_ledger_settle_all (&ledger);
    *held = 0;
}

/* Whoever has room sends, and all comes but number `lost`; how many gradients are new. */
static uint64_t
turn (uint32_t actor, gq_window *window, uint64_t lost, uint32_t aggregate, uint32_t *held)
{
    const uint64_t before = window->sequence;
    while (gq_window_room (window)) {
        uint32_t slot;
        gq_window_sent (window, 0, &slot);
    }
    for (uint32_t i = 0; i < window->size; i++)
        if (window->slots[i].sequence != 0 && window->slots[i].sequence != lost)
            deliver (actor, window->slots[i].sequence, aggregate, held);
    const gq_ack ack = gq_ledger_ack (&ledger, actor);
    (void)gq_window_settle (window, ack.cumulative, ack.beyond);
    gq_window_received (window, ack.cumulative + ack.held);
    return window->sequence - before;
}

/* A gradient that was lost stops its actor after 63 more; when it has come at last, and waits for
 * its step, that actor may be the only one who can complete it. */
Test (ledger, no_step_waits_for_ever_for_what_a_window_keeps_back)
{
    enum { LOST_TURNS = 80, TURNS = 100 };
    for (uint64_t seed = 1; seed <= 40; seed++) {
        uint64_t state = seed;
        gq_window windows[ACTORS];
        uint32_t held = 0;
        memset (&ledger, 0, sizeof ledger);
        const uint32_t actors = 1 + (uint32_t)(support_random (&state) % ACTORS);
        const uint32_t size = 1 + (uint32_t)(support_random (&state) % 4);
        const uint32_t aggregate = 1 + (uint32_t)(support_random (&state) % (actors * size));
        printf ("seed %llu: %u actors x %u, %u a step\n", (unsigned long long)seed, actors, size,
                aggregate);
        for (uint32_t actor = 0; actor < actors; actor++) {
            grant (actor, EPOCH, actor);
            gq_window_init (&windows[actor], size, 1, seed);
        }
        for (int round = 0; round < 50; round++) {
            const uint32_t unlucky = (uint32_t)(support_random (&state) % actors);
            const uint64_t lost = windows[unlucky].sequence + 1;
            uint64_t sent = 0;
            for (int i = 0; i < TURNS; i++)
                for (uint32_t actor = 0; actor < actors; actor++) {
                    const bool loses = actor == unlucky && i < LOST_TURNS;
                    const uint64_t more =
                        turn (actor, &windows[actor], loses ? lost : 0, aggregate, &held);
                    sent += i < LOST_TURNS ? 0 : more;
                }
            cr_assert_gt (sent, 0, "round %d: nobody may go on, %u are held", round, held);
        }
    }
}

/* ---- JSON ---- */

static void
expect_same_entry (const gq_ledger_entry *a, const gq_ledger_entry *b)
{
    cr_assert (a->known == b->known && a->epoch == b->epoch && a->pending == b->pending);
    cr_assert_arr_eq (a->nonce, b->nonce, GQ_NONCE_BYTES);
    cr_assert_arr_eq (&a->received, &b->received, sizeof a->received);
    cr_assert_arr_eq (&a->settled, &b->settled, sizeof a->settled);
    cr_assert (a->refused == b->refused && a->refused_sequence == b->refused_sequence);
    cr_assert_eq (a->refused_reason, b->refused_reason);
}

Test (ledger, json_keeps_every_entry)
{
    static gq_ledger before;
    begin ();
    for (uint64_t sequence = 1; sequence <= MAP_BITS; sequence += 3)
        apply (sequence);
    gq_ledger_enter (&ledger, ACTOR, 2);
    gq_ledger_hold (&ledger, ACTOR);
    gq_ledger_enter (&ledger, ACTOR, 3);
    gq_ledger_refuse (&ledger, ACTOR, 3, GQ_NONFINITE);
    grant (GQ_ACTORS_MAX - 1, UINT32_MAX, 77);
    json_t *json = gq_ledger_to_json (&ledger);
    cr_assert_eq (json_array_size (json), 2);
    before = ledger;
    memset (&ledger, 0, sizeof ledger);
    cr_assert_eq (gq_ledger_from_json (&ledger, json), GQ_OK);
    json_decref (json);
    cr_assert_eq (ledger.actor_count, before.actor_count);
    for (uint32_t i = 0; i < GQ_ACTORS_MAX; i++)
        expect_same_entry (&ledger.actors[i], &before.actors[i]);
}

Test (ledger, json_that_no_ledger_makes_is_refused)
{
#define NONCE "\"nonce\": \"000102030405060708090a0b0c0d0e0f\""
#define SETS  "\"received\": [2, \"0000000000000000\"], \"settled\": [1, \"0000000000000000\"]"
    static const char *const good =
        "[{\"actor\": 1, \"epoch\": 1, \"pending\": 1, \"refused\": [0, 0, 0], " NONCE ", " SETS
        "}]";
    static const char *const bad[] = {
        "7",
        "{}",
        "[7]",
        "[{}]",
        "[{\"actor\": 4096, \"epoch\": 1, \"pending\": 0, " NONCE ", " SETS "}]",
        "[{\"actor\": -1, \"epoch\": 1, \"pending\": 0, " NONCE ", " SETS "}]",
        "[{\"actor\": 1, \"epoch\": 0, \"pending\": 0, " NONCE ", " SETS "}]",
        "[{\"actor\": 1, \"epoch\": 4294967296, \"pending\": 0, " NONCE ", " SETS "}]",
        "[{\"actor\": 1, \"epoch\": 1, \"pending\": -1, " NONCE ", " SETS "}]",
        "[{\"actor\": 1, \"epoch\": 1, \"pending\": 65537, " NONCE ", " SETS "}]",
        "[{\"actor\": 1, \"epoch\": 1, \"pending\": 0, \"nonce\": \"00\", " SETS "}]",
        "[{\"actor\": 1, \"epoch\": 1, \"pending\": 0, " NONCE "}]",
        "[{\"actor\": 1, \"epoch\": 1, \"pending\": 0, \"refused\": [0, 0, 99], " NONCE ", " SETS
        "}]",
        "[{\"actor\": 1, \"epoch\": 1, " NONCE ", \"received\": [-1, \"0000000000000000\"], "
        "\"settled\": [0, \"0000000000000000\"]}]",
        "[{\"actor\": 1, \"epoch\": 1, " NONCE ", \"received\": [1, \"0000000000000001\"], "
        "\"settled\": [0, \"0000000000000000\"]}]",
        "[{\"actor\": 1, \"epoch\": 1, " NONCE ", \"received\": [1, \"000000000000000g\"], "
        "\"settled\": [0, \"0000000000000000\"]}]",
        "[{\"actor\": 1, \"epoch\": 1, " NONCE ", " SETS "}, "
        "{\"actor\": 1, \"epoch\": 2, " NONCE ", " SETS "}]"};
    json_t *json = json_loads (good, 0, NULL);
    cr_assert_not_null (json);
    memset (&ledger, 0, sizeof ledger);
    cr_assert_eq (gq_ledger_from_json (&ledger, json), GQ_OK);
    json_decref (json);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        json = json_loads (bad[i], JSON_DECODE_ANY, NULL);
        cr_assert_not_null (json, "%s", bad[i]);
        memset (&ledger, 0, sizeof ledger);
        cr_assert_eq (gq_ledger_from_json (&ledger, json), GQ_MALFORMED, "%s", bad[i]);
        json_decref (json);
    }
}
