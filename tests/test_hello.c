/*
 * Hello: the first layout wins, ids and epochs are granted once, and whatever is refused comes with
 * a sentence.
 */
#include "rule_testing.h"
#include "support.h"

#include "log.h"
#include "memory_disk.h"
#include "optimizer/hello.h"

TestSuite (hello, .timeout = 60);

#define NONCE_A "000102030405060708090a0b0c0d0e0f"
#define NONCE_B "f00102030405060708090a0b0c0d0e0f"
#define NONCE_C "e00102030405060708090a0b0c0d0e0f"
#define LAYOUT  "[{\"name\": \"w\", \"shape\": [2, 3]}, {\"name\": \"b\", \"shape\": []}]"

static gq_core core;
static gq_rule *rule;
static gq_identity identity;
static char directory[64];

static void
begin (void)
{
    const gq_core_config config = {.aggregate = 4, .max_staleness = UINT64_MAX};
    gq_error error = {""};
    cr_assert_eq (gq_log_open ("test", "/dev/null", GQ_LOG_ERROR, &error), GQ_OK);
    support_directory (directory);
    cr_assert_eq (gq_identity_open (&identity, directory, &error), GQ_OK);
    rule = load ("adam", "auto", NO_SETS);
    gq_core_init (&core, &config, rule);
    memcpy (core.run, identity.run, GQ_RUN_ID_BYTES);
    core.term = identity.term;
}

static void
end (void)
{
    gq_core_clear (&core);
    gq_rule_free (&rule);
    support_remove (directory);
}

/* The answer to a request, which is JSON with ' for ". */
static json_t *
ask (const char *format, const char *nonce, const char *more)
{
    char text[4096];
    snprintf (text, sizeof text, format, nonce, more);
    json_error_t where;
    json_t *request = json_loads (text, 0, &where);
    cr_assert_not_null (request, "%s in %s", where.text, text);
    json_t *answer = gq_hello_answer (&core, &identity, request);
    json_decref (request);
    return answer;
}

static json_t *
hello (const char *nonce, const char *more)
{
    return ask (
        "{\"op\": \"hello\", \"protocol\": 1, \"role\": \"actor\", \"lanes\": [\"inline\"], "
        "\"from\": \"aabb\", \"nonce\": \"%s\"%s}",
        nonce, more);
}

/* Of a process that hears the answer, for an id that has a life already. */
static json_t *
hello_alive (const char *nonce, unsigned actor)
{
    char more[80];
    snprintf (more, sizeof more, ", \"actor\": %u", actor);
    json_t *answer = hello (nonce, more);
    const char *word = json_string_value (json_object_get (answer, "challenge"));
    cr_assert_not_null (word);
    snprintf (more, sizeof more, ", \"actor\": %u, \"challenge\": \"%s\"", actor, word);
    json_decref (answer);
    return hello (nonce, more);
}

static json_int_t
number (const json_t *answer, const char *key)
{
    cr_assert (json_is_integer (json_object_get (answer, key)), "%s", key);
    return json_integer_value (json_object_get (answer, key));
}

static void
expect_ok (const json_t *answer)
{
    const char *message = json_string_value (json_object_get (answer, "message"));
    cr_assert (json_is_true (json_object_get (answer, "ok")), "%s", message ? message : "?");
}

/* Takes the answer. */
static void
expect_refused (json_t *answer, const char *reason, bool retry, const char *word)
{
    cr_assert_not_null (answer);
    cr_assert (json_is_false (json_object_get (answer, "ok")));
    cr_assert_str_eq (json_string_value (json_object_get (answer, "op")), "hello");
    cr_assert_str_eq (json_string_value (json_object_get (answer, "error")), reason);
    const char *message = json_string_value (json_object_get (answer, "message"));
    cr_assert_not_null (strstr (message, word), "%s", message);
    cr_assert_eq (json_is_true (json_object_get (answer, "retry")), retry, "%s", message);
    cr_assert_str_eq (json_string_value (json_object_get (answer, "to")), "aabb");
    json_decref (answer);
}

