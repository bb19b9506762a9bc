/*
 * Run directory: one optimizer at a time, terms that rise, and nothing forgotten that a kept
 * checkpoint still needs.
 */
#include "run_testing.h"

#include "memory_disk.h"
#include "safetensors.h"

TestSuite (run, .timeout = 120);

/* ---- opening ---- */

Test (run, a_second_optimizer_in_the_directory_is_refused_and_harms_nothing)
{
    static gq_run second;
    static gq_core other;
    gq_error error = {""};
    directory_begin ();
    begin_run (NO_SETS);
    const uint32_t term = core.term;
    const uint64_t lsn = run.journal.lsn;
    gq_options *words = options_of (SETS ("--run", directory, "--resume"));
    cr_assert_eq (gq_run_open (&second, &other, words, &error), GQ_REFUSED);
    cr_assert_not_null (strstr (error.text, "another optimizer"), "%s", error.text);
    cr_assert_not_null (strstr (error.text, directory), "%s", error.text);
    gq_core_clear (&other);
    gq_run_close (&second);
    cr_assert_eq (take (of (1, 1, 1)), GQ_OUTCOME_STEPPED);
    cr_assert_eq (run.journal.lsn, lsn + 1);
    die ();
    cr_assert_eq (gq_run_open (&second, &other, words, &error), GQ_OK, "%s", error.text);
    cr_assert_eq (other.term, term + 1, "the refused one did not count");
    cr_assert_eq (other.version, 1);
    gq_core_clear (&other);
    gq_run_close (&second);
    gq_options_free (&words);
    directory_end ();
}

static gq_status
count_terms (void *context, const gq_record *record, gq_error *error)
{
    uint32_t *next = context;
    (void)error;
    if (record->kind != GQ_RECORD_TERM)
        return GQ_OK;
    json_t *json = json_loadb ((const char *)record->payload, record->payload_bytes, 0, NULL);
    cr_assert_eq (json_integer_value (json_object_get (json, "term")), *next);
    json_decref (json);
    ++*next;
    return GQ_OK;
}

Test (run, every_life_has_a_higher_term_and_is_in_the_journal_with_it)
{
    gq_journal_end last;
    gq_error error = {""};
    gq_disk *disk;
    char path[PATH_MAX];
    uint8_t id[GQ_RUN_ID_BYTES];
    uint32_t terms = 1;
    directory_begin ();
    for (uint32_t term = 1; term <= 5; term++) {
        open_run (NO_SETS);
        cr_assert_eq (core.term, term);
        memcpy (id, core.run, sizeof id);
        die ();
    }
    path_below (path, "journal");
    cr_assert_eq (gq_disk_open (&disk, path, &error), GQ_OK);
    cr_assert_eq (gq_journal_read (disk, id, 0, 0, count_terms, &terms, &last, &error), GQ_OK, "%s",
                  error.text);
    cr_assert_eq (terms, 6);
    disk->ops->close (&disk);
    directory_end ();
}

Test (run, checkpoints_that_nobody_asked_to_resume_are_not_trained_over)
{
    gq_error error = {""};
    directory_begin ();
    begin_run (NO_SETS);
    take (of (1, 1, 1));
    const uint64_t expected = digest_of (&core);
    die ();
    options = options_of (SETS ("--run", directory));
    cr_assert_eq (gq_run_open (&run, &core, options, &error), GQ_INVALID);
    cr_assert_not_null (strstr (error.text, "--resume"), "%s", error.text);
    die ();
    expect_recovers_to (UINT64_MAX, expected);
    directory_end ();
}

