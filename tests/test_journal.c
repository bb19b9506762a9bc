/*
 * Journal: what is written comes back, over segments and restarts, and after whatever a checkpoint
 * covers.  Damage is in test_journal_damage.c, a failing disk in test_journal_faults.c.
 */
#include "journal_testing.h"

TestSuite (journal, .timeout = 60);

#define RECORDS 12

static gq_journal journal;
static gq_error failure;
static place places[RECORDS_MAX + 1];

/* chains[lsn] is what a checkpoint after that record holds. */
static gq_memory_disk *
journal_with_chains (uint64_t lsn, uint32_t *chains)
{
    gq_memory_disk *memory = journal_of (&journal, 0);
    chains[0] = 0;
    for (uint64_t i = 1; i <= lsn; i++) {
        append_to (&journal, i);
        chains[i] = journal.chain;
    }
    return memory;
}

static size_t
segment_count (gq_memory_disk *memory)
{
    char **names;
    size_t count;
    cr_assert_eq (gq_segment_list (&memory->base, &names, &count), GQ_OK);
    free (names);
    return count;
}

Test (journal, an_empty_disk_is_an_empty_journal)
{
    gq_memory_disk *memory = gq_memory_disk_new ();
    gq_journal_end end;
    cr_assert_eq (read_all (&memory->base, &end, NULL), GQ_OK);
    cr_assert_eq (end.lsn, 0);
    cr_assert_eq (end.chain, 0);
    cr_assert_str_eq (end.segment, "");
    cr_assert_not (end.torn);
    disk_close (memory);
}

Test (journal, records_come_back_in_order_over_several_segments)
{
    for (uint64_t lsn = 1; lsn <= RECORDS; lsn++) {
        gq_memory_disk *memory = journal_of (&journal, lsn);
        gq_journal_end end;
        cr_assert_eq (read_all (&memory->base, &end, &failure), GQ_OK, "%s", failure.text);
        cr_assert_eq (end.lsn, lsn);
        cr_assert_eq (end.chain, journal.chain);
        cr_assert_eq (end.size, journal.size);
        cr_assert_not (end.torn);
        cr_assert_eq (segment_count (memory), places_of (places, lsn));
        cr_assert_str_eq (end.segment, places[lsn].segment);
        cr_assert_eq (memory->maps, 0, "what was mapped is unmapped");
        disk_close (memory);
    }
    cr_assert_geq (places[RECORDS].number, 2, "three segments at least");
}

Test (journal, a_segment_is_whole_records_up_to_its_size)
{
    gq_memory_disk *memory = journal_of (&journal, RECORDS);
    places_of (places, RECORDS);
    for (uint64_t i = 1; i <= RECORDS; i++) {
        size_t size;
        cr_assert_not_null (gq_memory_disk_bytes (memory, places[i].segment, &size));
        if (i == RECORDS || places[i].number != places[i + 1].number)
            cr_assert_eq (size, places[i].padded, "after record %" PRIu64, i);
    }
    disk_close (memory);
}

