/*
 * Journal on a disk that is full, fails or loses its power, at every point of the work.  What was
 * appended with success, and no more than one record that was not, is in the journal afterwards.
 */
#include "journal_testing.h"

TestSuite (journal_faults, .timeout = 60);

#define RECORDS 12
#define SEEDS   2000

static gq_journal journal;
static gq_error failure;

static uint64_t
last_lsn (gq_memory_disk *memory)
{
    gq_journal_end end;
    const gq_status status = read_all (&memory->base, &end, &failure);
    REQUIRE (status == GQ_OK, "%s", failure.text);
    return end.lsn;
}

/* Bytes of the whole journal of RECORDS. */
static uint64_t
whole_bytes (void)
{
    gq_memory_disk *memory = journal_of (&journal, RECORDS);
    const uint64_t bytes = memory->written_bytes;
    disk_close (memory);
    return bytes;
}

/* Append until the disk is full, to RECORDS at most. */
static gq_status
append_until_full (gq_journal *self)
{
    gq_status status = GQ_OK;
    while (status == GQ_OK && self->lsn < RECORDS) {
        const gq_journal before = *self;
        status = append_next (self);
        REQUIRE (status == GQ_OK || status == GQ_FULL, "%s", gq_status_name (status));
        if (status == GQ_FULL)
            REQUIRE (self->lsn == before.lsn && self->chain == before.chain, "%" PRIu64, self->lsn);
    }
    return status;
}

Test (journal_faults, a_full_disk_leaves_the_journal_as_it_was_and_later_appends_work)
{
    const uint64_t whole = whole_bytes ();
    for (uint64_t room = 0; room < whole; room++) {
        gq_memory_disk *memory = journal_of (&journal, 0);
        memory->room_bytes = room;
        REQUIRE (append_until_full (&journal) == GQ_FULL, "room %" PRIu64, room);
        const uint64_t lsn = journal.lsn;
        REQUIRE (last_lsn (memory) == lsn, "room %" PRIu64, room);
        /* Again and again in vain, then there is room for little more than one record. */
        REQUIRE (append_next (&journal) == GQ_FULL, "room %" PRIu64, room);
        REQUIRE (last_lsn (memory) == lsn, "room %" PRIu64, room);
        memory->room_bytes += sizeof (gq_segment_header) + record_bytes (lsn + 1);
        REQUIRE (append_next (&journal) == GQ_OK, "room %" PRIu64, room);
        memory->room_bytes = UINT64_MAX;
        append_to (&journal, RECORDS);
        REQUIRE (last_lsn (memory) == RECORDS, "room %" PRIu64, room);
        disk_close (memory);
    }
}

Test (journal_faults, a_process_that_dies_on_a_full_disk_leaves_a_journal_to_go_on_with)
{
    const uint64_t whole = whole_bytes ();
    for (uint64_t room = 0; room < whole; room++) {
        gq_memory_disk *memory = journal_of (&journal, 0);
        memory->room_bytes = room;
        REQUIRE (append_until_full (&journal) == GQ_FULL, "room %" PRIu64, room);
        const uint64_t lsn = journal.lsn;
        gq_memory_disk_kill (memory);
        /* The next process finds it full as well. */
        REQUIRE (reopen (&journal, &memory->base).lsn == lsn, "room %" PRIu64, room);
        REQUIRE (append_next (&journal) == GQ_FULL, "room %" PRIu64, room);
        gq_memory_disk_kill (memory);
        memory->room_bytes = UINT64_MAX;
        REQUIRE (reopen (&journal, &memory->base).lsn == lsn, "room %" PRIu64, room);
        append_to (&journal, RECORDS);
        REQUIRE (last_lsn (memory) == RECORDS, "room %" PRIu64, room);
        disk_close (memory);
    }
}

/* A whole life: read, go on, append RECORDS, sync after every third, forget; up to a failure. */
static gq_status
live (gq_memory_disk *memory, uint64_t *acknowledged)
{
    gq_journal_end end;
    seen all = {0};
    gq_disk *disk = &memory->base;
    gq_status status = gq_journal_read (disk, run_id, 0, 0, see, &all, &end, &failure);
    if (status != GQ_OK)
        return status;
    status = gq_journal_start (&journal, disk, run_id, &end, SEGMENT_BYTES, &failure);
    while (status == GQ_OK && journal.lsn < RECORDS) {
        status = append_next (&journal);
        if (status == GQ_OK && journal.lsn % 3 == 0)
            status = gq_journal_sync (&journal);
        if (status == GQ_OK)
            *acknowledged = journal.lsn;
    }
    return status;
}

Test (journal_faults, a_failure_at_any_call_is_told_and_the_disk_is_not_asked_again)
{
    static const uint64_t partial[] = {0, 1, 31, 32, 50, UINT64_MAX};
    bool failed = true;
    for (uint64_t call = 1; failed; call++) {
        for (size_t i = 0; i < sizeof partial / sizeof partial[0]; i++) {
            /* Two records and a torn one from an earlier life, so that reading and cutting fail as
             * well. */
            gq_memory_disk *memory = journal_of (&journal, 2);
            memory->room_bytes = memory->written_bytes + 10;
            REQUIRE (append_next (&journal) == GQ_FULL, "10 bytes hold no record");
            gq_memory_disk_repair (memory);
            gq_memory_disk_kill (memory);
            memory->fail_at_call = memory->calls + call;
            memory->partial_bytes = partial[i];
            uint64_t acknowledged = 0;
            const gq_status status = live (memory, &acknowledged);
            failed = memory->failed;
            REQUIRE (status == (failed ? GQ_IO : GQ_OK), "call %" PRIu64 ": %s", call,
                     gq_status_name (status));
            REQUIRE (memory->after_fault == 0, "call %" PRIu64, call);
            /* The process ends, and the next one finds a better disk. */
            gq_memory_disk_repair (memory);
            gq_memory_disk_kill (memory);
            const uint64_t lsn = reopen (&journal, &memory->base).lsn;
            REQUIRE (lsn >= acknowledged && (lsn <= acknowledged + 1 || acknowledged == 0),
                     "call %" PRIu64 ": %" PRIu64 " of %" PRIu64, call, lsn, acknowledged);
            append_to (&journal, RECORDS);
            REQUIRE (last_lsn (memory) == RECORDS, "call %" PRIu64, call);
            disk_close (memory);
        }
    }
}

