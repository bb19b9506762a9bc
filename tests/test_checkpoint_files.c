/*
 * Checkpoints: which files of a directory count, which are kept, and what else than weights and
 * slots a file carries: ledger, the step being aggregated, the place in the journal.
 */
#include "checkpoint_testing.h"

#include "core_compare.h"

TestSuite (checkpoint_files, .timeout = 60);

/* ---- what else it carries ---- */

/* A writer in the midst of everything: holes, refusals, a step half made. */
static void
writer_in_the_midst (gq_journal *journal)
{
    static const float sums[N] = {1e-40f, -0.0f, 3.25f, 1e30f, -7, 0.1f, 1.0f / 3};
    gq_core *core = &writer.core;
    const uint8_t nonce[GQ_NONCE_BYTES] = "of an actor";
    const gq_core_config config = {
        .aggregate = 4, .weigh_samples = true, .max_staleness = 7, .damp = true};
    writer_begin ("adam", 2);
    cr_assert_eq (gq_core_switch (core, &config, writer.rule), GQ_OK);
    gq_ledger_grant (&core->ledger, 4, 17, nonce);
    for (uint64_t sequence = 1; sequence <= 9; sequence += 2) {
        gq_ledger_enter (&core->ledger, 4, sequence);
        gq_ledger_settle (&core->ledger, 4);
    }
    gq_ledger_enter (&core->ledger, 4, 2);
    gq_ledger_hold (&core->ledger, 4);
    gq_ledger_enter (&core->ledger, 4, 4);
    gq_ledger_refuse (&core->ledger, 4, 4, GQ_STALE);
    memcpy (core->sum, sums, sizeof sums);
    core->held = 1;
    core->held_weight = 1.0 / 3;
    core->staleness_sum = 0.1;
    core->staleness_count = 12345678901;
    *journal = (gq_journal){.lsn = UINT64_C (1) << 40, .chain = 0xfedcba98};
    core->journal = journal;
}

Test (checkpoint_files, ledger_held_step_and_place_in_the_journal_come_back)
{
    gq_journal journal;
    gq_checkpoint_place place = {0};
    gq_error error = {""};
    writer_in_the_midst (&journal);
    write_kept (KEPT, NULL);
    cr_assert_eq (resume_until ("adam", UINT64_MAX, &place, &error), GQ_OK, "%s", error.text);
    cr_assert_eq (place.lsn, journal.lsn);
    cr_assert_eq (place.chain, journal.chain);
    expect_same_core (&reader.core, &writer.core);
    cr_assert_eq (reader.core.held, 1, "or the claim would be empty");
    machine_end (&reader);
    finish ();
}

/* A writer whose adam has retired in favour of sgd; where its checkpoint is. */
static void
writer_after_a_swap (char path[PATH_MAX])
{
    writer_begin ("adam", 5);
    gq_rule *next = load ("sgd", "auto", SETS ("momentum=0.5"));
    cr_assert_eq (gq_core_switch (&writer.core, &plain, next), GQ_OK);
    gq_rule_free (&writer.rule);
    writer.rule = next;
    machine_step (&writer);
    write_kept (KEPT, path);
}

Test (checkpoint_files, the_state_of_the_retired_rule_comes_back_and_so_does_the_rule)
{
    char path[PATH_MAX];
    gq_error error = {""};
    writer_after_a_swap (path);
    cr_assert_eq (resume ("sgd", &error), GQ_OK, "%s", error.text);
    expect_same_core (&reader.core, &writer.core);
    cr_assert_str_eq (reader.core.retired.name, "adam");
    cr_assert_eq (reader.core.retired.steps, 5);
    cr_assert_eq (reader.core.retired.version, 5);
    /* The writer's own is the witness: it never went through a file. */
    machine *both[] = {&writer, &reader};
    for (size_t i = 0; i < 2; i++) {
        gq_rule *again = load ("adam", "auto", NO_SETS);
        cr_assert_eq (gq_core_switch (&both[i]->core, &plain, again), GQ_OK);
        gq_rule_free (&both[i]->rule);
        both[i]->rule = again;
        machine_step (both[i]);
        cr_assert_eq (gq_rule_steps (again), 6);
    }
    expect_same_core (&reader.core, &writer.core);
    machine_end (&reader);
    finish ();
}

Test (checkpoint_files, tensors_of_a_retired_rule_are_named_by_rule_slot_and_parameter)
{
    static const char *const tensors[] = {
        "retired.adam.exp_avg.pi.weight", "retired.adam.exp_avg.pi.bias",
        "retired.adam.exp_avg_sq.pi.weight", "retired.adam.exp_avg_sq.pi.bias",
        "momentum_buffer.pi.weight"};
    char path[PATH_MAX];
    gq_safetensors *file;
    writer_after_a_swap (path);
    cr_assert_eq (gq_safetensors_read (&file, path, NULL), GQ_OK);
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        cr_assert_not_null (gq_safetensors_find (file, tensors[i]), "%s", tensors[i]);
    cr_assert_eq (gq_safetensors_count (file), 8);
    cr_assert_not_null (gq_safetensors_meta (file, "retired"));
    gq_safetensors_free (&file);
    finish ();
}