Test (hello, the_first_proposal_with_weights_becomes_the_layout)
{
    begin ();
    json_t *answer = hello (NONCE_A, ", \"initial\": true, \"layout\": " LAYOUT);
    expect_ok (answer);
    cr_assert_eq (core.layout.tensor_count, 2);
    cr_assert_eq (number (answer, "actor"), 0);
    cr_assert_eq (number (answer, "epoch"), 1);
    cr_assert_eq (number (answer, "parameters"), 7);
    cr_assert_eq (number (answer, "aggregate"), 4);
    cr_assert_eq (number (answer, "term"), 1);
    cr_assert (json_is_null (json_object_get (answer, "max_staleness")), "no bound");
    cr_assert (json_is_true (json_object_get (answer, "need_weights")));
    cr_assert_str_eq (json_string_value (json_object_get (answer, "nonce")), NONCE_A);
    cr_assert_str_eq (json_string_value (json_object_get (answer, "to")), "aabb");
    cr_assert_str_eq (json_string_value (json_object_get (answer, "optimizer")), "adam");
    cr_assert_eq (json_array_size (json_object_get (answer, "layout")), 2);
    cr_assert_eq (strlen (json_string_value (json_object_get (answer, "digest"))), 16);
    json_decref (answer);
    end ();
}

Test (hello, without_a_layout_of_either_side_it_says_not_yet)
{
    begin ();
    expect_refused (hello (NONCE_A, ""), "layout", true, "no model yet");
    expect_refused (hello (NONCE_A, ", \"layout\": null"), "layout", true, "no model yet");
    expect_refused (hello (NONCE_A, ", \"layout\": " LAYOUT), "layout", true, "no weights yet");
    cr_assert_eq (core.layout.tensor_count, 0);
    cr_assert_eq (core.ledger.actor_count, 0, "nothing granted");
    cr_assert_eq (identity.next_epoch, 1);
    end ();
}

Test (hello, later_proposals_must_equal_the_first_and_are_told_where_they_do_not)
{
    begin ();
    json_decref (hello (NONCE_A, ", \"initial\": true, \"layout\": " LAYOUT));
    json_t *answer = hello (NONCE_B, ", \"layout\": " LAYOUT);
    expect_ok (answer);
    json_decref (answer);
    answer = hello (NONCE_B, "");
    expect_ok (answer);
    json_decref (answer);
    expect_refused (hello (NONCE_B,
                           ", \"initial\": true, \"layout\": [{\"name\": \"w\", \"shape\": "
                           "[2, 3]}, {\"name\": \"c\", \"shape\": []}]"),
                    "layout", false, "tensor 1, b here and c in yours");
    expect_refused (hello (NONCE_B, ", \"layout\": [{\"name\": \"w\", \"shape\": [2, 3]}]"),
                    "layout", false, "none in yours");
    cr_assert_eq (core.layout.tensor_count, 2);
    end ();
}

Test (hello, a_layout_whose_checkpoints_could_not_be_named_is_refused)
{
    begin ();
    expect_refused (hello (NONCE_A, ", \"initial\": true, \"layout\": [{\"name\": \"exp_avg.w\", "
                                    "\"shape\": []}, {\"name\": \"w\", \"shape\": []}]"),
                    "invalid", false, "exp_avg.w");
    cr_assert_eq (core.layout.tensor_count, 0);
    end ();
}

Test (hello, a_repetition_with_the_same_nonce_is_granted_the_same)
{
    begin ();
    json_t *first = hello (NONCE_A, ", \"initial\": true, \"layout\": " LAYOUT);
    json_t *other = hello (NONCE_B, "");
    json_t *again = hello (NONCE_A, ", \"initial\": true, \"layout\": " LAYOUT);
    cr_assert_eq (number (first, "actor"), number (again, "actor"));
    cr_assert_eq (number (first, "epoch"), number (again, "epoch"));
    cr_assert_neq (number (first, "actor"), number (other, "actor"));
    cr_assert_neq (number (first, "epoch"), number (other, "epoch"));
    json_decref (first);
    json_decref (other);
    json_decref (again);
    end ();
}

Test (hello, an_id_asked_for_is_granted_and_a_new_life_of_it_gets_a_new_epoch)
{
    begin ();
    json_t *first = hello (NONCE_A, ", \"actor\": 4095, \"initial\": true, \"layout\": " LAYOUT);
    json_t *second = hello_alive (NONCE_B, 4095);
    cr_assert_eq (number (first, "actor"), 4095);
    cr_assert_eq (number (second, "actor"), 4095);
    cr_assert (number (second, "epoch") > number (first, "epoch"));
    json_decref (first);
    json_decref (second);
    end ();
}

