/*
 * Recovery: from any checkpoint the journal leads to the state that was there when the process
 * died, over changes of rule and settings; and what cannot be recovered is refused with the reason.
 */
#include "run_testing.h"

TestSuite (recover, .timeout = 240);

enum { PER_LIFE = 20, LIVES = 4, EVENTS = PER_LIFE * LIVES, NEVER = EVENTS };

/* Each life begins where the last one was killed: other settings, another rule and back. */
static const char *const lives[LIVES][12] = {
    {"--optimizer", "adam", "--aggregate", "3", "--staleness-policy", "damp", "--set", "lr=0.01",
     "--set", "schedule=linear", "--set", "schedule_steps=30"},
    {"--optimizer", "adam", "--aggregate", "2", "--aggregate-weights", "samples", "--max-staleness",
     "4", "--set", "lr=0.1234567890123456"},
    {"--optimizer", "sgd", "--set", "momentum=0.9", "--set", "clip_norm=0.3"},
    {"--optimizer", "adam", "--aggregate", "5", "--max-staleness", "3", "--set", "lr=0.03", "--set",
     "schedule=linear", "--set", "schedule_steps=30"}};

static uint64_t digests[2000]; /* [lsn] */

/* The same four lives every time; a checkpoint after event `at`.  Answers the last state. */
static uint64_t
live (uint64_t seed, unsigned at)
{
    driver actors;
    uint64_t digest = 0;
    driver_begin (&actors, seed);
    for (unsigned i = 0; i < EVENTS; i++) {
        const char *words[WORDS_MAX] = {"--checkpoints-kept", "1000", "--journal", "keep"};
        if (i % PER_LIFE == 0) {
            memcpy (words + 4, lives[i / PER_LIFE], sizeof lives[0]);
            if (i == 0)
                begin_run (words);
            else
                open_run (words);
        }
        driver_step (&actors);
        digests[run.journal.lsn] = digest = digest_of (&core);
        if (i == at)
            write_checkpoint ();
        if (i % PER_LIFE == PER_LIFE - 1)
            die ();
    }
    return digest;
}

Test (recover, from_a_checkpoint_at_any_record_the_journal_leads_to_the_last_state)
{
    const uint64_t seed = 7;
    directory_begin ();
    const uint64_t expected = live (seed, NEVER);
    expect_recovers_to (UINT64_MAX, expected);
    cr_assert_eq (expect_recovers_to (UINT64_MAX, expected), 0, "recovering changed nothing");
    directory_end ();
    for (unsigned at = 0; at < EVENTS; at++) {
        directory_begin ();
        cr_assert_eq (live (seed, at), expected, "the schedule is the same");
        expect_recovers_to (UINT64_MAX, expected);
        directory_end ();
    }
}

Test (recover, a_run_goes_on_from_where_it_was_killed)
{
    directory_begin ();
    const uint64_t expected = live (8, 50);
    open_run (SETS ("--optimizer", "adam", "--aggregate", "5", "--max-staleness", "3"));
    cr_assert_eq (digest_of (&core), expected);
    cr_assert_eq (core.start_version, core.version);
    cr_assert_eq (core.term, LIVES + 1);
    cr_assert_eq (core.ledger.actor_count, ACTORS);
    die ();
    directory_end ();
}

Test (recover, any_version_is_reached_and_none_beyond_it)
{
    enum { VERSIONS = 30 };
    static float weights[VERSIONS + 1][N];
    static view seen;
    uint64_t sequence = 0;
    directory_begin ();
    begin_run (SETS ("--optimizer", "adam", "--journal", "keep", "--checkpoints-kept", "10"));
    while (core.version < VERSIONS) {
        memcpy (weights[core.version], gq_buffers_current (core.buffers), sizeof weights[0]);
        sequence++;
        cr_assert_eq (take (of (1, sequence, (float)sequence)), GQ_OUTCOME_STEPPED);
        take (of (2, sequence, NAN)); /* records that make no version */
        if (core.version % 11 == 0)
            write_checkpoint ();
    }
    memcpy (weights[VERSIONS], gq_buffers_current (core.buffers), sizeof weights[0]);
    die ();
    for (uint64_t version = 0; version <= VERSIONS; version++)
        for (uint64_t from = 0; from <= version; from += 11) {
            cr_assert_eq (view_open (&seen, from, version), GQ_OK, "%s", seen.error.text);
            cr_assert_eq (seen.recovery.checkpoint_version, from);
            cr_assert_eq (seen.core.version, version);
            expect_same_vector (gq_buffers_current (seen.core.buffers), weights[version], N,
                                "a version");
            view_close (&seen);
        }
    directory_end ();
}

/* ---- little or nothing there ---- */