Test (run, a_configuration_that_cannot_be_is_refused_with_a_sentence)
{
    static const struct {
        const char *words[6];
        gq_status status;
        const char *word;
    } bad[] = {{{"--optimizer", "nosuchrule"}, GQ_NOTFOUND, "nosuchrule"},
               {{"--set", "lr=fast"}, GQ_INVALID, "lr"},
               {{"--set", "nosuchkey=1"}, GQ_INVALID, "nosuchkey"},
               {{"--init", "/nonexistent.safetensors"}, GQ_NOTFOUND, "/nonexistent.safetensors"}};
    gq_error error = {""};
    directory_begin ();
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        cr_assert_eq (try_open (bad[i].words, &error), bad[i].status, "%s", error.text);
        cr_assert_not_null (strstr (error.text, bad[i].word), "%s", error.text);
        die ();
    }
    options = options_of (NO_SETS);
    cr_assert_eq (gq_run_open (&run, &core, options, &error), GQ_INVALID);
    cr_assert_not_null (strstr (error.text, "--run"), "%s", error.text);
    die ();
    directory_end ();
}

Test (run, a_rule_whose_slots_clash_with_names_is_refused_before_it_is_in_force)
{
    const gq_tensor_shape clash[] = {{.name = "x", .rank = 1, .shape = {3}},
                                     {.name = "exp_avg.x", .rank = 1, .shape = {4}}};
    const float zero[N] = {0};
    gq_layout layout;
    gq_error error = {""};
    directory_begin ();
    open_run (SETS ("--optimizer", "sgd"));
    cr_assert_eq (gq_layout_init (&layout, clash, 2, NULL), GQ_OK);
    cr_assert_eq (gq_core_set_layout (&core, &layout), GQ_OK);
    gq_core_set_weights (&core, zero, 0, 0);
    write_checkpoint ();
    die ();
    cr_assert_eq (try_open (SETS ("--optimizer", "adam"), &error), GQ_INVALID);
    cr_assert_not_null (strstr (error.text, "exp_avg.x"), "%s", error.text);
    die ();
    open_run (SETS ("--optimizer", "sgd"));
    write_checkpoint ();
    die ();
    directory_end ();
}

Test (run, first_weights_from_a_file_count_only_while_there_are_none)
{
    const float first[] = {1, 2, 3}, second[] = {7, 8, 9};
    gq_tensor tensor = {.name = "w",
                        .dtype = GQ_DTYPE_F32,
                        .rank = 1,
                        .shape = {3},
                        .element_count = 3,
                        .data = first,
                        .bytes = sizeof first};
    char path[PATH_MAX];
    gq_error error = {""};
    directory_begin ();
    path_below (path, "init.safetensors");
    cr_assert_eq (gq_safetensors_write (path, &tensor, 1, NULL, 0, &error), GQ_OK);
    open_run (SETS ("--init", path));
    cr_assert (core.has_weights && core.version == 0);
    cr_assert_arr_eq (gq_buffers_current (core.buffers), first, sizeof first);
    write_checkpoint ();
    die ();
    tensor.data = second;
    cr_assert_eq (gq_safetensors_write (path, &tensor, 1, NULL, 0, &error), GQ_OK);
    open_run (SETS ("--init", path));
    cr_assert_arr_eq (gq_buffers_current (core.buffers), first, sizeof first);
    die ();
    directory_end ();
}

/* ---- another rule ---- */

Test (run, another_rule_asks_for_a_checkpoint_at_once_and_the_same_rule_does_not)
{
    directory_begin ();
    begin_run (SETS ("--optimizer", "adam"));
    take (of (1, 1, 1));
    write_checkpoint ();
    die ();
    open_run (SETS ("--optimizer", "adam", "--set", "lr=0.5"));
    cr_assert_eq (run.checkpoint_version, core.version, "other settings are no other rule");
    cr_assert_str_empty (core.retired.name);
    die ();
    open_run (SETS ("--optimizer", "sgd"));
    cr_assert_eq (run.checkpoint_version, UINT64_MAX);
    write_checkpoint ();
    const uint64_t expected = digest_of (&core);
    die ();
    expect_recovers_to (UINT64_MAX, expected);
    open_run (SETS ("--optimizer", "sgd"));
    cr_assert_eq (run.checkpoint_version, core.version);
    cr_assert_eq (digest_of (&core), expected);
    cr_assert_str_eq (core.retired.name, "adam");
    die ();
    directory_end ();
}