Test (checkpoint_files, a_retired_rule_that_no_writer_leaves_is_refused)
{
#define SLOTS   "\"slots\": [\"exp_avg\", \"exp_avg_sq\"]"
#define SCALARS "\"scalars\": [[\"beta1_power\", \"0.5\"], [\"beta2_power\", \"0.5\"]]"
#define HEAD    "{\"optimizer\": \"adam\", \"version\": 5, \"optimizer_steps\": 5, "
    static const char *const bad[] = {
        "",
        "[]",
        "{}",
        HEAD SLOTS "}",
        HEAD SCALARS "}",
        HEAD "\"slots\": [\"exp_avg\", \"exp_avg\"], " SCALARS "}",
        HEAD "\"slots\": [\"exp_avg\", 1], " SCALARS "}",
        HEAD "\"slots\": [\"a\"], " SCALARS "}",   /* the file has no such tensor */
        HEAD "\"slots\": [\"a.b\"], " SCALARS "}", /* no word */
        HEAD "\"slots\": [1, 2, 3, 4, 5, 6, 7, 8, 9], " SCALARS "}",
        HEAD SLOTS ", \"scalars\": [[\"beta1_power\", \"half\"]]}",
        HEAD SLOTS ", \"scalars\": [[\"beta1_power\", 0.5]]}",
        HEAD SLOTS ", \"scalars\": [\"beta1_power\"]}",
        "{\"optimizer\": \"\", \"version\": 5, \"optimizer_steps\": 5, " SLOTS ", " SCALARS "}",
        "{\"optimizer\": \"adam\", \"version\": -5, \"optimizer_steps\": 5, " SLOTS ", " SCALARS
        "}",
        "{\"optimizer\": \"adam\", \"version\": 5, " SLOTS ", " SCALARS "}",
    };
    char path[PATH_MAX];
    gq_error error = {""};
    writer_after_a_swap (path);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        rewrite (path, "retired", bad[i], NULL);
        cr_assert_neq (resume ("sgd", &error), GQ_OK, "%s", bad[i]);
        cr_assert_str_not_empty (error.text);
        cr_assert_str_empty (reader.core.retired.name);
        machine_end (&reader);
    }
    rewrite (path, "retired", HEAD SLOTS ", " SCALARS "}", NULL);
    cr_assert_eq (resume ("sgd", &error), GQ_OK, "or all were refused for another reason: %s",
                  error.text);
    machine_end (&reader);
    finish ();
}

Test (checkpoint_files, without_a_journal_the_place_is_its_beginning)
{
    gq_checkpoint_place place = {.lsn = 7, .chain = 7};
    gq_error error = {""};
    writer_begin ("sgd", 1);
    write_kept (KEPT, NULL);
    cr_assert_eq (resume_until ("sgd", UINT64_MAX, &place, &error), GQ_OK, "%s", error.text);
    cr_assert (place.lsn == 0 && place.chain == 0);
    machine_end (&reader);
    finish ();
}

Test (checkpoint_files, a_held_step_that_the_settings_do_not_allow_is_refused)
{
    gq_journal journal;
    gq_error error = {""};
    writer_in_the_midst (&journal);
    write_kept (KEPT, NULL);
    writer.core.config.aggregate = 1; /* what the reader is prepared with */
    cr_assert_eq (resume ("adam", &error), GQ_MALFORMED);
    cr_assert_not_null (strstr (error.text, "settings"), "%s", error.text);
    machine_end (&reader);
    finish ();
}

/* Answers with a status, and notes the life that it was given. */
typedef struct asked {
    gq_status answer;
    char life[64];
    unsigned times;
} asked;

static gq_status
prepare_not (void *context, gq_core *core, const char *life, gq_error *error)
{
    asked *self = context;
    (void)core;
    snprintf (self->life, sizeof self->life, "%s", life);
    self->times++;
    return gq_fail (error, self->answer, "says the test");
}

Test (checkpoint_files, the_life_is_handed_over_and_what_prepare_refuses_ends_the_loading)
{
    gq_checkpoint_place place;
    gq_error error = {""};
    asked seen = {.answer = GQ_ABI};
    writer_begin ("sgd", 1);
    writer.core.life = "{\"term\": 4}";
    write_kept (KEPT, NULL);
    machine_step (&writer);
    write_kept (KEPT, NULL);
    gq_core_init (&reader.core, &plain, NULL);
    cr_assert_eq (gq_checkpoint_load (&reader.core, directory, UINT64_MAX, prepare_not, &seen,
                                      &place, &error),
                  GQ_ABI);
    cr_assert_str_eq (seen.life, writer.core.life);
    cr_assert_str_eq (error.text, "says the test");
    cr_assert_eq (seen.times, 1, "an older one would say the same");
    cr_assert_null (reader.core.buffers);
    finish ();
}