Test (recover, an_empty_directory_is_a_run_without_weights)
{
    static view seen;
    directory_begin ();
    open_run (SETS ("--journal", "off"));
    die ();
    cr_assert_eq (view_open (&seen, UINT64_MAX, UINT64_MAX), GQ_OK, "%s", seen.error.text);
    cr_assert_not (seen.core.has_weights);
    cr_assert_eq (seen.recovery.checkpoint_version, UINT64_MAX);
    cr_assert (seen.recovery.end.lsn == 0 && seen.recovery.replayed == 0);
    cr_assert_null (seen.recovery.rule);
    view_close (&seen);
    directory_end ();
}

Test (recover, epochs_granted_before_any_weights_are_not_forgotten)
{
    directory_begin ();
    open_run (NO_SETS);
    grant (3, EPOCH);
    die ();
    open_run (NO_SETS);
    cr_assert_eq (core.ledger.actors[3].epoch, EPOCH);
    cr_assert_not (core.has_weights);
    cr_assert_eq (core.term, 2);
    die ();
    directory_end ();
}

/* ---- damage ---- */

/* Two checkpoints, the second one's path in newest[], and some records behind it. */
static uint64_t
run_of_two_checkpoints (const char *journal, char newest[PATH_MAX])
{
    driver actors;
    directory_begin ();
    driver_begin (&actors, 9);
    begin_run (SETS ("--optimizer", "adam", "--aggregate", "2", "--journal", journal));
    driver_run (&actors, 30);
    write_checkpoint ();
    driver_run (&actors, 10);
    const uint64_t digest = digest_of (&core);
    die ();
    cr_assert_eq (count_files ("checkpoints", "checkpoint-", newest), 2);
    return digest;
}

static void
damage (const char *path)
{
    uint8_t *bytes;
    const size_t size = support_read (path, &bytes);
    bytes[size / 2] ^= 1;
    support_write (path, bytes, size);
    free (bytes);
}

Test (recover, without_the_newest_checkpoint_the_one_before_it_leads_to_the_same_state)
{
    static const char *const journals[] = {"keep", "recycle"};
    for (size_t i = 0; i < 2; i++) {
        char newest[PATH_MAX];
        const uint64_t expected = run_of_two_checkpoints (journals[i], newest);
        cr_assert_gt (expect_recovers_to (UINT64_MAX, expected), 0);
        damage (newest);
        cr_assert_eq (expect_recovers_to (UINT64_MAX, expected), 0);
        open_run (SETS ("--optimizer", "adam", "--aggregate", "2"));
        cr_assert_eq (digest_of (&core), expected);
        die ();
        directory_end ();
    }
}

Test (recover, without_any_sound_checkpoint_it_refuses)
{
    static view seen;
    char path[PATH_MAX];
    gq_error error = {""};
    run_of_two_checkpoints ("keep", path);
    damage (path);
    path_below (path, "checkpoints/checkpoint-000000000000.safetensors");
    damage (path);
    cr_assert_eq (view_open (&seen, UINT64_MAX, UINT64_MAX), GQ_MALFORMED);
    cr_assert_not_null (strstr (seen.error.text, "checkpoints"), "%s", seen.error.text);
    view_close (&seen);
    cr_assert_eq (try_open (NO_SETS, &error), GQ_MALFORMED);
    die ();
    unlink (path);
    directory_end ();
}

Test (recover, gradients_without_any_checkpoint_before_them_are_refused)
{
    static view seen;
    char path[PATH_MAX];
    run_of_two_checkpoints ("keep", path);
    unlink (path);
    path_below (path, "checkpoints/checkpoint-000000000000.safetensors");
    unlink (path);
    cr_assert_eq (view_open (&seen, UINT64_MAX, UINT64_MAX), GQ_MALFORMED);
    cr_assert_not_null (strstr (seen.error.text, "could not have been accepted"), "%s",
                        seen.error.text);
    view_close (&seen);
    directory_end ();
}