/* What a dead process left in a cut network comes after its successor's hello, without the word
 * that it never heard, or with one for a life that is no longer the one to end. */
Test (hello, that_would_end_a_life_is_granted_only_to_who_repeats_its_own_word)
{
    char more[80];
    begin ();
    json_t *first = hello (NONCE_A, ", \"initial\": true, \"layout\": " LAYOUT);
    const json_int_t epoch = number (first, "epoch");
    json_t *challenged = hello (NONCE_B, ", \"actor\": 0");
    const char *word = json_string_value (json_object_get (challenged, "challenge"));
    cr_assert_not_null (word);
    snprintf (more, sizeof more, ", \"actor\": 0, \"challenge\": \"%s\"", word);
    expect_refused (hello (NONCE_B, ", \"actor\": 0, \"challenge\": \"0\""), "again", true,
                    "challenge");
    expect_refused (hello (NONCE_C, more), "again", true, "challenge"); /* another's */
    cr_assert_eq (core.ledger.actors[0].epoch, epoch, "the first life goes on");
    /* A third process is quicker; then the word is worth nothing. */
    json_t *quicker = hello_alive (NONCE_C, 0);
    cr_assert (number (quicker, "epoch") > epoch);
    expect_refused (hello (NONCE_B, more), "again", true, "challenge");
    /* The living one's repetition needs none. */
    json_t *again = hello (NONCE_C, ", \"actor\": 0");
    cr_assert_eq (number (again, "epoch"), number (quicker, "epoch"));
    json_decref (first);
    json_decref (challenged);
    json_decref (quicker);
    json_decref (again);
    end ();
}

Test (hello, an_epoch_that_cannot_be_journaled_is_not_granted_and_may_be_asked_for_again)
{
    const gq_journal_end nothing = {0};
    gq_memory_disk *memory = gq_memory_disk_new ();
    gq_disk *disk = &memory->base;
    gq_journal journal;
    begin ();
    cr_assert_eq (gq_journal_start (&journal, disk, core.run, &nothing, 4096, NULL), GQ_OK);
    core.journal = &journal;
    json_decref (hello (NONCE_A, ", \"initial\": true, \"layout\": " LAYOUT));
    const uint64_t room = memory->room_bytes, lsn = journal.lsn;
    memory->room_bytes = memory->written_bytes;
    const uint32_t next = identity.next_epoch;
    expect_refused (hello (NONCE_B, ""), "io", true, "journal");
    cr_assert_eq (identity.next_epoch, next);
    cr_assert_eq (core.ledger.actor_count, 1);
    json_t *known = hello (NONCE_A, "");
    expect_ok (known); /* a repetition writes nothing */
    json_decref (known);
    memory->room_bytes = room;
    json_t *answer = hello (NONCE_B, "");
    expect_ok (answer);
    cr_assert_eq (number (answer, "epoch"), next);
    cr_assert_eq (journal.lsn, lsn + 1);
    json_decref (answer);
    end ();
    disk->ops->close (&disk);
}

Test (hello, max_staleness_is_told_when_there_is_a_bound)
{
    begin ();
    core.config.max_staleness = 3;
    json_t *answer = hello (NONCE_A, ", \"initial\": true, \"layout\": " LAYOUT);
    cr_assert_eq (number (answer, "max_staleness"), 3);
    json_decref (answer);
    end ();
}