Test (checkpoint_files, the_newest_up_to_a_version_is_loaded)
{
    gq_checkpoint_place place;
    writer_begin ("sgd", 0);
    for (uint64_t version = 0; version <= 9; version++) {
        if (version % 3 == 0)
            write_kept (10, NULL);
        machine_step (&writer);
    }
    for (uint64_t most = 0; most <= 12; most++) {
        gq_error error = {""};
        cr_assert_eq (resume_until ("sgd", most, &place, &error), GQ_OK, "%s", error.text);
        cr_assert_eq (reader.core.version, most > 9 ? 9 : most / 3 * 3);
        machine_end (&reader);
    }
    finish ();
}

/* ---- which files ---- */

Test (checkpoint_files, a_directory_without_checkpoints_is_told_apart)
{
    static const char *const others[] = {
        "checkpoint-.safetensors", "checkpoint-1x.safetensors", "checkpoint-1.safetensors.tmp",
        "checkpoint-99999999999999999999.safetensors", "net.safetensors"};
    gq_error error = {""};
    writer_begin ("sgd", 0);
    cr_assert_not (gq_checkpoint_any (directory));
    cr_assert_not (gq_checkpoint_any ("/nonexistent"));
    cr_assert_eq (resume ("sgd", &error), GQ_NOTFOUND);
    machine_end (&reader);
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        char path[PATH_MAX];
        snprintf (path, sizeof path, "%s/%s", directory, others[i]);
        support_write (path, "", 0);
        cr_assert_not (gq_checkpoint_any (directory), "%s", others[i]);
    }
    write_kept (KEPT, NULL);
    cr_assert (gq_checkpoint_any (directory));
    finish ();
}

Test (checkpoint_files, only_the_newest_are_kept_as_many_as_asked)
{
    for (uint64_t kept = 1; kept <= 4; kept++) {
        char path[PATH_MAX];
        writer_begin ("sgd", 0);
        for (uint64_t version = 0; version < 6; version++) {
            write_kept (kept, path);
            machine_step (&writer);
        }
        for (uint64_t version = 0; version < 6; version++) {
            snprintf (path, sizeof path, "%s/checkpoint-%012llu.safetensors", directory,
                      (unsigned long long)version);
            cr_assert_eq (access (path, F_OK) == 0, version >= 6 - kept, "version %llu, kept %llu",
                          (unsigned long long)version, (unsigned long long)kept);
        }
        finish ();
    }
}

Test (checkpoint_files, versions_are_ordered_as_numbers)
{
    /* One more digit than names are padded to. */
    const uint64_t most = UINT64_C (999999999999);
    gq_error error = {""};
    writer_begin ("sgd", 0);
    for (uint64_t version = most - 1; version <= most + 1; version++) {
        writer.core.version = version;
        write_kept (KEPT, NULL);
    }
    cr_assert_eq (resume ("sgd", &error), GQ_OK);
    cr_assert_eq (reader.core.version, most + 1);
    machine_end (&reader);
    finish ();
}

Test (checkpoint_files, weights_that_are_not_finite_are_not_written_and_the_old_ones_stay)
{
    const float weights[N] = {0, NAN};
    char path[PATH_MAX];
    gq_error error = {""};
    writer_begin ("adam", 2);
    write_kept (1, path);
    gq_core_set_weights (&writer.core, weights, 3, 6);
    cr_assert_eq (gq_checkpoint_write (&writer.core, directory, 1, NULL, &error), GQ_NONFINITE);
    cr_assert_not_null (strstr (error.text, "version 3"), "%s", error.text);
    cr_assert_eq (access (path, F_OK), 0);
    cr_assert_eq (resume ("adam", &error), GQ_OK, "%s", error.text);
    cr_assert_eq (reader.core.version, 2);
    machine_end (&reader);
    finish ();
}

Test (checkpoint_files, a_write_that_fails_says_so_and_leaves_the_old_one)
{
    char path[PATH_MAX], below[PATH_MAX];
    gq_error error = {""};
    writer_begin ("sgd", 0);
    write_kept (KEPT, path);
    snprintf (below, sizeof below, "%s/no/such", directory);
    cr_assert_eq (gq_checkpoint_write (&writer.core, below, KEPT, NULL, &error), GQ_IO);
    cr_assert_not_null (strstr (error.text, below), "%s", error.text);
    cr_assert_eq (gq_checkpoint_write (&writer.core, path, KEPT, NULL, &error), GQ_IO,
                  "a file is no directory");
    cr_assert_eq (resume ("sgd", &error), GQ_OK);
    machine_end (&reader);
    finish ();
}