Test (recover, a_torn_tail_is_cut_wherever_it_was_torn_and_the_run_goes_on)
{
    enum { TAIL = 500 };
    char segment[PATH_MAX];
    uint8_t *bytes;
    driver actors;
    directory_begin ();
    driver_begin (&actors, 10);
    begin_run (SETS ("--optimizer", "adam", "--aggregate", "2"));
    for (int i = 0; i < 40; i++) {
        driver_step (&actors);
        digests[run.journal.lsn] = digest_of (&core);
    }
    const uint64_t last = run.journal.lsn;
    die ();
    cr_assert_eq (count_files ("journal", "segment-", segment), 1);
    const size_t size = support_read (segment, &bytes);
    for (size_t cut = 0; cut < TAIL; cut += 3) {
        static view seen;
        support_write (segment, bytes, size - cut);
        cr_assert_eq (view_open (&seen, UINT64_MAX, UINT64_MAX), GQ_OK, "%s", seen.error.text);
        const uint64_t lsn = seen.recovery.end.lsn;
        cr_assert (lsn <= last && (cut < 30 || lsn < last));
        cr_assert_eq (digest_of (&seen.core), digests[lsn], "%zu bytes missing", cut);
        view_close (&seen);
        open_run (SETS ("--optimizer", "adam", "--aggregate", "2"));
        cr_assert_eq (run.journal.lsn, lsn + 1, "its TERM stands where the torn record stood");
        gradient g = of (7, core.ledger.actors[7].received.cumulative + 1, NAN);
        g.epoch = core.ledger.actors[7].epoch;
        cr_assert_eq (take (g), GQ_OUTCOME_REFUSED);
        const uint64_t after = digest_of (&core);
        die ();
        expect_recovers_to (UINT64_MAX, after);
    }
    free (bytes);
    directory_end ();
}

Test (recover, damage_in_the_midst_of_the_journal_is_refused_with_its_place)
{
    static view seen;
    char path[PATH_MAX];
    run_of_two_checkpoints ("keep", path);
    count_files ("journal", "segment-", path);
    damage (path);
    cr_assert_eq (view_open (&seen, 0, UINT64_MAX), GQ_MALFORMED);
    cr_assert_not_null (strstr (seen.error.text, "offset"), "%s", seen.error.text);
    view_close (&seen);
    directory_end ();
}

/* ---- what else stands in the way ---- */

Test (recover, a_rule_that_is_gone_is_named)
{
    static view seen;
    char path[PATH_MAX];
    run_of_two_checkpoints ("keep", path);
    memset (&seen, 0, sizeof seen);
    path_below (path, "journal");
    char checkpoints[PATH_MAX];
    path_below (checkpoints, "checkpoints");
    cr_assert_eq (gq_disk_open (&seen.disk, path, NULL), GQ_OK);
    seen.recovery = (gq_recovery){.disk = seen.disk,
                                  .checkpoints = checkpoints,
                                  .plugins = "/nonexistent",
                                  .cpu = "auto",
                                  .checkpoint_max = UINT64_MAX,
                                  .version_max = UINT64_MAX,
                                  .lsn_max = UINT64_MAX};
    gq_core_init (&seen.core, &plain, NULL);
    cr_assert_eq (gq_recover (&seen.recovery, &seen.core, &seen.error), GQ_NOTFOUND);
    cr_assert_not_null (strstr (seen.error.text, "adam"), "%s", seen.error.text);
    view_close (&seen);
    directory_end ();
}

Test (recover, a_journal_of_another_run_is_refused)
{
    static view seen;
    char path[PATH_MAX];
    run_of_two_checkpoints ("keep", path);
    path_below (path, "identity.json");
    const char *other = "{\"run\": \"00112233445566778899aabbccddeeff\", \"term\": 1, "
                        "\"epochs_reserved\": 1}";
    support_write (path, other, strlen (other));
    cr_assert_eq (view_open (&seen, UINT64_MAX, UINT64_MAX), GQ_RUN);
    view_close (&seen);
    directory_end ();
}

Test (recover, a_life_without_a_journal_cannot_be_replayed_but_its_checkpoint_counts)
{
    static view seen;
    directory_begin ();
    begin_run (SETS ("--optimizer", "adam", "--checkpoints-kept", "9"));
    cr_assert_eq (take (of (1, 1, 1)), GQ_OUTCOME_STEPPED);
    die ();
    open_run (SETS ("--optimizer", "adam", "--journal", "off", "--checkpoints-kept", "9"));
    cr_assert_eq (core.version, 1);
    cr_assert_eq (take (of (1, 2, 1)), GQ_OUTCOME_STEPPED);
    write_checkpoint ();
    cr_assert_eq (take (of (1, 3, 1)), GQ_OUTCOME_STEPPED); /* lost, as --journal off says */
    die ();
    open_run (SETS ("--optimizer", "adam", "--checkpoints-kept", "9"));
    cr_assert_eq (core.version, 2);
    cr_assert_eq (take (of (1, 3, 1)), GQ_OUTCOME_STEPPED);
    const uint64_t expected = digest_of (&core);
    die ();
    cr_assert_eq (expect_recovers_to (UINT64_MAX, expected), 2);
    cr_assert_eq (view_open (&seen, 0, UINT64_MAX), GQ_MALFORMED);
    cr_assert_not_null (strstr (seen.error.text, "--journal off"), "%s", seen.error.text);
    view_close (&seen);
    directory_end ();
}
