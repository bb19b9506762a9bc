/*
 * Checkpoints: what was written comes back bit for bit, what was damaged never does, and no sound
 * file is lost to a damaged one.
 */
#include "rule_testing.h"
#include "support.h"

#include <limits.h>

#include "log.h"
#include "optimizer/checkpoint.h"
#include "safetensors.h"

TestSuite (checkpoint, .timeout = 60);

enum { N = 7, KEPT = 3 };

static const gq_tensor_shape shapes[] = {{.name = "pi.weight", .rank = 2, .shape = {2, 3}},
                                         {.name = "pi.bias", .rank = 0}};
static const gq_core_config plain = {.aggregate = 1, .max_staleness = UINT64_MAX};
static char directory[64];

/* One optimizer: the rule and the state that it works on. */
typedef struct machine {
    gq_core core;
    gq_rule *rule;
} machine;
static machine writer, reader;

static void
machine_begin (machine *self, const char *rule)
{
    self->rule = load (rule, "auto", NO_SETS);
    gq_core_init (&self->core, &plain, self->rule);
}

static void
machine_end (machine *self)
{
    gq_core_clear (&self->core);
    gq_rule_free (&self->rule);
}

static void
machine_set_layout (machine *self, const gq_tensor_shape *tensors, size_t count)
{
    gq_layout layout;
    cr_assert_eq (gq_layout_init (&layout, tensors, count, NULL), GQ_OK);
    cr_assert_eq (gq_core_set_layout (&self->core, &layout), GQ_OK);
}

/* One step on a gradient that the version determines. */
static void
machine_step (machine *self)
{
    float gradient[N];
    uint64_t seed = self->core.version;
    for (size_t i = 0; i < N; i++)
        gradient[i] = ldexpf ((float)(int32_t)support_random (&seed), -31);
    gq_rule_step (self->rule, gq_buffers_current (self->core.buffers),
                  gq_buffers_next (self->core.buffers), gradient, 1);
    gq_buffers_turn (self->core.buffers);
    self->core.version++;
    self->core.applied += 2;
}

/* Weights that no decimal text would keep, and some steps on them. */
static void
writer_begin (const char *rule, uint64_t steps)
{
    const float weights[N] = {-0.0f, 1e-45f, 0.1f, -1e30f, 3.0f, FLT_MIN / 2, 1.0f / 3};
    gq_error error;
    /* Damage is logged, thousands of times here. */
    cr_assert_eq (gq_log_open ("test", "/dev/null", GQ_LOG_ERROR, &error), GQ_OK);
    support_directory (directory);
    machine_begin (&writer, rule);
    machine_set_layout (&writer, shapes, 2);
    gq_core_set_weights (&writer.core, weights, 0, 0);
    for (uint64_t i = 0; i < steps; i++)
        machine_step (&writer);
}

static void
finish (void)
{
    machine_end (&writer);
    support_remove (directory);
}

static void
write_kept (uint64_t kept, char *path)
{
    gq_error error = {""};
    cr_assert_eq (gq_checkpoint_write (&writer.core, directory, kept, path, &error), GQ_OK, "%s",
                  error.text);
}

static gq_status
resume (const char *rule, gq_error *error)
{
    machine_begin (&reader, rule);
    return gq_checkpoint_resume (&reader.core, directory, error);
}

static void
expect_same_bits (const float *a, const float *b, const char *what)
{
    cr_assert_eq (memcmp (a, b, N * sizeof *a), 0, "%s differs", what);
}

static void
expect_same_weights (void)
{
    expect_same_bits (gq_buffers_current (writer.core.buffers),
                      gq_buffers_current (reader.core.buffers), "weights");
}

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

/* ---- coming back ---- */

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
    static const char *const keys[] = {"format",     "layout",     "run",       "term",
                                       "data_xxh64", "meta_xxh64", "set.beta1", "set.clip_norm"};
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

