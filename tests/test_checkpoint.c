/*
 * Checkpoints: what was written comes back bit for bit, what was damaged never does, and no sound
 * file is lost to a damaged one.
 */
#include "checkpoint_testing.h"

TestSuite (checkpoint, .timeout = 60);

/* ---- coming back ---- */

static void
expect_same_state (void)
{
    expect_same_weights ();
    cr_assert_eq (gq_rule_steps (reader.rule), gq_rule_steps (writer.rule));
    for (size_t i = 0; i < gq_rule_slot_count (writer.rule); i++)
        expect_same_bits (gq_rule_slot (writer.rule, i), gq_rule_slot (reader.rule, i),
                          gq_rule_plugin (writer.rule)->slots[i]);
    cr_assert_arr_eq (gq_rule_scalars (reader.rule), gq_rule_scalars (writer.rule),
                      gq_rule_scalar_count (writer.rule) * sizeof (double));
}

Test (checkpoint, a_resumed_run_has_every_bit_and_goes_on_with_the_same_bits)
{
    static const char *const rules[] = {"adam", "rmsprop", "sgd"};
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        gq_error error = {""};
        writer_begin (rules[i], 5);
        write_kept (KEPT, NULL);
        cr_assert_eq (resume (rules[i], &error), GQ_OK, "%s", error.text);
        cr_assert_eq (reader.core.version, 5);
        cr_assert_eq (reader.core.start_version, 5);
        cr_assert_eq (reader.core.applied, 10);
        cr_assert_eq (reader.core.layout.digest, writer.core.layout.digest);
        cr_assert (reader.core.has_weights);
        expect_same_state ();
        for (int step = 0; step < 3; step++) {
            machine_step (&writer);
            machine_step (&reader);
        }
        expect_same_state ();
        machine_end (&reader);
        finish ();
    }
}

Test (checkpoint, a_file_holds_parameters_slots_and_what_the_protocol_lists)
{
    static const char *const tensors[] = {"pi.weight",
                                          "pi.bias",
                                          "exp_avg.pi.weight",
                                          "exp_avg.pi.bias",
                                          "exp_avg_sq.pi.weight",
                                          "exp_avg_sq.pi.bias"};
    static const char *const keys[] = {
        "format",          "layout", "run",          "term", "data_xxh64",  "meta_xxh64",
        "set.beta1",       "lsn",    "chain",        "held", "held_weight", "staleness_sum",
        "staleness_count", "ledger", "set.clip_norm"};
    char path[PATH_MAX];
    gq_safetensors *file;
    writer_begin ("adam", 3);
    write_kept (KEPT, path);
    cr_assert_not_null (strstr (path, "/checkpoint-000000000003.safetensors"), "%s", path);
    cr_assert_eq (gq_safetensors_read (&file, path, NULL), GQ_OK);
    cr_assert_eq (gq_safetensors_count (file), sizeof tensors / sizeof tensors[0]);
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        cr_assert_not_null (gq_safetensors_find (file, tensors[i]), "%s", tensors[i]);
    cr_assert_eq (gq_safetensors_find (file, "exp_avg.pi.weight")->rank, 2);
    cr_assert_str_eq (gq_safetensors_meta (file, "optimizer"), "adam");
    cr_assert_str_eq (gq_safetensors_meta (file, "version"), "3");
    cr_assert_str_eq (gq_safetensors_meta (file, "applied"), "6");
    cr_assert_str_eq (gq_safetensors_meta (file, "optimizer_steps"), "3");
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        cr_assert_not_null (gq_safetensors_meta (file, keys[i]), "%s", keys[i]);
    gq_safetensors_free (&file);
    finish ();
}

Test (checkpoint, a_rule_with_other_slots_than_the_file_holds_is_refused)
{
    static const char *const others[] = {"rmsprop", "sgd", "adamw"};
    writer_begin ("adam", 4);
    write_kept (KEPT, NULL);
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        gq_error error = {""};
        cr_assert_eq (resume (others[i], &error), GQ_MALFORMED, "%s", others[i]);
        cr_assert_not_null (strstr (error.text, others[i]), "%s", error.text);
        machine_end (&reader);
    }
    finish ();
}

Test (checkpoint, a_rule_whose_slots_clash_with_names_is_refused)
{
    const gq_tensor_shape clash[] = {{.name = "x", .rank = 1, .shape = {3}},
                                     {.name = "exp_avg.x", .rank = 1, .shape = {4}}};
    const float weights[N] = {0};
    gq_error error = {""};
    writer_begin ("sgd", 0);
    machine_end (&writer);
    machine_begin (&writer, "sgd");
    machine_set_layout (&writer, clash, 2);
    gq_core_set_weights (&writer.core, weights, 0, 0);
    write_kept (KEPT, NULL);
    cr_assert_eq (resume ("sgd", &error), GQ_OK, "sgd has no such slot: %s", error.text);
    machine_end (&reader);
    cr_assert_neq (resume ("adam", &error), GQ_OK);
    cr_assert_not (reader.core.has_weights);
    machine_end (&reader);
    finish ();
}