/* Deaths at every point of adam -> sgd -> adam: before the checkpoint that a swap asks for, and
 * after it, where it has taken the file of the rule before. */
Test (run, what_a_rule_remembers_survives_two_swaps_and_deaths_around_them)
{
    for (unsigned written = 0; written < 4; written++) {
        float slots[2][N];
        directory_begin ();
        begin_run (SETS ("--optimizer", "adam"));
        for (uint64_t sequence = 1; sequence <= 5; sequence++)
            take (of (1, sequence, 1.0f / (float)sequence));
        for (size_t i = 0; i < 2; i++)
            memcpy (slots[i], gq_rule_slot (core.rule, i), sizeof slots[i]);
        write_checkpoint ();
        die ();
        open_run (SETS ("--optimizer", "sgd", "--set", "momentum=0.9"));
        if (written & 1)
            write_checkpoint ();
        die ();
        open_run (SETS ("--optimizer", "sgd", "--set", "momentum=0.9"));
        for (uint64_t sequence = 6; sequence <= 8; sequence++)
            take (of (1, sequence, -0.1f));
        die ();
        open_run (SETS ("--optimizer", "adam"));
        if (written & 2)
            write_checkpoint ();
        const uint64_t expected = digest_of (&core);
        die ();
        expect_recovers_to (UINT64_MAX, expected);
        open_run (SETS ("--optimizer", "adam"));
        cr_assert_eq (digest_of (&core), expected);
        cr_assert_eq (gq_rule_steps (core.rule), 5);
        for (size_t i = 0; i < 2; i++)
            expect_same_vector (gq_rule_slot (core.rule, i), slots[i], N, "a slot of adam");
        cr_assert_str_eq (core.retired.name, "sgd");
        cr_assert_eq (core.retired.steps, 3);
        take (of (1, 9, 1));
        cr_assert_eq (gq_rule_steps (core.rule), 6);
        die ();
        directory_end ();
    }
}

/* ---- forgetting ---- */

/* Small segments, so that there is something to forget; the loop's steps fill several. */
enum { SMALL_SEGMENT = 2048, PER_ROUND = 30 };

static size_t
segments (void)
{
    return count_files ("journal", "segment-", NULL);
}

/* From each checkpoint that is there, the journal leads to the state of now. */
static void
expect_all_checkpoints_recover (void)
{
    const uint64_t digest = digest_of (&core);
    uint64_t from = UINT64_MAX, most = UINT64_MAX;
    size_t count = 0;
    do {
        from = expect_recovers_to (most, digest);
        most = from - 1;
        count++;
    } while (count < count_files ("checkpoints", "checkpoint-", NULL));
}

static void
forget_rounds (const char *journal, const char *kept, size_t rounds, size_t *most_segments)
{
    driver actors;
    driver_begin (&actors, 11);
    directory_begin ();
    const char *const words[] = {"--optimizer",        "adam", "--journal", journal,
                                 "--checkpoints-kept", kept,   NULL};
    begin_run (words);
    run.journal.segment_bytes = SMALL_SEGMENT;
    *most_segments = 0;
    for (size_t round = 0; round < rounds; round++) {
        driver_run (&actors, PER_ROUND);
        if (round % 5 == 3) { /* the process dies in between */
            die ();
            open_run (words);
            run.journal.segment_bytes = SMALL_SEGMENT;
            driver_run (&actors, 3);
        }
        write_checkpoint ();
        if (round % 3 == 1) { /* asked for again, of the same version, behind more records */
            for (uint64_t i = 0; i < 40; i++)
                grant (1, actors.epochs[1] += 1);
            actors.next[1] = 1;
            write_checkpoint ();
            write_checkpoint ();
        }
        driver_run (&actors, 3);
        expect_all_checkpoints_recover ();
        if (segments () > *most_segments)
            *most_segments = segments ();
    }
    die ();
}

