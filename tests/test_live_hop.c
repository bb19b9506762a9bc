/*
 * Live state and hop: a gradient that lies in the broker's memory while its step is made.  An
 * optimizer that is killed there goes on to the same bits from what the broker put there, whatever
 * the broker does meanwhile; and when that is gone, as it does from any gradient that is.
 */
/* So large that in bf16 it goes by ticket as well. */
#define LIVE_BLOCKS 10

#include "live_testing.h"

#include "optimizer/live.h"

TestSuite (live_hop, .timeout = 240);

/* Events whose gradient goes by way of the broker's memory: in f32, and in bf16. */
static const unsigned events[] = {INLINE_EACH - 1, 2 * INLINE_EACH - 1};
enum { EVENT_COUNT = 2 };
_Static_assert(COUNT * 2 >= GQ_HOP_PAYLOAD_MIN, "in bf16 too");

static bool
run_by_ticket (const char *crash, report *told)
{
    return run_life (&(order){.words = ADAM, .crash = crash, .until = EVENTS, .by_ticket = true},
                     told);
}

static void
must_be_killed (const char *point, unsigned pass)
{
    report told;
    char crash[64];
    snprintf (crash, sizeof crash, "%s:%u", point, pass);
    cr_assert (!run_by_ticket (crash, &told), "%s is not reached", crash);
}

static report
expected (void)
{
    directory_begin ();
    const report told = complete (&(order){.words = ADAM, .until = EVENTS});
    remove_all ();
    return told;
}

static void
expect_goes_on (const report *to, const char *after, unsigned pass)
{
    const report told = complete (&(order){.words = ADAM, .until = EVENTS, .by_ticket = true});
    cr_assert_eq (told.version, to->version, "after %s:%u: version %llu", after, pass,
                  (unsigned long long)told.version);
    cr_assert_eq (told.digest, to->digest, "after %s:%u: other bits", after, pass);
    remove_all ();
}

Test (live_hop, undisturbed_it_comes_to_the_same_bits)
{
    const report to = expected ();
    directory_begin ();
    expect_goes_on (&to, "nothing", 0);
}

Test (live_hop, a_step_that_was_killed_at_any_block_is_finished)
{
    const report to = expected ();
    for (size_t i = 0; i < EVENT_COUNT; i++)
        for (unsigned pass = 1; pass <= 2 * BLOCKS; pass++) {
            directory_begin ();
            must_be_killed ("stepping", 2 * BLOCKS * events[i] + pass);
            expect_goes_on (&to, "stepping", 2 * BLOCKS * events[i] + pass);
        }
}

Test (live_hop, killed_anywhere_around_a_step_nothing_is_lost_or_doubled)
{
    static const char *const points[] = {"before-apply", "before-commit", "committing",
                                         "after-commit"};
    const report to = expected ();
    for (size_t k = 0; k < sizeof points / sizeof points[0]; k++)
        for (size_t i = 0; i < EVENT_COUNT; i++)
            for (unsigned again = 0; again < 2; again++) {
                report told;
                directory_begin ();
                must_be_killed (points[k], events[i] + 1);
                if (again == 1)
                    (void)run_by_ticket ("recovering:1", &told);
                expect_goes_on (&to, points[k], events[i] + 1);
            }
}

/* ---- the broker lives on, or another one comes ---- */

static void
lanes_of (char path[PATH_MAX])
{
    path_below (path, "lane");
}

/* A broker comes to what the killed life left, and puts what it can. */
static void
put_meanwhile (uint64_t layout)
{
    char lanes[PATH_MAX];
    uint8_t of_run[GQ_RUN_ID_BYTES];
    gq_hop *hop;
    lanes_of (lanes);
    cr_assert_eq (gq_identity_read (of_run, directory, NULL), GQ_OK);
    cr_assert_eq (open_hop (&hop, lanes, of_run, 1, layout), GQ_OK);
    cr_assert_eq (put_nonsense (hop), GQ_HOP_SLOTS - 1);
    gq_hop_close (&hop);
}

static uint64_t
layout_digest (void)
{
    const gq_tensor_shape shape = {.name = "w", .rank = 1, .shape = {COUNT}};
    gq_layout layout;
    cr_assert_eq (gq_layout_init (&layout, &shape, 1, NULL), GQ_OK);
    const uint64_t digest = layout.digest;
    gq_layout_clear (&layout);
    return digest;
}

