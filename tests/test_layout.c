/*
 * Layout: what it accepts, and a digest that two different models do not share.
 */
#include "support.h"

#include <xxhash.h>

#include "layout.h"

TestSuite (layout, .timeout = 60);

static gq_tensor_shape
shape_of (const char *name, uint32_t rank, uint64_t a, uint64_t b)
{
    gq_tensor_shape shape = {.rank = rank, .shape = {a, b}};
    snprintf (shape.name, sizeof shape.name, "%s", name);
    return shape;
}

static uint64_t
digest_of (const gq_tensor_shape *tensors, size_t count)
{
    gq_layout layout;
    gq_error error = {""};
    cr_assert_eq (gq_layout_init (&layout, tensors, count, &error), GQ_OK, "%s", error.text);
    const uint64_t digest = layout.digest;
    gq_layout_clear (&layout);
    cr_assert_null (layout.tensors);
    return digest;
}

Test (layout, the_digest_is_xxh64_of_names_ranks_and_sizes)
{
    /* docs/PROTOCOL.md: name, NUL, rank and sizes as unsigned 64-bit little-endian numbers. */
    const gq_tensor_shape tensors[] = {shape_of ("w", 2, 2, 3), shape_of ("bias", 0, 0, 0)};
    static const uint8_t text[] = {'w', 0,   2,   0,   0, 0, 0, 0, 0, 0, 2, 0, 0,
                                   0,   0,   0,   0,   0, 3, 0, 0, 0, 0, 0, 0, 0,
                                   'b', 'i', 'a', 's', 0, 0, 0, 0, 0, 0, 0, 0, 0};
    cr_assert_eq (digest_of (tensors, 2), XXH64 (text, sizeof text, 0));
}

Test (layout, layouts_that_differ_in_anything_have_other_digests)
{
    const gq_tensor_shape cases[][2] = {
        {shape_of ("a", 2, 2, 3), shape_of ("b", 1, 6, 0)},
        {shape_of ("a", 2, 3, 2), shape_of ("b", 1, 6, 0)},
        {shape_of ("a", 1, 6, 0), shape_of ("b", 1, 6, 0)},
        {shape_of ("b", 1, 6, 0), shape_of ("a", 2, 2, 3)},
        {shape_of ("a", 2, 2, 3), shape_of ("B", 1, 6, 0)},
        {shape_of ("a", 2, 2, 3), shape_of ("b", 1, 7, 0)},
        {shape_of ("ab", 2, 2, 3), shape_of ("b", 1, 6, 0)},
        {shape_of ("a", 2, 2, 3), shape_of ("b", 2, 6, 1)},
    };
    const size_t count = sizeof cases / sizeof cases[0];
    for (size_t i = 0; i < count; i++) {
        cr_assert_neq (digest_of (cases[i], 1), digest_of (cases[i], 2));
        for (size_t k = 0; k < i; k++)
            cr_assert_neq (digest_of (cases[i], 2), digest_of (cases[k], 2), "%zu and %zu", i, k);
    }
}

Test (layout, what_lies_behind_a_name_or_a_rank_does_not_count)
{
    gq_tensor_shape clean = shape_of ("w", 1, 3, 0), dirty = clean;
    memset (dirty.name + 2, 'x', sizeof dirty.name - 2);
    dirty.shape[1] = 99;
    cr_assert_eq (digest_of (&clean, 1), digest_of (&dirty, 1));
}

Test (layout, elements_are_the_products_of_the_sizes_and_1_for_a_scalar)
{
    const gq_tensor_shape tensors[] = {shape_of ("a", 2, 7, 5), shape_of ("b", 0, 0, 0)};
    gq_layout layout;
    cr_assert_eq (gq_tensor_elements (&tensors[0]), 35);
    cr_assert_eq (gq_tensor_elements (&tensors[1]), 1);
    cr_assert_eq (gq_layout_init (&layout, tensors, 2, NULL), GQ_OK);
    cr_assert_eq (layout.element_count, 36);
    gq_layout_clear (&layout);
}

static void
expect_refused (const gq_tensor_shape *tensors, size_t count, const char *what)
{
    gq_layout layout;
    gq_error error = {""};
    memset (&layout, 0x55, sizeof layout);
    const gq_layout before = layout;
    cr_assert_eq (gq_layout_init (&layout, tensors, count, &error), GQ_INVALID, "%s", what);
    cr_assert_str_not_empty (error.text, "%s", what);
    cr_assert_eq (layout.tensors, before.tensors, "%s", what);
    cr_assert_eq (layout.digest, before.digest, "%s", what);
    cr_assert_eq (gq_layout_init (&layout, tensors, count, NULL), GQ_INVALID);
}

Test (layout, every_bound_holds_and_what_lies_on_it_is_allowed)
{
    static gq_tensor_shape many[GQ_TENSORS_MAX + 1];
    const uint64_t most = GQ_PARAMETERS_MAX;
    for (size_t i = 0; i <= GQ_TENSORS_MAX; i++) {
        many[i] = shape_of ("", 0, 0, 0);
        snprintf (many[i].name, sizeof many[i].name, "t%zu", i);
    }
    digest_of (many, GQ_TENSORS_MAX);
    expect_refused (many, GQ_TENSORS_MAX + 1, "too many tensors");
    expect_refused (many, 0, "none");
    gq_tensor_shape two[] = {shape_of ("a", 1, most, 0), shape_of ("b", 1, 1, 0)};
    digest_of (two, 1);
    expect_refused (two, 2, "one element too many in all");
    two[0].shape[0] = most - 1;
    digest_of (two, 2);
    gq_tensor_shape one = shape_of ("a", 2, most, 2);
    expect_refused (&one, 1, "too many in one tensor");
    one.shape[0] = UINT64_MAX / 2 + 1; /* times 2 is 0 */
    expect_refused (&one, 1, "a product that wraps");
    one = shape_of ("a", 1, 0, 0);
    expect_refused (&one, 1, "no elements");
    one = shape_of ("a", GQ_RANK_MAX + 1, 1, 1);
    expect_refused (&one, 1, "too many dimensions");
    one.rank = UINT32_MAX;
    expect_refused (&one, 1, "far too many dimensions");
    one = shape_of ("a", GQ_RANK_MAX, 1, 1);
    for (size_t i = 0; i < GQ_RANK_MAX; i++)
        one.shape[i] = 1;
    digest_of (&one, 1);
}