Test (journal_faults, forget_bears_a_disk_that_fails)
{
    for (uint64_t call = 1; call <= 3; call++) {
        gq_memory_disk *memory = journal_of (&journal, RECORDS);
        const uint32_t chain = journal.chain;
        memory->fail_at_call = memory->calls + call;
        gq_journal_forget (&journal, RECORDS);
        cr_assert (memory->failed, "call %" PRIu64, call);
        gq_memory_disk_repair (memory);
        append_to (&journal, RECORDS + 1);
        /* Whichever removal failed, what a checkpoint at RECORDS needs is there. */
        gq_journal_end end;
        cr_assert_eq (read_after (&memory->base, RECORDS, chain, &end, &failure), GQ_OK,
                      "call %" PRIu64 ": %s", call, failure.text);
        cr_assert_eq (end.lsn, RECORDS + 1);
        disk_close (memory);
    }
}

Test (journal_faults, a_sync_covers_what_an_earlier_process_appended)
{
    for (uint64_t lsn = 1; lsn <= RECORDS; lsn++) {
        gq_memory_disk *memory = journal_of (&journal, lsn);
        gq_memory_disk_kill (memory); /* between append and sync */
        const uint64_t found = reopen (&journal, &memory->base).lsn;
        cr_assert_eq (found, lsn, "a process may die, the records stay");
        cr_assert_eq (gq_journal_sync (&journal), GQ_OK);
        gq_memory_disk_crash (memory);
        cr_assert_eq (last_lsn (memory), lsn, "acknowledged after the sync, so not lost");
        disk_close (memory);
    }
}

Test (journal_faults, sync_without_news_asks_the_disk_for_nothing)
{
    gq_memory_disk *memory = journal_of (&journal, 2);
    cr_assert_eq (gq_journal_sync (&journal), GQ_OK);
    const uint64_t calls = memory->calls;
    cr_assert_eq (gq_journal_sync (&journal), GQ_OK);
    cr_assert_eq (memory->calls, calls);
    disk_close (memory);
}

Test (journal_faults, what_was_not_synced_is_gone_after_a_loss_of_power)
{
    /* Of the model of a disk, without which the tests below would show nothing. */
    gq_memory_disk *memory = journal_of (&journal, 2);
    gq_memory_disk_crash (memory);
    cr_assert_eq (last_lsn (memory), 0);
    reopen (&journal, &memory->base);
    append_to (&journal, 1);
    cr_assert_eq (gq_journal_sync (&journal), GQ_OK);
    append_to (&journal, 2);
    gq_memory_disk_crash (memory);
    cr_assert_eq (last_lsn (memory), 1);
    disk_close (memory);
}

/* Some lives of random length in one segment after the other, each ended by a death or a loss of
 * power; answers how many records the power took. */
static uint64_t
random_lives (uint64_t seed, bool anywhere)
{
    uint64_t state = seed, acknowledged = 0, lost = 0;
    gq_memory_disk *memory = journal_of (&journal, 0);
    for (int life = 0; life < 6; life++) {
        for (uint64_t steps = random_next (&state) % 6; steps > 0; steps--) {
            append_to (&journal, journal.lsn + 1);
            if (random_next (&state) % 2 == 0)
                continue;
            REQUIRE (gq_journal_sync (&journal) == GQ_OK, "sync");
            acknowledged = journal.lsn;
        }
        const uint64_t before = journal.lsn;
        if (random_next (&state) % 3 == 0)
            gq_memory_disk_kill (memory);
        else if (anywhere)
            gq_memory_disk_crash_anywhere (memory, &state);
        else
            gq_memory_disk_crash (memory);
        const uint64_t lsn = reopen (&journal, &memory->base).lsn;
        REQUIRE (lsn >= acknowledged && lsn <= before,
                 "seed %" PRIu64 ", life %d: %" PRIu64 " of %" PRIu64 " to %" PRIu64, seed, life,
                 lsn, acknowledged, before);
        lost += before - lsn;
    }
    disk_close (memory);
    return lost;
}

Test (journal_faults, a_loss_of_power_takes_nothing_that_was_synced)
{
    uint64_t lost = 0;
    printf ("seeds 1 to %d\n", SEEDS);
    for (uint64_t seed = 1; seed <= SEEDS; seed++)
        lost += random_lives (seed, seed % 2 == 0);
    cr_assert_gt (lost, 0, "or it showed nothing");
}

Test (journal_faults, a_journal_in_a_directory_that_is_gone_is_an_io_failure)
{
    char path[] = "/tmp/gradq-journal-XXXXXX";
    gq_disk *disk;
    const gq_journal_end none = {0};
    cr_assert_not_null (mkdtemp (path));
    cr_assert_eq (gq_disk_open (&disk, path, &failure), GQ_OK, "%s", failure.text);
    cr_assert_eq (gq_journal_start (&journal, disk, run_id, &none, SEGMENT_BYTES, &failure), GQ_OK);
    cr_assert_eq (remove (path), 0);
    cr_assert_eq (append_next (&journal), GQ_IO);
    disk->ops->close (&disk);
}
