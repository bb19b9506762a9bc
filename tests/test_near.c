/*
 * Near: which reports lead to a hop, and who may still use one that another has taken the place of.
 * Both ends in one process: each has opened the file by itself, so its lock is its own.
 */
#include "support.h"

#include "board.h"
#include "broker/near.h"
#include "hex.h"
#include "log.h"
#include "shm.h"

TestSuite (near, .timeout = 60);

#define RUN       "00112233445566778899aabbccddeeff"
#define OTHER_RUN "ff112233445566778899aabbccddeeff"

enum { COUNT = 2000, TERMS = 6 };

static char directory[64], host[GQ_HOST_ID_BYTES];
static gq_near *near;
static gq_hop *optimizers[TERMS + 1]; /* by term, each with files of its own */

static void
path_of (char path[PATH_MAX], const char *name, int term)
{
    snprintf (path, PATH_MAX, "%s/%s-%d", directory, name, term);
}

static void
begin_optimizer (int term)
{
    char path[PATH_MAX];
    gq_error error = {""};
    gq_board *board;
    gq_hop_identity identity = {
        .term = (uint32_t)term, .digest = 0xfedcba9876543210, .count = COUNT};
    cr_assert (gq_hex_decode (RUN, identity.run, GQ_RUN_ID_BYTES));
    gq_board_config config = {
        .term = identity.term, .digest = identity.digest, .count = identity.count};
    memcpy (config.run, identity.run, GQ_RUN_ID_BYTES);
    path_of (path, "board", term);
    cr_assert_eq (gq_board_create (&board, path, &config, &error), GQ_OK, "%s", error.text);
    gq_board_close (&board);
    path_of (path, "broker", term);
    cr_assert_eq (gq_hop_create (&optimizers[term], path, &identity, &error), GQ_OK, "%s",
                  error.text);
}

static void
begin (void)
{
    gq_error error;
    cr_assert_eq (gq_log_open ("test", "/dev/null", GQ_LOG_ERROR, &error), GQ_OK);
    support_directory (directory);
    gq_host_id (host);
    cr_assert_str_not_empty (host);
    for (int term = 1; term <= TERMS; term++)
        begin_optimizer (term);
    near = gq_near_new ();
    cr_assert_not_null (near);
}

static void
end (void)
{
    gq_near_free (&near);
    cr_assert_null (near);
    gq_near_free (&near);
    for (int term = 1; term <= TERMS; term++) {
        cr_expect (!gq_hop_attached (optimizers[term]), "term %d is still open", term);
        gq_hop_close (&optimizers[term]);
    }
    support_remove (directory);
}

/* What the optimizer of this term says of itself. */
static json_t *
report_of (int term)
{
    char board[PATH_MAX], broker[PATH_MAX];
    path_of (board, "board", term);
    path_of (broker, "broker", term);
    json_t *report = json_pack ("{s:s, s:i, s:i, s:{s:s, s:s, s:s, s:s}}", "run", RUN, "term", term,
                                "parameters", COUNT, "shm", "host", host, "digest",
                                "fedcba9876543210", "board", board, "broker", broker);
    cr_assert_not_null (report);
    return report;
}

static void
see (int term)
{
    json_t *report = report_of (term);
    gq_near_see (near, report);
    json_decref (report);
}

/* A hop that leads to the optimizer of this term, and no other. */
static void
expect_leads_to (gq_hop *hop, int term)
{
    static uint8_t bytes[GQ_FRAME_HEADER_BYTES + COUNT * 4];
    gq_hop_ticket ticket;
    cr_assert_not_null (hop, "term %d", term);
    cr_assert (gq_hop_attached (optimizers[term]), "term %d", term);
    memset (bytes, term, sizeof bytes);
    cr_assert (gq_hop_put (hop, bytes, sizeof bytes, &ticket));
    const uint8_t *taken = gq_hop_take (optimizers[term], &ticket);
    cr_assert_not_null (taken, "term %d", term);
    cr_assert_arr_eq (taken, bytes, sizeof bytes);
    gq_hop_done (optimizers[term], &ticket);
}

static gq_hop *
must_hold (int term)
{
    gq_hop *hop = gq_near_hold (near);
    expect_leads_to (hop, term);
    return hop;
}

static void
expect_leads (int term)
{
    gq_hop *hop = must_hold (term);
    gq_near_release (near, hop);
}

static void
expect_none (const char *why)
{
    gq_hop *hop = gq_near_hold (near);
    cr_assert_null (hop, "%s", why);
    gq_near_release (near, hop);
}

Test (near, a_report_of_this_host_leads_to_its_hop, .init = begin, .fini = end)
{
    expect_none ("nobody has reported");
    see (1);
    cr_assert (!gq_hop_attached (optimizers[2]));
    expect_leads (1);
    expect_leads (1);
}