Test (run, only_what_every_kept_checkpoint_covers_is_forgotten)
{
    static const char *const kept[] = {"1", "2", "4"};
    for (size_t i = 0; i < 3; i++) {
        size_t most;
        forget_rounds ("recycle", kept[i], 16, &most);
        /* Below what is written altogether: 16 rounds of at least 30 records of some 170 bytes. */
        cr_assert_lt (segments (), 20, "%zu segments", segments ());
        directory_end ();
    }
}

Test (run, a_journal_that_is_kept_forgets_nothing)
{
    size_t most;
    forget_rounds ("keep", "2", 8, &most);
    cr_assert_eq (segments (), most, "their number never fell");
    char path[PATH_MAX];
    path_below (path, "journal/segment-0000000000000001");
    cr_assert_eq (access (path, F_OK), 0);
    directory_end ();
}

Test (run, a_checkpoint_is_due_when_the_journal_has_grown_by_a_quarter_of_a_gibibyte)
{
    directory_begin ();
    begin_run (NO_SETS);
    cr_assert_not (gq_run_checkpoint_due (&run));
    run.journal.written += (256u << 20) + 1;
    cr_assert (gq_run_checkpoint_due (&run));
    write_checkpoint ();
    cr_assert_not (gq_run_checkpoint_due (&run));
    die ();
    directory_end ();
}

/* ---- syncing ---- */

/* Syncs of the disk, when a record is appended and 10 ms pass before each of ten askings. */
static uint64_t
syncs_of (gq_fsync policy)
{
    const gq_journal_end nothing = {0};
    const uint8_t id[GQ_RUN_ID_BYTES] = {1};
    const struct iovec part = {.iov_base = (void *)(uintptr_t) "word", .iov_len = 4};
    gq_memory_disk *memory = gq_memory_disk_new ();
    gq_disk *disk = &memory->base;
    run = (gq_run){.fsync = policy, .fsync_interval_ns = 25};
    cr_assert_eq (gq_journal_start (&run.journal, disk, id, &nothing, 4096, NULL), GQ_OK);
    for (uint64_t now = 10; now <= 100; now += 10) {
        cr_assert_eq (gq_journal_append (&run.journal, GQ_RECORD_TERM, &part, 1), GQ_OK);
        cr_assert_eq (gq_run_sync (&run, now), GQ_OK);
        cr_assert_eq (gq_run_sync (&run, now), GQ_OK, "nothing new");
        cr_assert (policy != GQ_FSYNC_ALWAYS || !run.journal.unsynced);
    }
    const uint64_t syncs = memory->syncs;
    disk->ops->close (&disk);
    return syncs;
}

Test (run, the_journal_is_synced_as_often_as_asked)
{
    cr_assert_eq (syncs_of (GQ_FSYNC_NEVER), 0);
    cr_assert_eq (syncs_of (GQ_FSYNC_INTERVAL), 4, "at 10, 40, 70 and 100: every 25 at most");
    cr_assert_eq (syncs_of (GQ_FSYNC_ALWAYS), 10);
}

Test (run, a_sync_that_fails_is_said_and_never_tried_again)
{
    const gq_journal_end nothing = {0};
    const uint8_t id[GQ_RUN_ID_BYTES] = {1};
    const struct iovec part = {.iov_base = (void *)(uintptr_t) "word", .iov_len = 4};
    gq_memory_disk *memory = gq_memory_disk_new ();
    gq_disk *disk = &memory->base;
    run = (gq_run){.fsync = GQ_FSYNC_ALWAYS};
    cr_assert_eq (gq_journal_start (&run.journal, disk, id, &nothing, 4096, NULL), GQ_OK);
    cr_assert_eq (gq_journal_append (&run.journal, GQ_RECORD_TERM, &part, 1), GQ_OK);
    memory->fail_at_call = memory->calls + 1;
    cr_assert_eq (gq_run_sync (&run, 1), GQ_IO);
    cr_assert_eq (gq_run_sync (&run, 2), GQ_IO);
    cr_assert_eq (gq_journal_append (&run.journal, GQ_RECORD_TERM, &part, 1), GQ_IO);
    cr_assert_eq (memory->after_fault, 0);
    disk->ops->close (&disk);
}