Test (checkpoint, another_rule_takes_the_weights_and_starts_its_own_slots)
{
    const float zero[N] = {0};
    gq_error error = {""};
    writer_begin ("adam", 4);
    write_kept (KEPT, NULL);
    cr_assert_eq (resume ("rmsprop", &error), GQ_OK, "%s", error.text);
    expect_same_weights ();
    cr_assert_eq (reader.core.version, 4);
    cr_assert_eq (gq_rule_steps (reader.rule), 0);
    for (size_t i = 0; i < gq_rule_slot_count (reader.rule); i++)
        expect_same_bits (gq_rule_slot (reader.rule, i), zero, "a slot");
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

Test (checkpoint, weights_that_are_not_finite_are_not_resumed_from)
{
    char path[PATH_MAX];
    uint8_t *bytes;
    write_two (path, &bytes);
    free (bytes);
    float weights[N] = {0, NAN};
    gq_core_set_weights (&writer.core, weights, 4, 8);
    write_kept (KEPT, NULL);
    gq_error error = {""};
    cr_assert_eq (resume ("adam", &error), GQ_OK, "%s", error.text);
    cr_assert_eq (reader.core.version, 3);
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

/* ---- which files ---- */

Test (checkpoint, a_directory_without_checkpoints_is_told_apart)
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

Test (checkpoint, only_the_newest_are_kept_as_many_as_asked)
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

Test (checkpoint, versions_are_ordered_as_numbers)
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

Test (checkpoint, a_write_that_fails_says_so_and_leaves_the_old_one)
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

/* ---- first weights ---- */

static void
write_plain (char path[PATH_MAX], const gq_tensor *tensors, size_t count, const gq_meta *meta,
             size_t meta_count)
{
    gq_error error = {""};
    snprintf (path, PATH_MAX, "%s/plain.safetensors", directory);
    cr_assert_eq (gq_safetensors_write (path, tensors, count, meta, meta_count, &error), GQ_OK,
                  "%s", error.text);
}

static gq_tensor
tensor_of (const char *name, gq_dtype dtype, uint64_t elements, const void *data)
{
    return (gq_tensor){.name = name,
                       .dtype = dtype,
                       .rank = 1,
                       .shape = {elements},
                       .element_count = elements,
                       .data = data,
                       .bytes = elements * (dtype == GQ_DTYPE_F64 ? 8 : 4)};
}

static gq_status
init (const char *path, gq_error *error)
{
    machine_begin (&reader, "adam");
    return gq_checkpoint_init (&reader.core, path, error);
}

Test (checkpoint, init_takes_every_tensor_of_a_plain_file_in_its_order)
{
    const float b[] = {1, 2, 3}, a[] = {4, 5};
    const gq_tensor tensors[] = {tensor_of ("b", GQ_DTYPE_F32, 3, b),
                                 tensor_of ("a", GQ_DTYPE_F32, 2, a)};
    /* Metadata of other programs, with a word that ours uses too. */
    const gq_meta meta[] = {{"format", "pt"}, {"layout", "NCHW"}};
    char path[PATH_MAX];
    gq_error error = {""};
    writer_begin ("sgd", 0);
    write_plain (path, tensors, 2, meta, 2);
    cr_assert_eq (init (path, &error), GQ_OK, "%s", error.text);
    cr_assert_eq (reader.core.layout.tensor_count, 2);
    cr_assert_str_eq (reader.core.layout.tensors[0].name, "b");
    const float *weights = gq_buffers_current (reader.core.buffers);
    for (size_t i = 0; i < 5; i++)
        cr_assert_eq (weights[i], (float)(i + 1));
    cr_assert_eq (reader.core.version, 0);
    cr_assert (reader.core.has_weights);
    machine_end (&reader);
    finish ();
}

Test (checkpoint, init_takes_the_parameters_of_a_checkpoint_and_starts_at_version_0)
{
    char path[PATH_MAX];
    gq_error error = {""};
    writer_begin ("adam", 4);
    write_kept (KEPT, path);
    cr_assert_eq (init (path, &error), GQ_OK, "%s", error.text);
    cr_assert_eq (reader.core.layout.digest, writer.core.layout.digest);
    expect_same_weights ();
    cr_assert_eq (reader.core.version, 0);
    cr_assert_eq (reader.core.applied, 0);
    cr_assert_eq (gq_rule_steps (reader.rule), 0);
    machine_end (&reader);
    finish ();
}

Test (checkpoint, init_refuses_a_damaged_checkpoint)
{
    char path[PATH_MAX];
    uint8_t *bytes;
    gq_error error = {""};
    writer_begin ("adam", 4);
    write_kept (KEPT, path);
    const size_t size = support_read (path, &bytes);
    bytes[size - N * 4 * 2 - 1] ^= 0x10; /* in the last byte of the weights */
    support_write (path, bytes, size);
    cr_assert_eq (init (path, &error), GQ_MALFORMED);
    cr_assert_not_null (strstr (error.text, path), "%s", error.text);
    machine_end (&reader);
    free (bytes);
    finish ();
}

static void
expect_init_refused (const gq_tensor *tensors, size_t count, gq_status expected)
{
    char path[PATH_MAX];
    gq_error error = {""};
    write_plain (path, tensors, count, NULL, 0);
    cr_assert_eq (init (path, &error), expected, "%s", error.text);
    cr_assert_not_null (strstr (error.text, path), "%s", error.text);
    cr_assert_eq (reader.core.layout.tensor_count, 0);
    cr_assert_not (reader.core.has_weights);
    machine_end (&reader);
}

Test (checkpoint, init_refuses_what_cannot_be_trained)
{
    const float bad[] = {1, INFINITY}, good[] = {1, 2};
    const double wide[] = {1, 2};
    char name[GQ_NAME_MAX + 1];
    memset (name, 'n', GQ_NAME_MAX);
    name[GQ_NAME_MAX] = '\0';
    const gq_tensor infinite = tensor_of ("a", GQ_DTYPE_F32, 2, bad);
    const gq_tensor doubles = tensor_of ("a", GQ_DTYPE_F64, 2, wide);
    const gq_tensor named = tensor_of (name, GQ_DTYPE_F32, 2, good);
    gq_error error = {""};
    writer_begin ("sgd", 0);
    expect_init_refused (&infinite, 1, GQ_INVALID);
    expect_init_refused (&doubles, 1, GQ_INVALID);
    expect_init_refused (&named, 1, GQ_INVALID);
    expect_init_refused (NULL, 0, GQ_INVALID);
    cr_assert_eq (init ("/nonexistent.safetensors", &error), GQ_NOTFOUND);
    machine_end (&reader);
    finish ();
}

Test (checkpoint, names_that_a_slot_needs_are_refused_before_training_begins)
{
    const float data[] = {1, 2};
    const gq_tensor tensors[] = {tensor_of ("x", GQ_DTYPE_F32, 2, data),
                                 tensor_of ("exp_avg.x", GQ_DTYPE_F32, 2, data)};
    writer_begin ("sgd", 0);
    expect_init_refused (tensors, 2, GQ_INVALID);
    finish ();
}

Test (checkpoint, resuming_under_a_rule_whose_slots_clash_with_names_is_refused)
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