Test (live_hop, whatever_brokers_put_after_its_death_the_gradient_is_there)
{
    const report to = expected ();
    for (size_t i = 0; i < EVENT_COUNT; i++)
        for (unsigned begun = 0; begun < 2; begun++) {
            const char *point = begun == 1 ? "stepping" : "before-apply";
            const unsigned pass = begun == 1 ? 2 * BLOCKS * events[i] + 3 : events[i] + 1;
            directory_begin ();
            must_be_killed (point, pass);
            put_meanwhile (layout_digest ());
            complete (&(order){.words = ADAM, .only_opens = true});
            put_meanwhile (layout_digest ());
            expect_goes_on (&to, point, pass);
        }
}

/* ---- it is gone ---- */

enum { GONE, CUT, OTHER_RUN, PAYLOAD, HEADER, WAYS };

static void
flip (const char *name, uint64_t at)
{
    char path[PATH_MAX];
    uint8_t *bytes;
    path_below (path, name);
    const size_t size = support_read (path, &bytes);
    cr_assert_lt (at, size);
    bytes[at] ^= 0x41;
    support_write (path, bytes, size);
    free (bytes);
}

/* The same byte of each slot's frame. */
static void
flip_in_slots (uint64_t at)
{
    const uint64_t pages = (COUNT * sizeof (float) + GQ_SHM_PAGE - 1) / GQ_SHM_PAGE;
    for (uint64_t i = 0; i < GQ_HOP_SLOTS; i++)
        flip ("lane/" GQ_HOP_NAME,
              2 * GQ_SHM_PAGE - GQ_FRAME_HEADER_BYTES + i * (1 + pages) * GQ_SHM_PAGE + at);
}

static void
spoil (unsigned way)
{
    char path[PATH_MAX];
    path_below (path, "lane/" GQ_HOP_NAME);
    switch (way) {
    case GONE:
        cr_assert_eq (unlink (path), 0);
        break;
    case CUT:
        cr_assert_eq (truncate (path, 3 * GQ_SHM_PAGE), 0);
        break;
    case OTHER_RUN:
        flip ("lane/" GQ_HOP_NAME, 8);
        break;
    case PAYLOAD:
        flip_in_slots (GQ_FRAME_HEADER_BYTES + 5);
        break;
    default:
        flip_in_slots (GQ_FRAME_HEADER_BYTES - 1);
    }
}

/* Nobody was told of it: it comes again, also when a life that began meanwhile came no further. */
Test (live_hop, a_gradient_that_is_gone_before_its_step_began_is_as_if_it_had_not_come)
{
    const report to = expected ();
    for (unsigned way = 0; way < WAYS; way++)
        for (size_t i = 0; i < EVENT_COUNT; i++) {
            directory_begin ();
            must_be_killed ("before-apply", events[i] + 1);
            if (way % 2 == 1)
                complete (&(order){.words = ADAM, .only_opens = true});
            spoil (way);
            expect_goes_on (&to, "before-apply", events[i] + 1);
        }
}

/* What is made of it cannot be undone; all else is there. */
Test (live_hop, the_rest_of_a_gradient_that_is_gone_in_the_midst_of_its_step_counts_as_0)
{
    const report to = expected ();
    for (unsigned way = 0; way < WAYS; way++)
        for (size_t i = 0; i < EVENT_COUNT; i++) {
            directory_begin ();
            must_be_killed ("stepping", 2 * BLOCKS * events[i] + 3);
            spoil (way);
            const report told =
                complete (&(order){.words = ADAM, .until = EVENTS, .by_ticket = true});
            cr_assert_eq (told.version, EVENTS);
            cr_assert_neq (told.digest, to.digest, "way %u: another gradient was believed", way);
            const report again = complete (&(order){.words = ADAM, .only_opens = true});
            cr_assert_eq (again.digest, told.digest, "way %u: other bits", way);
            remove_all ();
        }
}

/* The frame in hand of the live state is of another gradient, or of none. */
Test (live_hop, it_needs_nothing_of_the_frame_in_hand)
{
    const report to = expected ();
    const gq_live_shape shape = {.count = COUNT, .slide = GQ_SLIDE, .slot_count = 2};
    const uint64_t frame_bytes = GQ_FRAME_HEADER_BYTES + COUNT * sizeof (float);
    const uint64_t pages = (frame_bytes + GQ_SHM_PAGE - 1) / GQ_SHM_PAGE;
    for (size_t i = 0; i < EVENT_COUNT; i++) {
        char path[PATH_MAX];
        uint8_t *bytes;
        directory_begin ();
        must_be_killed ("stepping", 2 * BLOCKS * events[i] + 3);
        path_below (path, "lane/board");
        const size_t size = support_read (path, &bytes);
        cr_assert_gt (size, gq_live_bytes (&shape));
        memset (bytes + size - pages * GQ_SHM_PAGE, 0xff, frame_bytes);
        support_write (path, bytes, size);
        free (bytes);
        expect_goes_on (&to, "stepping", 2 * BLOCKS * events[i] + 3);
    }
}
