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
