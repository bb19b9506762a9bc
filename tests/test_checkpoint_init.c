/*
 * --init: first weights from any safetensors file, and what is no start for a run.
 */
#include "checkpoint_testing.h"

TestSuite (checkpoint_init, .timeout = 60);

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

Test (checkpoint_init, init_takes_every_tensor_of_a_plain_file_in_its_order)
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

Test (checkpoint_init, init_takes_the_parameters_of_a_checkpoint_and_starts_at_version_0)
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

Test (checkpoint_init, init_refuses_a_damaged_checkpoint)
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

Test (checkpoint_init, init_refuses_what_cannot_be_trained)
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

Test (checkpoint_init, names_that_a_slot_needs_are_refused_before_training_begins)
{
    const float data[] = {1, 2};
    const gq_tensor tensors[] = {tensor_of ("x", GQ_DTYPE_F32, 2, data),
                                 tensor_of ("exp_avg.x", GQ_DTYPE_F32, 2, data)};
    writer_begin ("sgd", 0);
    expect_init_refused (tensors, 2, GQ_INVALID);
    finish ();
}

/* A state file of the writer's rule; `without` leaves out what begins so, and `slot` (NULL: the
 * writer's) takes the place of the first slot. */
static void
write_state (char path[PATH_MAX], const char *rule, const char *without, const float *slot)
{
    enum { PARTS = 6 };
    static const char *const names[PARTS] = {"pi.weight",
                                             "pi.bias",
                                             "exp_avg.pi.weight",
                                             "exp_avg.pi.bias",
                                             "exp_avg_sq.pi.weight",
                                             "exp_avg_sq.pi.bias"};
    const float *from[3] = {gq_buffers_current (writer.core.buffers), gq_rule_slot (writer.rule, 0),
                            gq_rule_slot (writer.rule, 1)};
    const char *const layout = "[{\"name\": \"pi.weight\", \"shape\": [2, 3]},"
                               " {\"name\": \"pi.bias\", \"shape\": []}]";
    const gq_meta all[] = {{"format", GQ_CHECKPOINT_STATE},
                           {"optimizer", rule},
                           {"layout", layout},
                           {"optimizer_steps", "4"},
                           {"scalar.beta1_power", "0.65625"},
                           {"scalar.beta2_power", "0.9375"}};
    gq_tensor tensors[PARTS];
    gq_meta meta[sizeof all / sizeof all[0]];
    size_t count = 0, meta_count = 0;
    if (slot != NULL)
        from[1] = slot;
    for (size_t i = 0; i < PARTS; i++)
        if (without == NULL || strncmp (names[i], without, strlen (without)) != 0)
            tensors[count++] = tensor_of (names[i], GQ_DTYPE_F32, i % 2 == 0 ? 6 : 1,
                                          from[i / 2] + (i % 2 == 0 ? 0 : 6));
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        if (without == NULL || strncmp (all[i].key, without, strlen (without)) != 0)
            meta[meta_count++] = all[i];
    write_plain (path, tensors, count, meta, meta_count);
}

Test (checkpoint_init, a_state_file_brings_weights_slots_scalars_and_steps)
{
    char path[PATH_MAX];
    gq_error error = {""};
    writer_begin ("adam", 4);
    write_state (path, "adam", NULL, NULL);
    cr_assert_eq (init (path, &error), GQ_OK, "%s", error.text);
    cr_assert_eq (reader.core.layout.digest, writer.core.layout.digest);
    expect_same_weights ();
    for (size_t i = 0; i < 2; i++)
        expect_same_bits (gq_rule_slot (writer.rule, i), gq_rule_slot (reader.rule, i), "a slot");
    cr_assert_eq (gq_rule_scalars (reader.rule)[0], 0.65625);
    cr_assert_eq (gq_rule_scalars (reader.rule)[1], 0.9375);
    cr_assert_eq (gq_rule_steps (reader.rule), 4);
    cr_assert_eq (reader.core.version, 0);
    cr_assert_eq (reader.core.applied, 0);
    machine_end (&reader);
    finish ();
}

static void
expect_state_refused (const char *rule, const char *without, const float *slot, gq_status expected,
                      const char *words)
{
    char path[PATH_MAX];
    gq_error error = {""};
    write_state (path, rule, without, slot);
    cr_assert_eq (init (path, &error), expected, "%s", error.text);
    cr_assert_not_null (strstr (error.text, words), "%s", error.text);
    cr_assert_not_null (strstr (error.text, path), "%s", error.text);
    machine_end (&reader);
}

Test (checkpoint_init, a_state_file_is_whole_finite_and_of_the_same_rule)
{
    const float bad[N] = {0, NAN};
    writer_begin ("adam", 4);
    expect_state_refused ("adamw", NULL, NULL, GQ_INVALID, "--optimizer adamw");
    expect_state_refused ("adam", NULL, bad, GQ_INVALID, "NaN");
    expect_state_refused ("adam", "exp_avg_sq.pi.bias", NULL, GQ_MALFORMED, "rule adam");
    expect_state_refused ("adam", "scalar.beta2", NULL, GQ_MALFORMED, "rule adam");
    expect_state_refused ("adam", "optimizer_steps", NULL, GQ_MALFORMED, "rule adam");
    expect_state_refused ("adam", "optimizer", NULL, GQ_MALFORMED, "\"optimizer\"");
    expect_state_refused ("adam", "layout", NULL, GQ_MALFORMED, "\"layout\"");
    expect_state_refused ("adam", "pi.bias", NULL, GQ_MALFORMED, "pi.bias");
    finish ();
}