Test (hello, requests_that_are_wrong_are_refused_with_a_sentence)
{
    static const struct {
        const char *format, *word;
    } bad[] = {
        {"{\"op\": \"hello\", \"from\": \"aabb\", \"lanes\": [\"inline\"], \"nonce\": \"%s\"%s}",
         "protocol"},
        {"{\"op\": \"hello\", \"from\": \"aabb\", \"protocol\": 2, \"lanes\": [\"inline\"], "
         "\"nonce\": \"%s\"%s}",
         "protocol"},
        {"{\"op\": \"hello\", \"from\": \"aabb\", \"protocol\": 1, \"lanes\": [\"inline\"], "
         "\"nonce\": \"%s00\"%s}",
         "nonce"},
        {"{\"op\": \"hello\", \"from\": \"aabb\", \"protocol\": 1, \"lanes\": [\"inline\"], "
         "\"nuance\": \"%s\"%s}",
         "nonce"},
        {"{\"op\": \"hello\", \"from\": \"aabb\", \"protocol\": 1, \"lanes\": [\"shm\", 7], "
         "\"nonce\": \"%s\"%s}",
         "inline"},
        {"{\"op\": \"hello\", \"from\": \"aabb\", \"protocol\": 1, \"nonce\": \"%s\"%s}",
         "inline"}};
    static const char *const ids[] = {"-1", "4096", "1.0", "\"1\"", "true", "[]"};
    begin ();
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        expect_refused (ask (bad[i].format, NONCE_A, ""), "invalid", false, bad[i].word);
    for (size_t i = 0; i < sizeof ids / sizeof ids[0]; i++) {
        char more[64];
        snprintf (more, sizeof more, ", \"actor\": %s", ids[i]);
        expect_refused (hello (NONCE_A, more), "invalid", false, "id");
    }
    expect_refused (hello (NONCE_A, ", \"initial\": true, \"layout\": 7"), "invalid", false,
                    "layout");
    cr_assert_eq (core.ledger.actor_count, 0);
    end ();
}

Test (hello, what_is_no_question_gets_no_answer)
{
    begin ();
    cr_assert_null (ask ("{\"op\": \"stats\", \"nonce\": \"%s\"%s}", "", ""));
    cr_assert_null (ask ("{\"op\": 7, \"nonce\": \"%s\"%s}", "", ""));
    cr_assert_null (ask ("{\"nonce\": \"%s\"%s}", "", ""));
    cr_assert_null (ask ("[\"%s%s\"]", "", ""));
    end ();
}

Test (hello, the_layout_can_be_asked_for_alone)
{
    begin ();
    json_t *answer = ask ("{\"op\": \"layout\", \"from\": \"cc\", \"nonce\": \"%s\"%s}", "n", "");
    cr_assert (json_is_false (json_object_get (answer, "ok")));
    cr_assert (json_is_true (json_object_get (answer, "retry")));
    json_decref (answer);
    json_decref (hello (NONCE_A, ", \"initial\": true, \"layout\": " LAYOUT));
    answer = ask ("{\"op\": \"layout\", \"from\": \"cc\", \"nonce\": \"%s\"%s}", "n", "");
    expect_ok (answer);
    cr_assert_eq (number (answer, "parameters"), 7);
    cr_assert_str_eq (json_string_value (json_object_get (answer, "to")), "cc");
    cr_assert_eq (core.ledger.actor_count, 1, "asking grants nothing");
    json_decref (answer);
    end ();
}

Test (hello, all_ids_taken_is_said)
{
    begin ();
    json_decref (hello (NONCE_A, ", \"initial\": true, \"layout\": " LAYOUT));
    for (size_t i = 0; i < GQ_ACTORS_MAX; i++)
        core.ledger.actors[i].known = true;
    expect_refused (hello (NONCE_B, ""), "full", false, "taken");
    end ();
}

Test (hello, a_report_counts_by_reason)
{
    static gq_publisher publisher;
    static gq_histogram apply_us;
    begin ();
    core.rejected_by[GQ_STALE] = 3;
    core.rejected_by[GQ_NONFINITE] = 2;
    core.version = 9;
    core.ledger.duplicates = 5;
    gq_histogram_add (&apply_us, 17);
    json_t *report = gq_hello_report (&core, &publisher, &apply_us, 8);
    const json_t *by = json_object_get (report, "rejected_by");
    cr_assert_eq (number (report, "rejected"), 5);
    cr_assert_eq (number (by, "stale"), 3);
    cr_assert_eq (number (by, "nonfinite"), 2);
    cr_assert_eq (json_object_size (by), 2);
    cr_assert_eq (number (report, "version"), 9);
    cr_assert_eq (number (report, "duplicates"), 5);
    cr_assert_eq (number (report, "checkpoint_version"), 8);
    cr_assert_eq (number (report, "apply_us_p50"), 17);
    cr_assert_eq (json_real_value (json_object_get (report, "lr")), 1e-3, "of Adam");
    json_decref (report);
    end ();
}
