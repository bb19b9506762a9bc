/*
 * Identity file: the run keeps its id, and no term or epoch is ever given out twice.
 */
#include "support.h"

#include "optimizer/identity.h"

TestSuite (identity, .timeout = 60);

static char directory[64];

static gq_status
reopen (gq_identity *identity)
{
    gq_error error = {""};
    const gq_status status = gq_identity_open (identity, directory, &error);
    if (status != GQ_OK)
        cr_assert_not_null (strstr (error.text, "identity.json"), "%s", error.text);
    return status;
}

static void
store_text (const char *text)
{
    char path[128];
    snprintf (path, sizeof path, "%s/identity.json", directory);
    support_write (path, text, strlen (text));
}

Test (identity, a_new_run_has_an_id_term_1_and_epochs_from_1)
{
    gq_identity first, second;
    static const uint8_t zero[GQ_RUN_ID_BYTES];
    support_directory (directory);
    cr_assert_eq (reopen (&first), GQ_OK);
    cr_assert_eq (first.term, 1);
    cr_assert_eq (first.next_epoch, 1);
    cr_assert_arr_neq (first.run, zero, GQ_RUN_ID_BYTES);
    support_remove (directory);
    support_directory (directory);
    cr_assert_eq (reopen (&second), GQ_OK);
    cr_assert_arr_neq (first.run, second.run, GQ_RUN_ID_BYTES);
    support_remove (directory);
}

Test (identity, every_life_has_the_run_a_higher_term_and_epochs_above_all_granted)
{
    gq_identity identity, last;
    support_directory (directory);
    cr_assert_eq (reopen (&last), GQ_OK);
    for (uint32_t life = 2; life < 8; life++) {
        uint32_t granted = 0;
        /* More than a block of them, in some lives; then the process dies without a word. */
        for (uint32_t i = 0; i < 700 * life; i++) {
            cr_assert_eq (gq_identity_reserve (&last, NULL), GQ_OK);
            granted = last.next_epoch++;
        }
        cr_assert_eq (reopen (&identity), GQ_OK);
        cr_assert_eq (identity.term, life);
        cr_assert_arr_eq (identity.run, last.run, GQ_RUN_ID_BYTES);
        cr_assert (identity.next_epoch > granted, "%u after %u", identity.next_epoch, granted);
        last = identity;
    }
    support_remove (directory);
}

Test (identity, a_damaged_file_is_refused_and_left_alone)
{
    static const char *const bad[] = {
        "",
        "{}",
        "[]",
        "7",
        "{\"run\": \"00112233445566778899aabbccddeeff\", \"term\": 1",
        "{\"run\": \"00112233445566778899aabbccddee\", \"term\": 1, \"epochs_reserved\": 1}",
        "{\"run\": \"00112233445566778899aabbccddeeff\", \"epochs_reserved\": 1}",
        "{\"run\": \"00112233445566778899aabbccddeeff\", \"term\": 1}",
        "{\"run\": \"00112233445566778899aabbccddeeff\", \"term\": 0, \"epochs_reserved\": 1}",
        "{\"run\": \"00112233445566778899aabbccddeeff\", \"term\": -1, \"epochs_reserved\": 1}",
        "{\"run\": \"00112233445566778899aabbccddeeff\", \"term\": \"1\", \"epochs_reserved\": 1}",
        "{\"run\":\"00112233445566778899aabbccddeeff\",\"term\":4294967295,\"epochs_reserved\":1}",
        "{\"run\": \"00112233445566778899aabbccddeeff\", \"term\": 1, \"epochs_reserved\": 0}",
        "{\"run\":\"00112233445566778899aabbccddeeff\",\"term\":1,\"epochs_reserved\":4294967295}"};
    support_directory (directory);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        gq_identity identity;
        char path[128];
        uint8_t *bytes;
        store_text (bad[i]);
        cr_assert_eq (reopen (&identity), GQ_MALFORMED, "%s", bad[i]);
        snprintf (path, sizeof path, "%s/identity.json", directory);
        support_read (path, &bytes);
        cr_assert_str_eq ((const char *)bytes, bad[i], "another run's id would orphan its actors");
        free (bytes);
    }
    support_remove (directory);
}

Test (identity, the_id_can_be_read_without_beginning_a_life)
{
    gq_identity first, second;
    uint8_t run[GQ_RUN_ID_BYTES];
    gq_error error = {""};
    support_directory (directory);
    cr_assert_eq (gq_identity_read (run, directory, &error), GQ_NOTFOUND);
    cr_assert_not_null (strstr (error.text, "identity.json"), "%s", error.text);
    cr_assert_eq (reopen (&first), GQ_OK);
    cr_assert_eq (gq_identity_read (run, directory, &error), GQ_OK, "%s", error.text);
    cr_assert_arr_eq (run, first.run, GQ_RUN_ID_BYTES);
    cr_assert_eq (reopen (&second), GQ_OK);
    cr_assert_eq (second.term, first.term + 1, "reading raised no term");
    store_text ("{}");
    cr_assert_eq (gq_identity_read (run, directory, &error), GQ_MALFORMED);
    support_remove (directory);
}

Test (identity, what_a_crash_left_beside_it_does_not_matter)
{
    gq_identity first, second;
    char path[128];
    support_directory (directory);
    cr_assert_eq (reopen (&first), GQ_OK);
    snprintf (path, sizeof path, "%s/identity.json.tmp", directory);
    support_write (path, "{\"run\"", 6);
    cr_assert_eq (reopen (&second), GQ_OK);
    cr_assert_eq (second.term, 2);
    cr_assert_arr_eq (first.run, second.run, GQ_RUN_ID_BYTES);
    support_remove (directory);
}

Test (identity, a_directory_that_is_not_there_is_an_io_error)
{
    gq_identity identity;
    snprintf (directory, sizeof directory, "/nonexistent/run");
    cr_assert_eq (reopen (&identity), GQ_IO);
}

Test (identity, the_last_epochs_are_not_given_out_twice)
{
    gq_identity identity = {.next_epoch = UINT32_MAX - 5, .reserved_epoch = UINT32_MAX - 5};
    gq_error error = {""};
    cr_assert_eq (gq_identity_reserve (&identity, &error), GQ_FULL);
    cr_assert_eq (identity.reserved_epoch, UINT32_MAX - 5);
    cr_assert_str_not_empty (error.text);
}

Test (identity, a_reservation_that_cannot_be_stored_grants_nothing)
{
    gq_identity identity;
    support_directory (directory);
    cr_assert_eq (reopen (&identity), GQ_OK);
    support_remove (directory);
    identity.next_epoch = identity.reserved_epoch;
    const uint32_t reserved = identity.reserved_epoch;
    gq_error error = {""};
    cr_assert_eq (gq_identity_reserve (&identity, &error), GQ_IO);
    cr_assert_eq (identity.reserved_epoch, reserved);
}