Test (layout, names_must_be_there_end_be_utf8_and_differ)
{
    gq_tensor_shape two[] = {shape_of ("same", 0, 0, 0), shape_of ("same", 1, 3, 0)};
    expect_refused (two, 2, "the same name twice");
    gq_tensor_shape one = shape_of ("", 0, 0, 0);
    expect_refused (&one, 1, "no name");
    memset (one.name, 'n', sizeof one.name);
    expect_refused (&one, 1, "a name without an end");
    one.name[GQ_NAME_MAX - 1] = '\0';
    digest_of (&one, 1);
    one = shape_of ("\xff\xfe", 0, 0, 0);
    expect_refused (&one, 1, "not UTF-8");
    one = shape_of ("__metadata__", 0, 0, 0);
    expect_refused (&one, 1, "safetensors' own word");
    one = shape_of ("schicht.größe", 0, 0, 0);
    digest_of (&one, 1);
}

Test (layout, json_there_and_back_is_the_same_layout)
{
    const gq_tensor_shape tensors[] = {shape_of ("w \"quoted\" \\", 2, 4, 5),
                                       shape_of ("größe", 0, 0, 0)};
    gq_layout layout, read;
    gq_error error = {""};
    cr_assert_eq (gq_layout_init (&layout, tensors, 2, NULL), GQ_OK);
    json_t *json = gq_layout_to_json (&layout);
    char *text = json_dumps (json, JSON_COMPACT);
    json_t *again = json_loads (text, 0, NULL);
    cr_assert_eq (gq_layout_from_json (&read, again, &error), GQ_OK, "%s", error.text);
    cr_assert_eq (read.digest, layout.digest);
    cr_assert_eq (read.element_count, layout.element_count);
    cr_assert_str_eq (read.tensors[0].name, tensors[0].name);
    cr_assert_eq (read.tensors[0].shape[1], 5);
    json_decref (json);
    json_decref (again);
    free (text);
    gq_layout_clear (&layout);
    gq_layout_clear (&read);
}

Test (layout, json_that_is_no_layout_is_refused_with_a_sentence)
{
    static const char *const texts[] = {
        "null",
        "{}",
        "[]",
        "\"w\"",
        "7",
        "[7]",
        "[null]",
        "[{}]",
        "[{\"name\": \"w\"}]",
        "[{\"shape\": [1]}]",
        "[{\"name\": 7, \"shape\": [1]}]",
        "[{\"name\": \"w\", \"shape\": 1}]",
        "[{\"name\": \"w\", \"shape\": {}}]",
        "[{\"name\": \"w\", \"shape\": [0]}]",
        "[{\"name\": \"w\", \"shape\": [-1]}]",
        "[{\"name\": \"w\", \"shape\": [1.0]}]",
        "[{\"name\": \"w\", \"shape\": [\"1\"]}]",
        "[{\"name\": \"w\", \"shape\": [null]}]",
        "[{\"name\": \"\", \"shape\": []}]",
        "[{\"name\": \"w\", \"shape\": [1,1,1,1,1,1,1,1,1]}]",
        "[{\"name\": \"w\", \"shape\": [4294967296, 4294967296]}]",
        "[{\"name\": \"w\", \"shape\": [9223372036854775807, 2]}]",
        "[{\"name\": \"w\", \"shape\": []}, {\"name\": \"w\", \"shape\": []}]",
        "[{\"name\": \"w\", \"shape\": []}, 7]"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        gq_layout layout;
        gq_error error = {""};
        json_t *json = json_loads (texts[i], JSON_DECODE_ANY, NULL);
        cr_assert_not_null (json, "%s", texts[i]);
        cr_assert_eq (gq_layout_from_json (&layout, json, &error), GQ_INVALID, "%s", texts[i]);
        cr_assert_str_not_empty (error.text, "%s", texts[i]);
        json_decref (json);
    }
    gq_layout layout;
    cr_assert_eq (gq_layout_from_json (&layout, NULL, NULL), GQ_INVALID);
}

Test (layout, json_with_a_name_or_list_past_its_bound_is_refused)
{
    char name[GQ_NAME_MAX + 1];
    gq_layout layout;
    memset (name, 'n', GQ_NAME_MAX);
    name[GQ_NAME_MAX] = '\0';
    json_t *json = json_pack ("[{s:s, s:[]}]", "name", name, "shape");
    cr_assert_eq (gq_layout_from_json (&layout, json, NULL), GQ_INVALID);
    json_decref (json);
    json = json_array ();
    for (int i = 0; i <= GQ_TENSORS_MAX; i++)
        json_array_append_new (json, json_pack ("{s:s, s:[]}", "name", "w", "shape"));
    cr_assert_eq (gq_layout_from_json (&layout, json, NULL), GQ_INVALID);
    json_decref (json);
}