Test (journal, the_bytes_are_as_the_tables_of_the_format_say)
{
    static const uint8_t payload[] = {1, 2, 3};
    const struct iovec part = {.iov_base = (void *)(uintptr_t)payload, .iov_len = sizeof payload};
    gq_memory_disk *memory = journal_of (&journal, 0);
    cr_assert_eq (gq_journal_append (&journal, GQ_RECORD_REFUSAL, &part, 1), GQ_OK);
    size_t size;
    const uint8_t *bytes = gq_memory_disk_bytes (memory, "segment-0000000000000001", &size);
    cr_assert_not_null (bytes);
    cr_assert_eq (size, 64 + 32 + 8);
    static const uint8_t segment[] = {'G', 'Q', 'J', '1', 1, 0, 0, 0};
    static const uint8_t first_lsn_and_chain[12] = {1};
    static const uint8_t record[] = {'G', 'R', 'C', '1', 4, 0, 0, 0, 1, 0, 0, 0, 0, 0,
                                     0,   0,   3,   0,   0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    static const uint8_t padding[5];
    cr_assert_arr_eq (bytes, segment, sizeof segment);
    cr_assert_arr_eq (bytes + 8, run_id, GQ_RUN_ID_BYTES);
    cr_assert_arr_eq (bytes + 24, first_lsn_and_chain, sizeof first_lsn_and_chain);
    cr_assert_arr_eq (bytes + 64, record, sizeof record);
    cr_assert_arr_eq (bytes + 96, payload, sizeof payload);
    cr_assert_arr_eq (bytes + 99, padding, sizeof padding);
    disk_close (memory);
}

Test (journal, restarts_anywhere_leave_the_same_bytes_as_none)
{
    gq_memory_disk *once = journal_of (&journal, RECORDS);
    const gq_journal expected = journal;
    gq_memory_disk *often = journal_of (&journal, 0);
    for (uint64_t lsn = 1; lsn <= RECORDS; lsn++) {
        gq_memory_disk_kill (often);
        const gq_journal_end end = reopen (&journal, &often->base);
        cr_assert_eq (end.lsn, lsn - 1);
        append_to (&journal, lsn);
    }
    cr_assert_eq (journal.chain, expected.chain);
    places_of (places, RECORDS);
    for (uint64_t i = 1; i <= RECORDS; i++) {
        size_t size, size_often;
        const uint8_t *bytes = gq_memory_disk_bytes (once, places[i].segment, &size);
        const uint8_t *bytes_often = gq_memory_disk_bytes (often, places[i].segment, &size_often);
        cr_assert (bytes != NULL && bytes_often != NULL);
        cr_assert_eq (size, size_often);
        cr_assert_arr_eq (bytes, bytes_often, size);
    }
    disk_close (once);
    disk_close (often);
}

Test (journal, reading_after_any_record_gives_the_later_ones_only)
{
    uint32_t chains[RECORDS + 1];
    gq_memory_disk *memory = journal_with_chains (RECORDS, chains);
    for (uint64_t after = 0; after <= RECORDS; after++) {
        gq_journal_end end;
        const gq_status status = read_after (&memory->base, after, chains[after], &end, &failure);
        cr_assert_eq (status, GQ_OK, "after %" PRIu64 ": %s", after, failure.text);
        cr_assert_eq (end.lsn, RECORDS);
        cr_assert_eq (end.chain, chains[RECORDS]);
    }
    disk_close (memory);
}

Test (journal, a_checkpoint_after_another_record_of_that_number_is_refused)
{
    uint32_t chains[RECORDS + 1];
    gq_memory_disk *memory = journal_with_chains (RECORDS, chains);
    /* 0 with a chain is no checkpoint; the others include the first and the last of a segment. */
    for (uint64_t after = 0; after <= RECORDS; after++) {
        gq_journal_end end;
        const gq_status status =
            read_after (&memory->base, after, chains[after] ^ 1, &end, &failure);
        cr_assert_eq (status, GQ_MALFORMED, "after %" PRIu64 ": %s", after,
                      gq_status_name (status));
        cr_assert_not_null (strstr (failure.text, "at offset "), "%s", failure.text);
    }
    disk_close (memory);
}

/* Ends of a journal of 4 records that a loss of power may leave; the checkpoint is at 6. */
static void
end_without (gq_memory_disk *memory, int end)
{
    static const uint8_t unfinished[40] = "GRC1 and what was never written";
    uint8_t bytes[1024];
    size_t size;
    places_of (places, RECORDS);
    const uint8_t *live = gq_memory_disk_bytes (memory, places[4].segment, &size);
    cr_assert (live != NULL && size + sizeof unfinished <= sizeof bytes);
    memcpy (bytes, live, size);
    memcpy (bytes + size, unfinished, sizeof unfinished);
    gq_status status = GQ_OK;
    if (end == 1) /* an unfinished record */
        status = gq_memory_disk_put (memory, places[4].segment, bytes, size + sizeof unfinished);
    else if (end == 2) /* a segment without a header */
        status = gq_memory_disk_put (memory, "segment-0000000000000005", NULL, 0);
    else if (end == 3) /* one with an unfinished header */
        status = gq_memory_disk_put (memory, "segment-0000000000000005", bytes, 63);
    cr_assert_eq (status, GQ_OK);
}

Test (journal, a_checkpoint_ahead_of_the_journal_is_gone_on_from)
{
    uint32_t chains[RECORDS + 1];
    disk_close (journal_with_chains (RECORDS, chains));
    for (int kind = 0; kind < 5; kind++) {
        gq_memory_disk *memory = kind < 4 ? journal_of (&journal, 4) : gq_memory_disk_new ();
        if (kind < 4)
            end_without (memory, kind);
        gq_memory_disk_kill (memory);
        const gq_journal_end end = reopen_after (&journal, &memory->base, 6, chains[6]);
        cr_assert_eq (end.lsn, 6, "kind %d", kind);
        cr_assert_eq (end.chain, chains[6], "kind %d", kind);
        cr_assert_str_eq (end.segment, "", "a fresh one");
        append_to (&journal, RECORDS);
        for (uint64_t after = 6; after <= RECORDS; after++) {
            gq_journal_end again;
            const gq_status status =
                read_after (&memory->base, after, chains[after], &again, &failure);
            cr_assert_eq (status, GQ_OK, "kind %d, after %" PRIu64 ": %s", kind, after,
                          failure.text);
            cr_assert_eq (again.lsn, RECORDS);
            cr_assert_eq (again.chain, chains[RECORDS]);
        }
        gq_journal_end never;
        cr_assert_eq (read_after (&memory->base, 0, 0, &never, NULL), GQ_MALFORMED,
                      "kind %d: 5 and 6 are missing", kind);
        disk_close (memory);
    }
}

Test (journal, another_runs_journal_is_refused_as_such)
{
    static const uint8_t stranger[GQ_RUN_ID_BYTES] = "run of others";
    gq_memory_disk *memory = journal_of (&journal, RECORDS);
    gq_journal_end end;
    seen all = {0};
    const gq_status status =
        gq_journal_read (&memory->base, stranger, 0, 0, see, &all, &end, &failure);
    cr_assert_eq (status, GQ_RUN, "%s", gq_status_name (status));
    cr_assert_eq (all.lsn, 0, "no record was handed on");
    cr_assert_not_null (strstr (failure.text, "segment-0000000000000001"), "%s", failure.text);
    disk_close (memory);
}

Test (journal, what_the_handler_answers_ends_the_reading)
{
    gq_memory_disk *memory = journal_of (&journal, RECORDS);
    for (uint64_t stop = 1; stop <= RECORDS; stop++) {
        gq_journal_end end;
        seen all = {.stop_at = stop};
        cr_assert_eq (gq_journal_read (&memory->base, run_id, 0, 0, see, &all, &end, &failure),
                      GQ_CLOSED);
        cr_assert_eq (all.lsn, stop - 1);
        cr_assert_eq (end.lsn, stop - 1);
        cr_assert_eq (memory->maps, 0);
    }
    disk_close (memory);
}

/* The segments that hold a record with lsn > covered, or else the last. */
static size_t
segments_after (uint64_t covered)
{
    size_t segments = places_of (places, RECORDS);
    return covered >= RECORDS ? 1 : segments - places[covered + 1].number;
}

Test (journal, forget_removes_the_covered_segments_and_only_them)
{
    for (uint64_t covered = 0; covered <= RECORDS + 3; covered++) {
        uint32_t chains[RECORDS + 1];
        gq_memory_disk *memory = journal_with_chains (RECORDS, chains);
        gq_journal_forget (&journal, covered);
        cr_assert_eq (segment_count (memory), segments_after (covered), "covered %" PRIu64,
                      covered);
        /* Nothing that a checkpoint there needs is gone, and appending goes on. */
        append_to (&journal, RECORDS + 1);
        const uint64_t after = covered < RECORDS ? covered : RECORDS;
        gq_journal_end end;
        const gq_status status = read_after (&memory->base, after, chains[after], &end, &failure);
        cr_assert_eq (status, GQ_OK, "covered %" PRIu64 ": %s", covered, failure.text);
        cr_assert_eq (end.lsn, RECORDS + 1);
        if (segments_after (covered) < segments_after (0)) {
            cr_assert_eq (read_after (&memory->base, 0, 0, &end, &failure), GQ_MALFORMED);
            cr_assert_not_null (strstr (failure.text, "missing"), "%s", failure.text);
        }
        disk_close (memory);
    }
}

Test (journal, other_files_beside_the_segments_are_neither_read_nor_forgotten)
{
    static const char *const others[] = {
        "segment-",        "segment-0000000000000001.bak", "segment-0000000000000001~",
        "segment-zzz",     "segment-00000000000000001",    "segment-000000000000000x",
        "segment-9.empty", "segment-0000000000000000"};
    const size_t other_count = sizeof others / sizeof others[0];
    gq_memory_disk *memory = journal_of (&journal, RECORDS);
    size_t size;
    for (size_t i = 0; i < other_count; i++)
        cr_assert_eq (gq_memory_disk_put (memory, others[i], "x", i % 2), GQ_OK);
    gq_memory_disk_kill (memory);
    cr_assert_eq (reopen (&journal, &memory->base).lsn, RECORDS);
    gq_journal_forget (&journal, 0);
    cr_assert_eq (segment_count (memory), segments_after (0), "nothing is covered");
    gq_journal_forget (&journal, RECORDS);
    cr_assert_eq (segment_count (memory), 1);
    for (size_t i = 0; i < other_count; i++)
        cr_assert_not_null (gq_memory_disk_bytes (memory, others[i], &size), "%s", others[i]);
    disk_close (memory);
}