/* ---- damage ---- */

/* Two checkpoints, versions 2 and 3; the newer one's bytes in *bytes_p. */
static size_t
write_two (char path[PATH_MAX], uint8_t **bytes_p)
{
    writer_begin ("adam", 2);
    write_kept (KEPT, NULL);
    machine_step (&writer);
    write_kept (KEPT, path);
    return support_read (path, bytes_p);
}

static void
expect_older (const char *what, size_t at)
{
    gq_error error = {""};
    cr_assert_eq (resume ("adam", &error), GQ_OK, "%s at %zu: %s", what, at, error.text);
    cr_assert_eq (reader.core.version, 2, "%s at %zu went unnoticed", what, at);
    cr_assert_eq (gq_rule_steps (reader.rule), 2);
    machine_end (&reader);
}

Test (checkpoint, any_changed_byte_of_the_newest_makes_the_one_before_it_count)
{
    /* Low and high bit: digits stay digits, letters letters, and UTF-8 ends being it. */
    static const uint8_t flips[] = {0x01, 0x02, 0x80};
    char path[PATH_MAX];
    uint8_t *bytes;
    const size_t size = write_two (path, &bytes);
    for (size_t at = 0; at < size; at++)
        for (size_t i = 0; i < sizeof flips; i++) {
            bytes[at] ^= flips[i];
            support_write (path, bytes, size);
            expect_older ("a changed byte", at);
            bytes[at] ^= flips[i];
        }
    support_write (path, bytes, size);
    gq_error error;
    cr_assert_eq (resume ("adam", &error), GQ_OK);
    cr_assert_eq (reader.core.version, 3, "the undamaged one");
    machine_end (&reader);
    free (bytes);
    finish ();
}

Test (checkpoint, any_truncation_of_the_newest_makes_the_one_before_it_count)
{
    char path[PATH_MAX];
    uint8_t *bytes;
    const size_t size = write_two (path, &bytes);
    for (size_t length = 0; length < size; length++) {
        support_write (path, bytes, length);
        expect_older ("a truncation", length);
    }
    support_write (path, bytes, size);
    bytes[size] = 0;
    support_write (path, bytes, size + 1);
    expect_older ("a byte too many", size);
    free (bytes);
    finish ();
}

static void
change_weight (const char *path, float value)
{
    rewrite (path, NULL, NULL, &value);
}

/* Sound bytes that say something wrong were written so: an older file would be no better. */
Test (checkpoint, weights_that_are_not_finite_are_not_resumed_from)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    char path[PATH_MAX];
    uint8_t *bytes;
    gq_error error = {""};
    write_two (path, &bytes);
    free (bytes);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        change_weight (path, bad[i]);
        cr_assert_eq (resume ("adam", &error), GQ_INVALID);
        cr_assert_not_null (strstr (error.text, "NaN"), "%s", error.text);
        cr_assert_not (reader.core.has_weights);
        machine_end (&reader);
    }
    change_weight (path, 0.5f);
    cr_assert_eq (resume ("adam", &error), GQ_OK, "%s", error.text);
    cr_assert_eq (reader.core.version, 3, "it was the values, not the writing again");
    cr_assert_eq (gq_buffers_current (reader.core.buffers)[0], 0.5f);
    machine_end (&reader);
    finish ();
}

Test (checkpoint, when_all_are_damaged_resuming_fails_and_changes_nothing)
{
    char path[PATH_MAX];
    gq_error error = {""};
    writer_begin ("adam", 1);
    for (int i = 0; i < KEPT; i++) {
        write_kept (KEPT, path);
        support_write (path, "damaged", 7);
        machine_step (&writer);
    }
    cr_assert_eq (resume ("adam", &error), GQ_MALFORMED);
    cr_assert_not_null (strstr (error.text, directory), "%s", error.text);
    cr_assert_eq (reader.core.layout.tensor_count, 0);
    cr_assert_null (reader.core.buffers);
    cr_assert_not (reader.core.has_weights);
    machine_end (&reader);
    finish ();
}

Test (checkpoint, a_damaged_newer_one_does_not_push_out_the_one_just_written)
{
    char path[PATH_MAX];
    uint8_t *bytes;
    gq_error error = {""};
    const size_t size = write_two (path, &bytes);
    bytes[size - 1] ^= 1;
    support_write (path, bytes, size);
    free (bytes);
    cr_assert_eq (resume ("adam", &error), GQ_OK);
    /* What a restart does first: write where it is, here with fewer to keep. */
    cr_assert_eq (gq_checkpoint_write (&reader.core, directory, 1, path, &error), GQ_OK, "%s",
                  error.text);
    cr_assert_eq (access (path, F_OK), 0);
    machine_end (&reader);
    expect_older ("damage", size - 1);
    finish ();
}