/* What a report says wrongly.  It is yours to free. */
static json_t *
wrong_report (int which, const char **why)
{
    json_t *report = report_of (1);
    json_t *shm = json_object_get (report, "shm");
    const struct {
        json_t *object;
        const char *key;
        json_t *value;
    } wrong[] = {{shm, "host", json_string ("00000000-0000-0000-0000-000000000000")},
                 {shm, "host", json_string ("")},
                 {shm, "host", json_integer (5)},
                 {report, "shm", json_null ()},
                 {shm, "digest", json_string ("fedcba9876543211")},
                 {shm, "digest", json_string ("fedcba987654321g")},
                 {shm, "digest", json_string ("")},
                 {shm, "digest", json_null ()},
                 {shm, "broker", json_string ("/nowhere/at/all")},
                 {shm, "broker", json_string (directory)},
                 {shm, "broker", json_null ()},
                 {shm, "board", json_string ("/nowhere/at/all")},
                 {shm, "board", json_null ()},
                 {report, "run", json_string (OTHER_RUN)},
                 {report, "run", json_string ("0011")},
                 {report, "run", json_null ()},
                 {report, "term", json_integer (2)},
                 {report, "term", json_integer (0)},
                 {report, "term", json_integer (-1)},
                 {report, "term", json_integer ((json_int_t)UINT32_MAX + 2)},
                 {report, "term", json_null ()},
                 {report, "parameters", json_integer (COUNT - 1)},
                 {report, "parameters", json_integer (0)},
                 {report, "parameters", json_integer (-COUNT)},
                 {report, "parameters", json_integer (INT64_MAX)},
                 {report, "parameters", json_null ()}};
    const int count = (int)(sizeof wrong / sizeof wrong[0]);
    for (int i = 0; i < count; i++)
        if (i == which)
            json_object_set (wrong[i].object, wrong[i].key, wrong[i].value);
    *why = which < count ? wrong[which].key : NULL;
    for (int i = 0; i < count; i++)
        json_decref (wrong[i].value);
    return report;
}

Test (near, what_this_host_has_not_or_what_is_not_so_leads_nowhere, .init = begin, .fini = end)
{
    const char *why;
    json_t *empty = json_object (), *text = json_string ("shm");
    gq_near_see (near, NULL);
    expect_none ("there is no report");
    gq_near_see (near, empty);
    expect_none ("it is empty");
    gq_near_see (near, text);
    expect_none ("it is no object");
    json_decref (empty);
    json_decref (text);
    for (int i = 0;; i++) {
        json_t *report = wrong_report (i, &why);
        if (why != NULL) {
            gq_near_see (near, report);
            expect_none (why);
            cr_expect (!gq_hop_attached (optimizers[1]), "%d: %s", i, why);
        }
        json_decref (report);
        if (why == NULL)
            break;
    }
    see (1);
    expect_leads (1);
}

Test (near, a_report_that_names_no_memory_ends_it, .init = begin, .fini = end)
{
    see (1);
    json_t *without = report_of (1);
    json_object_del (without, "shm");
    gq_near_see (near, without);
    json_decref (without);
    expect_none ("it is not shared any more");
    cr_assert (!gq_hop_attached (optimizers[1]));
    see (1);
    expect_leads (1);
    gq_near_see (near, NULL);
    expect_none ("the optimizer is gone");
    cr_assert (!gq_hop_attached (optimizers[1]));
}

/* It is not opened anew: that would forget what is on the way. */
Test (near, the_same_report_again_changes_nothing, .init = begin, .fini = end)
{
    static const uint8_t bytes[GQ_FRAME_HEADER_BYTES + COUNT * 4];
    gq_hop_ticket ticket;
    see (1);
    gq_hop *first = must_hold (1);
    cr_assert (gq_hop_put (first, bytes, sizeof bytes, &ticket));
    gq_near_release (near, first);
    see (1);
    gq_hop *second = gq_near_hold (near);
    cr_assert_eq (second, first);
    cr_assert_not_null (gq_hop_take (optimizers[1], &ticket), "it is still on its way");
    gq_near_release (near, second);
}

Test (near, a_new_term_takes_its_place_and_who_holds_the_old_one_keeps_it, .init = begin,
      .fini = end)
{
    see (1);
    gq_hop *old = must_hold (1), *also = must_hold (1);
    see (2);
    gq_hop *fresh = must_hold (2);
    cr_assert_neq (fresh, old);
    expect_leads_to (old, 1);
    gq_near_release (near, also);
    expect_leads_to (old, 1);
    gq_near_release (near, old);
    cr_assert (!gq_hop_attached (optimizers[1]), "nobody uses it");
    expect_leads_to (fresh, 2);
    gq_near_release (near, fresh);
    expect_leads (2);
}

Test (near, what_was_forgotten_comes_with_the_next_report, .init = begin, .fini = end)
{
    gq_near_forget (near);
    see (1);
    gq_near_forget (near);
    expect_none ("the connection has ended");
    cr_assert (!gq_hop_attached (optimizers[1]));
    see (1);
    expect_leads (1);
}

/* Its file is ours still, so it cannot be had once more. */
Test (near, what_was_forgotten_and_is_held_comes_when_it_is_released, .init = begin, .fini = end)
{
    see (1);
    gq_hop *held = must_hold (1);
    gq_near_forget (near);
    see (1);
    expect_none ("somebody holds it");
    expect_leads_to (held, 1);
    gq_near_release (near, held);
    cr_assert (!gq_hop_attached (optimizers[1]));
    see (1);
    expect_leads (1);
}

Test (near, when_more_are_held_than_there_are_places_the_next_one_waits, .init = begin, .fini = end)
{
    gq_hop *held[TERMS + 1] = {NULL};
    int count = 0;
    for (int term = 1; term <= TERMS; term++) {
        see (term);
        held[term] = gq_near_hold (near);
        count += held[term] != NULL;
    }
    cr_assert (count >= 2 && count < TERMS, "%d places", count);
    for (int term = 1; term <= count; term++)
        expect_leads_to (held[term], term);
    for (int term = count + 1; term <= TERMS; term++)
        cr_assert (held[term] == NULL && !gq_hop_attached (optimizers[term]), "term %d", term);
    gq_near_release (near, NULL);
    expect_none ("there is no room");
    gq_near_release (near, held[2]);
    see (TERMS);
    expect_leads (TERMS);
    gq_near_release (near, held[1]);
    for (int term = 3; term <= count; term++) {
        expect_leads_to (held[term], term);
        gq_near_release (near, held[term]);
        cr_assert (!gq_hop_attached (optimizers[term]), "term %d", term);
    }
    expect_leads (TERMS);
}
